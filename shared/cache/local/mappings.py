"""Files of records in this process's memory. Those used last stay mapped: mapping is nearly all that a use costs."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

from shared.cache.local.files import name_of
from shared.cache.local.users import private
from shared.records import HEADER_BYTES, RecordError, read_header

#: maps all pages at once (Linux 5.14); where it is not known, they come when they are read
_MADV_POPULATE_READ = 22


@dataclass
class _Mapping:
    """A file that this process has in its memory.

    Attributes:
        inode: of the file, which nobody else's can be as long as it is mapped.
        view: the record, read-only.
        used_at: the file's time when we last looked, of ``time.time``.
        populated: whether its pages are there.
    """

    inode: int
    view: memoryview
    used_at: float
    populated: bool = False


class Mappings:
    """The mapped files of a folder. Safe in several threads.

    Args:
        folder: its descriptor.
        limit: bytes of files that stay mapped although nobody uses them. They count as shared memory of this
            process (``RssShmem``), and of a file that was unlinked meanwhile they keep the memory until :meth:`prune`.
    """

    def __init__(self, folder: int, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        #: by name, the last used at the end
        self._kept: OrderedDict[str, _Mapping] = OrderedDict()
        self._bytes = 0

    def get(self, key: str) -> memoryview | None:
        """A record in place, with its header checked; None when it is not here."""
        name = name_of(key)
        about = self._about(name)
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None and about is not None and kept.inode == about.st_ino:
                kept.used_at = about.st_mtime
                self._kept.move_to_end(name)
                return kept.view
            self._forget(name)
        made = None if about is None else self._mapped(name, key)
        if made is None:
            return None
        with self._lock:
            self._forget(name)  # another thread may have been as fast
            self._kept[name] = made
            self._bytes += len(made.view)
            while self._bytes > self._limit:
                self._forget(next(iter(self._kept)))
        return made.view

    def populate(self, key: str, view: memoryview) -> None:
        """Maps the pages of what :meth:`get` gave, unless they are there: at once, rather than one by one when they are
        read.
        """
        with self._lock:
            kept = self._kept.get(name_of(key))
            if kept is not None and kept.view is view:
                if kept.populated:
                    return
                kept.populated = True
        with suppress(OSError, AttributeError):
            view.obj.madvise(_MADV_POPULATE_READ)  # type: ignore[attr-defined]

    def used_at(self, key: str) -> float:
        """The file's time when :meth:`get` last looked; 0 when it is not mapped."""
        with self._lock:
            kept = self._kept.get(name_of(key))
            return 0.0 if kept is None else kept.used_at

    def forget(self, key: str) -> None:
        """Lets go of a record; views that somebody holds stay good."""
        with self._lock:
            self._forget(name_of(key))

    def prune(self) -> None:
        """Lets go of files that are no longer in the folder."""
        with self._lock:
            names = list(self._kept)
        for name in names:
            about = self._about(name)
            with self._lock:
                kept = self._kept.get(name)
                if kept is not None and (about is None or about.st_ino != kept.inode):
                    self._forget(name)

    @property
    def nbytes(self) -> int:
        """Of the files that are mapped."""
        return self._bytes

    def clear(self) -> None:
        """Lets go of all, as :meth:`forget`."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def _forget(self, name: str) -> None:
        if (gone := self._kept.pop(name, None)) is not None:
            self._bytes -= len(gone.view)

    def _about(self, name: str) -> os.stat_result | None:
        """What is known about a file that can be trusted."""
        try:
            about = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return None
        return about if _trusted(about) else None

    def _mapped(self, name: str, key: str) -> _Mapping | None:
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError:
            return None
        try:
            about = os.fstat(file)  # of this very file: the name may be another's by now
            if not _trusted(about):
                return None
            view = memoryview(mmap.mmap(file, about.st_size, mmap.MAP_SHARED, mmap.PROT_READ))
            header = read_header(view[:HEADER_BYTES], key)
        except (OSError, RecordError):
            return None
        finally:
            os.close(file)
        if len(view) != HEADER_BYTES + header.payload_bytes:
            return None
        return _Mapping(about.st_ino, view, about.st_mtime)


def _trusted(about: os.stat_result) -> bool:
    return stat.S_ISREG(about.st_mode) and private(about) and about.st_size >= HEADER_BYTES
