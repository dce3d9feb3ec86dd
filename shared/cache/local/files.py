"""What is in the folder: files of records, and what its processes counted together."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from shared.cache.local.users import USERS, open_folder

#: what the processes of a folder counted together, in the order of its file
COUNTS = ("hit", "gone", "stored", "evicted", "busy", "recent")
_COUNTS = struct.Struct(f"<{len(COUNTS)}Q")
_COUNT_FILE = "counts"
#: whoever writes holds it
LOCK = "lock"
#: how the name of a file ends that is being written
UNFINISHED = ".new"
_NO_RECORDS = {USERS, LOCK, _COUNT_FILE}


@dataclass(frozen=True)
class File:
    """A record's file.

    Attributes:
        used_at: when Redis was last seen to have the record, of ``time.time``; kept as the file's time.
        nbytes: memory that it takes.
        name: in the folder.
    """

    used_at: float
    nbytes: int
    name: str


@dataclass(frozen=True)
class Usage:
    """What a folder holds.

    Attributes:
        records: files.
        nbytes: memory that they take.
        counts: by :data:`COUNTS`, since the folder was made.
    """

    records: int
    nbytes: int
    counts: Mapping[str, int]


def name_of(key: str) -> str:
    """Name of a record's file, which tells nothing about it."""
    return blake3(key.encode()).hexdigest()


def files(folder: int, *, unfinished: bool = False) -> Iterator[File]:
    """All files of records, if asked for also those that are being written, in no order."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in _NO_RECORDS or (entry.name.endswith(UNFINISHED) and not unfinished):
                continue
            with suppress(OSError):  # unlinked meanwhile
                about = entry.stat(follow_symlinks=False)
                yield File(about.st_mtime, about.st_blocks * 512, entry.name)


def usage(folder: int) -> Usage:
    """What an open folder holds."""
    found = list(files(folder))
    return Usage(len(found), sum(file.nbytes for file in found), _counted(folder))


def usage_of(path: Path) -> Usage | None:
    """What a folder holds, without using it; None when there is none, or it cannot be trusted."""
    try:
        folder = open_folder(path)
    except OSError:
        return None
    try:
        return usage(folder)
    finally:
        os.close(folder)


def add(folder: int, counts: Counter[str]) -> None:
    """Adds to the common counts; for whoever may write."""
    if not any(counts.values()):
        return
    total = _counted(folder)
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(_COUNT_FILE, flags, 0o600, dir_fd=folder)
        try:
            os.pwrite(file, _COUNTS.pack(*(total[name] + counts[name] for name in COUNTS)), 0)
        finally:
            os.close(file)


def _counted(folder: int) -> dict[str, int]:
    with suppress(OSError, struct.error):
        file = os.open(_COUNT_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            return dict(zip(COUNTS, _COUNTS.unpack(os.read(file, _COUNTS.size)), strict=True))
        finally:
            os.close(file)
    return dict.fromkeys(COUNTS, 0)
