"""A folder in shared memory whose files are records: read in place by many processes, written by one at a time.

A file appears whole or not at all (it is renamed into place), never changes afterwards, and may be unlinked while
others read it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from shared.cache.local.files import Usage, files, name_of, usage
from shared.cache.local.mappings import Mappings
from shared.cache.local.users import Unusable, enter, remove_unused
from shared.cache.local.writes import Writes
from shared.keys import Buffer

#: less room than this is not worth the files
LEAST_BYTES = 8 << 20
#: of the room stays mapped in each process at most
MAPPED_SHARE = 4
#: a use is noted so often at most, seconds
USE_SECONDS = 0.1


class Folder:
    """One process's use of the folder. Reads are safe in several threads; writes are one thread's.

    Args:
        path: made when it is missing; its parent must be a file system in memory.
        limit: bytes that the files may take, all processes' together; at most half of what is free when it is opened.

    Raises:
        Unusable: not there, somebody else's, open to others, a link, or without room.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        try:
            self._folder, self._users = enter(path)
            room = os.fstatvfs(self._folder)
        except OSError as error:
            raise Unusable(f"{path}: {error.strerror}") from error
        held = sum(file.nbytes for file in files(self._folder))
        self.limit = min(limit, (room.f_bavail * room.f_frsize + held) // 2)
        self.mappings = Mappings(self._folder, self.limit // MAPPED_SHARE)
        self._writes = Writes(self._folder, self.limit)
        if self.limit < LEAST_BYTES:
            self.close()
            raise Unusable(f"{path}: only {self.limit >> 20} MiB could be used")

    def get(self, key: str) -> memoryview | None:
        """A record in place, read-only, with its header checked; None when it is not here.

        The payload was checked before it came here. Since then nobody but this user could write to it.
        """
        return self.mappings.get(key)

    def age(self, key: str) -> float:
        """Seconds since Redis last had the record; infinite when it is not here."""
        try:
            used_at = os.stat(name_of(key), dir_fd=self._folder, follow_symlinks=False).st_mtime
        except OSError:
            return float("inf")
        age = time.time() - used_at
        return age if age >= 0 else float("inf")

    def confirm(self, key: str, view: memoryview, when: float) -> None:
        """Redis had the record at that time: it is the last to be evicted. Its pages are mapped for what comes next."""
        if when - self.mappings.used_at(key) > USE_SECONDS:
            with suppress(OSError):
                os.utime(name_of(key), (when, when), dir_fd=self._folder, follow_symlinks=False)
        self.mappings.populate(key, view)

    def drop(self, key: str) -> None:
        """Unlinks a record; who reads it goes on."""
        self.mappings.forget(key)
        with suppress(OSError):
            os.unlink(name_of(key), dir_fd=self._folder)

    def put(self, key: str, record: Buffer, when: float) -> Counter[str]:
        """Stores a record; see :meth:`~shared.cache.local.writes.Writes.put`."""
        return self._writes.put(key, record, when)

    def sweep(self, idle: float, counts: Counter[str]) -> int:
        """Unlinks what is idle; see :meth:`~shared.cache.local.writes.Writes.sweep`."""
        gone = self._writes.sweep(idle, counts)
        self.mappings.prune()
        return gone

    def usage(self) -> Usage:
        """What is here now."""
        return usage(self._folder)

    def close(self) -> None:
        """The last one out removes the folder; views stay good."""
        self.mappings.clear()
        os.close(self._users)
        os.close(self._folder)
        remove_unused(self.path)
