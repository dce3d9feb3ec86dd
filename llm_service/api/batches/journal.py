"""Answers of one batch while it runs: added line by line, so that nothing that ends the process loses one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm_service.api.batches.jobs import ANSWERS, ERRORS
from llm_service.api.batches.records import Counts
from shared.durable import append_line, read_lines
from shared.errors import StorageError
from shared.idset import IdSet

logger = logging.getLogger(__name__)

#: how long to wait for somebody to make room on a full disk, seconds
FULL_DISK_SECONDS = 5.0


class Journal:
    """The rows that a batch has so far.

    Args:
        folder: of the batch.
        total: lines of its input.
    """

    def __init__(self, folder: Path, total: int) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self.done = IdSet()
        self.counts = Counts(total=total)

    def recover(self) -> None:
        """Reads what an earlier process wrote; a line that it left unfinished is done again."""
        completed = sum(1 for row in self._rows(ANSWERS) if self.done.add(row["custom_id"]))
        failed = sum(1 for row in self._rows(ERRORS) if self.done.add(row["custom_id"]))
        self.counts = self.counts.model_copy(update={"completed": completed, "failed": failed})

    async def add(self, row: dict[str, Any], *, failed: bool) -> None:
        """Makes a row last. A full disk is waited out."""
        path = self._folder / (ERRORS if failed else ANSWERS)
        async with self._lock:
            while True:
                try:
                    await _to_its_end(asyncio.create_task(asyncio.to_thread(append_line, path, row)))
                    break
                except StorageError as error:
                    logger.error("a batch waits: %s", error.message)
                    await asyncio.sleep(FULL_DISK_SECONDS)
            self.done.add(row["custom_id"])
            name = "failed" if failed else "completed"
            self.counts = self.counts.model_copy(update={name: getattr(self.counts, name) + 1})

    def answers(self) -> Iterator[dict[str, Any]]:
        """The rows of the output file."""
        return _first_of_each(self._rows(ANSWERS))

    def errors(self) -> Iterator[dict[str, Any]]:
        """The rows of the error file."""
        return _first_of_each(self._rows(ERRORS))

    def remove(self) -> None:
        """Deletes the rows, once they stand in files."""
        for name in (ANSWERS, ERRORS):
            (self._folder / name).unlink(missing_ok=True)

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        return read_lines(self._folder / name)


def _first_of_each(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    seen = IdSet()
    return (row for row in rows if seen.add(row["custom_id"]))


async def _to_its_end(task: asyncio.Task[None]) -> None:
    """Waits for a write even when cancelled: a thread cannot be stopped, and must not write behind our back."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
