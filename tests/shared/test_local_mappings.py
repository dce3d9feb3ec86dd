"""What a process keeps mapped of the node's tier: real shared memory, real processes."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from shared.cache.local import SHARED_MEMORY, Folder, remove_unused
from shared.cache.local.folder import MAPPED_SHARE
from shared.records import check_record, encode_record
from shared.sizing import Grid
from tests.shared.redis_kit import LARGE, embedding, key, record

ROOT = Path(__file__).parents[2]
LIMIT = 32 << 20


@pytest.fixture
def folder() -> Iterator[Folder]:
    path = SHARED_MEMORY / f"lookonce-test-{os.getpid()}-{random.getrandbits(32):x}"
    made = Folder(path, LIMIT)
    yield made
    made.close()
    remove_unused(path)
    assert not path.exists()


def put(folder: Folder, name: object, when: float | None = None) -> None:
    assert folder.put(key(name), record(name, **LARGE), time.time() if when is None else when)["stored"] == 1


def mapped_here() -> int:
    """Shared memory that the kernel counts for this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem")) << 10


def test_a_process_maps_a_record_once(folder: Folder) -> None:
    put(folder, 1)
    first = folder.get(key(1))
    assert first is not None
    assert folder.get(key(1)) is first
    folder.confirm(key(1), first, time.time())
    assert folder.mappings.nbytes == len(first)


def test_the_pages_of_a_confirmed_record_are_there(folder: Folder) -> None:
    put(folder, 1)
    before = mapped_here()
    view = folder.get(key(1))
    assert view is not None
    assert mapped_here() - before < len(view) / 2
    folder.confirm(key(1), view, time.time())
    assert mapped_here() - before >= len(view)
    folder.mappings.clear()
    del view
    assert mapped_here() - before < 1 << 16, "given back"


def test_what_another_process_replaced_is_mapped_anew(folder: Folder) -> None:
    put(folder, 1)
    old = folder.get(key(1))
    other = encode_record(key(1), embedding("other", **LARGE), Grid(2, 2 * LARGE["tokens"]), 2)
    code = (
        "import sys, time; from pathlib import Path; from shared.cache.local import Folder\n"
        "folder = Folder(Path(sys.argv[1]), int(sys.argv[2]))\n"
        "print(folder.put(sys.argv[3], sys.stdin.buffer.read(), time.time())['stored'])"
    )
    command = [sys.executable, "-c", code, str(folder.path), str(LIMIT), key(1)]
    assert subprocess.run(command, cwd=ROOT, input=other, stdout=subprocess.PIPE, check=True).stdout == b"1\n"
    assert folder.get(key(1)) == other
    assert old == record(1, **LARGE), "who reads the old one goes on"
    assert folder.mappings.nbytes == len(other)


def test_a_record_that_is_there_is_not_written_again(folder: Folder) -> None:
    put(folder, 1)
    view = folder.get(key(1))
    assert not folder.put(key(1), record(1, **LARGE), time.time())["stored"]
    assert folder.get(key(1)) is view


def test_unlinked_files_are_let_go(folder: Folder) -> None:
    """By another process, and unnoticed until the next sweep."""
    for name in range(3):
        put(folder, name)
        assert folder.get(key(name)) is not None
    held = folder.mappings.nbytes
    other = Folder(folder.path, LIMIT)
    other.drop(key(0))
    other.drop(key(1))
    other.close()
    folder.sweep(1000, Counter())
    assert folder.mappings.nbytes == held // 3
    assert folder.get(key(2)) is not None
    folder.drop(key(2))
    assert folder.mappings.nbytes == 0


def test_what_stays_mapped_is_bounded_and_the_longest_unused_go(folder: Folder) -> None:
    names = range(LIMIT // 2 // len(record(0, **LARGE)))
    for name in names:
        put(folder, name)
    before = mapped_here()
    for name in names:
        view = folder.get(key(name))
        assert view is not None
        folder.confirm(key(name), view, time.time())
        assert folder.get(key(0)) is not None
        assert folder.mappings.nbytes <= LIMIT // MAPPED_SHARE
    del view
    assert LIMIT // MAPPED_SHARE - LIMIT // 16 < mapped_here() - before <= LIMIT // MAPPED_SHARE + (1 << 20)
    kept, gone = folder.get(key(0)), folder.mappings.used_at(key(1))
    assert folder.get(key(0)) is kept, "used again and again"
    assert gone == 0.0


def test_views_outlive_their_mapping_and_their_file(folder: Folder) -> None:
    put(folder, 1)
    view = folder.get(key(1))
    assert view is not None
    folder.drop(key(1))
    for name in range(2, 12):
        put(folder, name)
        folder.get(key(name))
    check_record(view, key(1))
    assert view == record(1, **LARGE)


def test_threads_that_read_while_records_come_and_go(folder: Folder) -> None:
    """Right bytes or none, and the count of bytes stays true."""
    made = [(key(name), record(name, **LARGE)) for name in range(8)]
    stop = threading.Event()

    def read() -> int:
        rng, found = random.Random(), 0
        while not stop.is_set():
            name = rng.randrange(8)
            if (view := folder.get(key(name))) is not None:
                folder.confirm(key(name), view, time.time())
                check_record(view, key(name))
                found += 1
        return found

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(read) for _ in range(4)]
        end = time.monotonic() + 1.5
        for turn, (name, value) in enumerate(itertools.cycle(made)):
            if turn % 3 == 0:
                folder.drop(name)
            folder.put(name, value, time.time())
            if turn % 16 == 0:
                folder.sweep(1000, Counter())
            if time.monotonic() > end:
                break
        stop.set()
        assert all(reader.result() for reader in readers)
    assert 0 <= folder.mappings.nbytes <= LIMIT // MAPPED_SHARE
    folder.sweep(-1, Counter())
    assert folder.mappings.nbytes == 0


def test_no_descriptor_stays_open(folder: Folder) -> None:
    put(folder, 1)
    before = psutil.Process().num_fds()
    for _ in range(50):
        assert folder.get(key(1)) is not None
        folder.mappings.clear()
        assert folder.get(key("absent")) is None
    assert psutil.Process().num_fds() == before
    assert np.frombuffer(folder.get(key(1)), np.uint8).size == len(record(1, **LARGE))
