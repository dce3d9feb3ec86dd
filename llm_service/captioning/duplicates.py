"""Captions by content, so that a picture that comes again is not asked about again. On disk, not in memory."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Lines = Sequence[Mapping[str, Any]]


class Index(Protocol):
    """Captions of one job by content."""

    async def claim(self, content: str) -> Lines | None:
        """Captions of this content; None when the caller is the one to make them, and to :meth:`settle`.

        Waits while another row makes them.
        """

    async def settle(self, content: str, lines: Lines | None) -> None:
        """What came of a claim; None when it failed, so that the next one who asks tries."""


class DiskIndex:
    """:class:`Index` in an SQLite file, for one event loop.

    A claim lives in memory: when this process dies, who waits asks again.

    Args:
        path: of the file; made if missing.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")  # what a crash loses is only asked again
        self._db.execute("CREATE TABLE IF NOT EXISTS captions (content TEXT PRIMARY KEY, lines TEXT) WITHOUT ROWID")
        self._claims: dict[str, asyncio.Event] = {}

    def add(self, content: str, lines: Lines) -> None:
        """Captions that are known already; those that there are stay."""
        self._db.execute("INSERT OR IGNORE INTO captions VALUES (?, ?)", (content, json.dumps(list(lines))))

    async def claim(self, content: str) -> Lines | None:
        """See :class:`Index`."""
        while True:
            found = self._db.execute("SELECT lines FROM captions WHERE content = ?", (content,)).fetchone()
            if found is not None:
                lines: Lines = json.loads(found[0])
                return lines
            if content not in self._claims:
                self._claims[content] = asyncio.Event()
                return None
            await self._claims[content].wait()

    async def settle(self, content: str, lines: Lines | None) -> None:
        """See :class:`Index`."""
        if lines is not None:
            self.add(content, lines)
        if (event := self._claims.pop(content, None)) is not None:
            event.set()

    def close(self) -> None:
        """Closes the file."""
        self._db.close()
