"""A folder of the node's tier by itself: real shared memory."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.cache.local import Folder, Unusable
from shared.records import HEADER_BYTES, decode_record
from tests.shared.local_kit import LIMIT, MIB, put
from tests.shared.redis_kit import LARGE, embedding, key, record


def test_a_record_is_read_in_place(folder: Folder, tier_path: Path) -> None:
    assert folder.get(key(1)) is None
    assert put(folder, 1, **LARGE) == {"stored": 1, "evicted": 0}
    other = Folder(tier_path, LIMIT)
    one, two = folder.get(key(1)), other.get(key(1))
    assert one is not None
    assert one == two == record(1, **LARGE)
    assert one.readonly
    folder.confirm(key(1), one, time.time())
    _, values = decode_record(one, key(1))
    assert values.data_ptr() == np.frombuffer(one, np.uint8).ctypes.data + HEADER_BYTES
    assert not values.data_ptr() % 64
    other.drop(key(1))
    assert folder.get(key(1)) is None
    other.close()
    folder.close()
    assert not tier_path.exists()
    assert torch.equal(values, embedding(1, **LARGE)), "who reads it goes on"
    folder.__init__(tier_path, LIMIT)  # type: ignore[misc]


def test_names_of_files_tell_nothing(folder: Folder, tier_path: Path) -> None:
    put(folder, 1)
    names = {file.name for file in tier_path.iterdir()}
    assert not any(part in name for name in names for part in key(1).split(":"))
    assert all(file.stat().st_mode & 0o077 == 0 for file in [tier_path, *tier_path.iterdir()])


def test_the_longest_unused_go_first_and_large_ones_never_come(folder: Folder) -> None:
    size = len(record(0, **LARGE))
    room = LIMIT // (-(-size // 4096) * 4096)
    now = time.time()
    for name in range(room):
        assert put(folder, name, now - 100 + name, **LARGE)["evicted"] == 0
    view = folder.get(key(0))
    assert view is not None
    folder.confirm(key(0), view, now)
    assert put(folder, "more", now, **LARGE)["evicted"] == 1
    assert folder.get(key(1)) is None
    assert folder.get(key(0)) is not None
    assert folder.usage().nbytes <= LIMIT
    assert put(folder, "large", tokens=1000, width=1152) == {}


def test_idle_records_go(folder: Folder) -> None:
    put(folder, "old", time.time() - 100)
    put(folder, "new")
    counts = Counter(hit=3)
    assert folder.sweep(50, counts) == 1
    assert folder.get(key("old")) is None
    assert folder.get(key("new")) is not None
    assert folder.usage().counts["hit"] == 3
    assert not counts


@pytest.mark.parametrize("what", ["link", "open to others", "file", "nowhere", "no room"])
def test_a_folder_that_cannot_be_trusted_is_not_used(what: str, tier_path: Path, tmp_path: Path) -> None:
    limit = LIMIT
    if what == "link":
        tier_path.symlink_to(tmp_path)
    elif what == "open to others":
        tier_path.mkdir()
        tier_path.chmod(0o755)
    elif what == "file":
        tier_path.touch()
    elif what == "nowhere":
        tier_path = tier_path / "deeper"
    else:
        limit = MIB
    with pytest.raises(Unusable):
        Folder(tier_path, limit)
    assert list(tmp_path.iterdir()) == []
    if tier_path.is_symlink() or tier_path.is_file():
        tier_path.unlink()
    elif tier_path.is_dir():
        tier_path.rmdir()


def test_files_that_cannot_be_trusted_are_not_read(folder: Folder, tier_path: Path, tmp_path: Path) -> None:
    """Links, files of others, cut ones, other keys' and none at all; nothing of it raises."""
    put(folder, 1)
    (file,) = [one for one in tier_path.iterdir() if len(one.name) == 64]
    good = file.read_bytes()
    elsewhere = tmp_path / "record"
    elsewhere.write_bytes(good)

    def replaced(data: bytes, mode: int = 0o400) -> memoryview | None:
        file.unlink(missing_ok=True)
        file.write_bytes(data)
        file.chmod(mode)
        return folder.get(key(1))

    assert replaced(good) == good
    assert replaced(good, 0o444) is None
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(good) - 1):
        assert replaced(good[:length]) is None, length
    assert replaced(good + b"\0") is None
    assert replaced(record(2)) is None
    for bit in range(8 * HEADER_BYTES):
        hurt = bytearray(good)
        hurt[bit // 8] ^= 1 << bit % 8
        assert replaced(bytes(hurt)) is None, bit
    file.unlink()
    file.symlink_to(elsewhere)
    assert folder.get(key(1)) is None
    file.unlink()
    file.mkdir()
    assert folder.get(key(1)) is None
    file.rmdir()
