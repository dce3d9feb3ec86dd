"""The node's own level in front of Redis: records in shared memory, each use confirmed by Redis.

A copy here is used when Redis still has a record with the same header, which carries the checksum of the payload: so
whatever was purged, evicted, expired or replaced there is gone here with the same answer. Only while Redis is silent
is a copy used unconfirmed, for ``grace`` seconds after Redis was last seen to have it. See
``docs/decisions/0005-local-tier.md``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from shared.cache.local.files import Usage
from shared.cache.local.folder import Folder
from shared.cache.local.users import Unusable, folder_of, remove_unused
from shared.cache.local.writer import Writer
from shared.cache.stats import CacheStats
from shared.config import LocalSettings
from shared.keys import Buffer
from shared.records import RecordHeader, read_header

logger = logging.getLogger(__name__)


class LocalTier:
    """One process's use of the node's tier. Reads happen where they are asked for, writes in a thread. Never raises.

    Args:
        settings: size and times; 0 MiB is off.
        url: of the Redis that it stands in front of.
        stats: where its outcomes are counted, as operation ``local``.
    """

    def __init__(self, settings: LocalSettings, url: str, stats: CacheStats) -> None:
        self._settings = settings
        self._path = folder_of(url)
        self._stats = stats
        self._on = settings.mib > 0
        self._lock = threading.Lock()
        self._process = 0
        self._folder: Folder | None = None
        self._writer: Writer | None = None

    def copies(self, keys: Sequence[str]) -> dict[str, memoryview]:
        """What is here of these records, not yet confirmed."""
        folder = self.folder
        if folder is None:
            return {}
        return {key: view for key in keys if (view := folder.get(key)) is not None}

    def confirmed(self, key: str, view: memoryview, when: float) -> None:
        """Redis had the same record at ``when``: this use counts, and keeps the copy longest."""
        if self._folder is not None and self._writer is not None:
            self._folder.confirm(key, view, when)
            self._count("hit")

    def drop(self, key: str) -> None:
        """Redis no longer has what is here."""
        if self._folder is not None:
            self._folder.drop(key)
            self._count("gone")

    def offer(self, key: str, record: Buffer, when: float) -> None:
        """A checked record that Redis had at ``when``; it is stored later, or not."""
        if self.folder is not None and self._writer is not None:
            self._writer.offer(key, record, when)

    def recent(self, key: str) -> memoryview | None:
        """A copy to use while Redis is silent; None when Redis was last seen to have it too long ago."""
        folder = self.folder
        if folder is None or folder.age(key) > self._settings.grace or (view := folder.get(key)) is None:
            return None
        self._count("recent")
        return view

    def recent_header(self, key: str) -> RecordHeader | None:
        """The header of :meth:`recent`."""
        view = self.recent(key)
        return None if view is None else read_header(view, key)

    @property
    def folder(self) -> Folder | None:
        """The node's folder; None when the tier is off."""
        if not self._on or (self._folder is not None and self._process == os.getpid()):
            return self._folder
        with self._lock:
            if self._on and (self._folder is None or self._process != os.getpid()):
                self._open()
        return self._folder

    def usage(self) -> Usage | None:
        """What the node's tier holds; None when it is off."""
        folder = self.folder
        return None if folder is None else folder.usage()

    def settle(self, seconds: float = 10.0) -> bool:
        """Waits until what was offered is stored; whether it is."""
        return self._writer is None or self._writer.settle(seconds)

    def close(self) -> None:
        """Ends the writer; views stay good."""
        with self._lock:
            self._on = False
            if self._writer is not None and self._process == os.getpid():
                self._writer.close()
            if self._folder is not None and self._process == os.getpid():
                self._folder.close()
            self._folder = self._writer = None

    def _count(self, outcome: str) -> None:
        self._stats.record("local", outcome)
        if self._writer is not None:
            self._writer.tally(outcome)

    def _open(self) -> None:
        """Opens the folder, also again after a fork: locks and threads are the parent's."""
        remove_unused()
        try:
            self._folder = Folder(self._path, self._settings.mib << 20)
        except Unusable as reason:
            logger.warning("no local tier: %s", reason)
            self._on = False
            return
        self._writer = Writer(self._folder, self._settings.idle, self._stats)
        self._process = os.getpid()
