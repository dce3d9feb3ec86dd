"""The node's tier under processes that write together, are stopped and are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shared.cache.local import SHARED_MEMORY, Folder, remove_unused
from shared.records import check_record
from tests.shared.local_kit import LIMIT, put
from tests.shared.redis_kit import LARGE, key, record
from tests.shared.tier_worker import RECORDS

ROOT = Path(__file__).parents[2]


def _workers(stack: ExitStack, path: Path, count: int) -> list[subprocess.Popen[str]]:
    made = []
    for number in range(count):
        command = [sys.executable, "-m", "tests.shared.tier_worker", str(path), str(LIMIT), str(number * RECORDS)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        made.append(process)
    for process in made:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    return made


def _held(path: Path) -> int:
    total = 0
    for file in path.iterdir():
        try:
            total += file.stat().st_blocks * 512 if file.name[:1] not in "ulc" or len(file.name) > 8 else 0
        except FileNotFoundError:
            continue
    return total


def test_the_limit_holds_under_concurrent_writers(folder: Folder, tier_path: Path) -> None:
    """Three processes write three times the limit, unfinished files included; what is read is right."""
    with ExitStack() as stack:
        _workers(stack, tier_path, 3)
        end, read = time.monotonic() + 1.5, 0
        while time.monotonic() < end:
            # a file that is renamed during the walk may be seen twice
            assert _held(tier_path) <= LIMIT + 2 * len(record(0, **LARGE))
            name = random.randrange(3 * RECORDS)
            if (view := folder.get(key(name))) is not None:
                check_record(view, key(name))
                read += 1
        assert read > 20
    assert _held(tier_path) <= LIMIT


def _kill_writers(folder: Folder, path: Path, rounds: int) -> None:
    """SIGKILL at any moment: no half record is found, no lock stays, no unfinished file outlives the next write."""
    rng = random.Random(3)
    unfinished = 0
    fork = multiprocessing.get_context("fork")
    made = [(key(name), record(name, tokens=900, width=1152)) for name in range(3)]
    for _ in range(rounds):
        ready = fork.Event()
        child = fork.Process(target=_write_for_ever, args=(path, made, ready))
        child.start()
        assert ready.wait(20)
        time.sleep(0.01 * rng.random())
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        unfinished += any(file.name.endswith(".new") for file in path.iterdir())
        for name in range(20):
            if (view := folder.get(key(name))) is not None:
                check_record(view, key(name))
        folder.drop(key("after"))
        begin = time.monotonic()
        assert put(folder, "after").get("stored") == 1, "a lock stayed"
        assert time.monotonic() - begin < 2
        assert not any(file.name.endswith(".new") for file in path.iterdir())
        assert folder.usage().nbytes <= LIMIT
    print(f"{unfinished} of {rounds} were killed in the middle of a record")
    assert unfinished > rounds / 20


def _write_for_ever(path: Path, made: list[tuple[str, bytes]], ready: Any) -> None:
    folder = Folder(path, LIMIT)
    ready.set()
    while True:
        for name, value in made:
            folder.drop(name)
            folder.put(name, value, time.time())


def test_killed_writers_leave_nothing_behind(folder: Folder, tier_path: Path) -> None:
    _kill_writers(folder, tier_path, 25)


@pytest.mark.slow
def test_1000_killed_writers_leave_nothing_behind(folder: Folder, tier_path: Path) -> None:
    _kill_writers(folder, tier_path, 1000)


def test_a_stopped_writer_stops_nobody(folder: Folder, tier_path: Path) -> None:
    """SIGSTOP with the lock held: others leave their records to Redis."""
    with ExitStack() as stack:
        (worker,) = _workers(stack, tier_path, 1)
        for _ in range(200):
            time.sleep(0.01 * random.random())
            worker.send_signal(signal.SIGSTOP)
            if put(folder, "mine") == {"busy": 1}:
                break
            worker.send_signal(signal.SIGCONT)
        else:
            raise AssertionError("never stopped while it held the lock")
        for name in range(RECORDS):
            if (view := folder.get(key(name))) is not None:
                check_record(view, key(name))


def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay(folder: Folder, tier_path: Path) -> None:
    with ExitStack() as stack:
        dead = SHARED_MEMORY / f"lookonce-{os.geteuid()}-test{random.getrandbits(32):x}"
        (worker,) = _workers(stack, dead, 1)
        remove_unused()
        assert dead.exists()
        worker.kill()
        worker.wait()
        remove_unused()
        assert not dead.exists()
    put(folder, 1)
    assert folder.get(key(1)) is not None
