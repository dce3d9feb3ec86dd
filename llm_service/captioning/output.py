"""What a job has done so far, on disk: captions in parts, failures in a file of their own.

Below the output folder, beside the files of :mod:`shared.shards`:

``errors.jsonl``   one line per row that failed: its id and why
``index.sqlite``   captions by content, with ``--dedupe``
``report.html``    a page with samples, with ``--report``
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_service.captioning.rows import Outcome
from shared.config import JobSettings
from shared.durable import append_lines, held, read_lines, storage_errors, sync_folder, write_whole
from shared.idset import IdSet
from shared.shards import JOB, LOCK, MANIFEST, RowFormat, ShardStore

ERRORS, INDEX, REPORT = "errors.jsonl", "index.sqlite", "report.html"


class Output:
    """Takes outcomes, each row's once, and makes them last in parts; a context manager that holds the folder's lock.

    Args:
        folder: made if missing.
        job: what the output depends on, as JSON values.
        rows: format of the parts.
        settings: when a part is full.
        retry: forget what failed, so that it is done again.
        overwrite: begin anew, whatever job of ours wrote there.

    Raises (on entering):
        InUse, ConfigError: see :class:`~shared.shards.ShardStore`.
    """

    def __init__(
        self,
        folder: Path,
        job: Mapping[str, Any],
        rows: RowFormat,
        settings: JobSettings,
        *,
        retry: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.store = ShardStore(folder, job, rows)
        self.errors = folder / ERRORS
        self.done = IdSet()
        self.captioned = self.failed = 0
        self._settings = settings
        self._retry = retry
        self._overwrite = overwrite
        self._lines: list[Mapping[str, Any]] = []
        self._failures: list[Mapping[str, Any]] = []
        self._begun = time.monotonic()

    def __enter__(self) -> Output:
        if self._overwrite and (self.store.folder / JOB).exists():
            _drop(self.store.folder)
        self.store.__enter__()
        try:
            if self._retry and self.errors.exists():
                write_whole(self.errors, b"")
            self.captioned = sum(self.done.add(row["id"]) for row in self.store.rows())
            self.failed = sum(self.done.add(failure["id"]) for failure in self.failures())
        except BaseException:
            self.store.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self.store.__exit__()

    def failures(self) -> Iterator[dict[str, Any]]:
        """Rows that failed, with ``id`` and ``error``."""
        return (line for line in read_lines(self.errors) if "id" in line)

    def add(self, outcome: Outcome) -> bool:
        """Takes an outcome; False if the row's was here before, which happens after a worker died.

        Raises:
            StorageError: no space; what was finished before is safe.
        """
        if not self.done.add(outcome.id):
            return False
        if not self._lines and not self._failures:
            self._begun = time.monotonic()
        if outcome.error is None:
            self._lines += outcome.lines
            self.captioned += 1
        else:
            self._failures.append({"id": outcome.id, "error": outcome.error})
            self.failed += 1
        full = len(self._lines) + len(self._failures) >= self._settings.shard_rows
        if full or time.monotonic() - self._begun >= self._settings.shard_seconds:
            self.flush()
        return True

    def flush(self) -> None:
        """Makes what is in memory last.

        Raises:
            StorageError: as for :meth:`add`.
        """
        lines, failures = self._lines, self._failures
        self._lines, self._failures = [], []
        self.store.write(lines)
        if failures:
            append_lines(self.errors, failures)


def _drop(folder: Path) -> None:
    """Removes what a job wrote, and nothing else; what says that it is a job's goes last."""
    with held(folder / LOCK, str(folder)), storage_errors(folder):
        for pattern in ("part-*", f"{INDEX}*", ERRORS, REPORT, MANIFEST, JOB):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
        sync_folder(folder)
