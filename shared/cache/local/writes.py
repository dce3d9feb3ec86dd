"""How files of records come and go: written by one process at a time, whole or not at all."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shared.cache.local.files import LOCK, UNFINISHED, add, files, name_of
from shared.cache.local.locks import locked
from shared.keys import Buffer
from shared.records import HEADER_BYTES

#: a record above this share of the room would push out everybody else's
LARGEST_SHARE = 4


class Writes:
    """Writes of one process, by one of its threads.

    Args:
        folder: its descriptor.
        limit: bytes that the files may take, all processes' together.
    """

    def __init__(self, folder: int, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def put(self, key: str, record: Buffer, when: float) -> Counter[str]:
        """Stores a record that was checked, unless it is too large or another process writes just now.

        Args:
            key: of the record.
            record: the whole of it.
            when: Redis had it, of ``time.time``.

        Returns:
            What happened, by :data:`~shared.cache.local.files.COUNTS`.
        """
        if len(record) * LARGEST_SHARE > self._limit:
            return Counter()
        with self._writing() as mine:
            if not mine:
                return Counter(busy=1)
            name = name_of(key)
            if self._has(name, record):  # stored by another process that fetched it at the same time
                return Counter()
            evicted = self._make_room(_pages(len(record)), idle=None)
            stored = self._write(name, record, when)
            return Counter(stored=int(stored), evicted=evicted)

    def sweep(self, idle: float, counts: Counter[str]) -> int:
        """Unlinks what Redis was not seen to have for ``idle`` seconds, and moves ``counts`` into the common ones.

        Returns:
            How many files went; nothing is done while another process writes.
        """
        with self._writing() as mine:
            if not mine:
                return 0
            add(self._folder, counts)
            counts.clear()
            return self._make_room(0, idle)

    @contextmanager
    def _writing(self) -> Iterator[bool]:
        """Whether this process may write now. Unfinished files of others are then those of the dead."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(LOCK, flags, 0o600, dir_fd=self._folder)
        except OSError:  # somebody removed the folder
            yield False
            return
        try:
            yield locked(lock, fcntl.LOCK_EX)
        finally:
            os.close(lock)

    def _make_room(self, nbytes: int, idle: float | None) -> int:
        """Unlinks unfinished, idle, and then the longest unused files until ``nbytes`` more fit; how many records."""
        found = sorted(files(self._folder, unfinished=True), key=lambda file: file.used_at)
        held, gone, now = sum(file.nbytes for file in found), 0, time.time()
        for file in found:
            unfinished = file.name.endswith(UNFINISHED)
            if unfinished or held + nbytes > self._limit or (idle is not None and now - file.used_at > idle):
                with suppress(OSError):
                    os.unlink(file.name, dir_fd=self._folder)
                held -= file.nbytes
                gone += not unfinished
        return gone

    def _has(self, name: str, record: Buffer) -> bool:
        """Whether the same record is there: one with the same header, which holds the payload's checksum."""
        with suppress(OSError):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
            try:
                whole = os.fstat(file).st_size == len(record)
                return whole and os.pread(file, HEADER_BYTES, 0) == memoryview(record)[:HEADER_BYTES]
            finally:
                os.close(file)
        return False

    def _write(self, name: str, record: Buffer, when: float) -> bool:
        unfinished = name + UNFINISHED
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(unfinished, flags, 0o400, dir_fd=self._folder)
            try:
                rest = memoryview(record)
                while rest:
                    rest = rest[os.write(file, rest) :]
                os.utime(file, (when, when))
            finally:
                os.close(file)
            os.rename(unfinished, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:  # the memory is full: by others, since our own limit was kept
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=self._folder)
            return False
        return True


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
