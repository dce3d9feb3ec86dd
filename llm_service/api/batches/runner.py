"""Runs batches: from an input file to an output and an error file, each line once, through any number of restarts."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llm_service.api.access import Tenant
from llm_service.api.batches.attempts import Answer, attempt
from llm_service.api.batches.files import FileStore
from llm_service.api.batches.ids import FILE, new_id
from llm_service.api.batches.jobs import BatchStore
from llm_service.api.batches.journal import Journal
from llm_service.api.batches.lines import check, custom_id, left_out, lines
from llm_service.api.batches.records import FINAL, BatchState, BatchUsage, LineFault, LineFaults, Status
from llm_service.api.batches.turns import Turns
from shared.config import BatchSettings
from shared.durable import held
from shared.errors import InUse, LookonceError, UnknownFile

logger = logging.getLogger(__name__)

#: how often a running batch looks whether it was cancelled or has expired, and tells its counts, seconds
LOOK_SECONDS = 0.5
#: how often new batches of other ingress replicas are looked for, and expired files removed, seconds
SCAN_SECONDS = 5.0
#: rest of a batch after a fault of ours or of the disk, seconds
REST_SECONDS = 10.0


class BatchRunner:
    """Runs the batches of all tenants; one runner at a time works on a folder.

    Args:
        root: folder of the store.
        settings: limits.
        files: the store's files.
        jobs: its batches.
        tenants: who there is.
        turns: when a line may begin.
        answer: answers one request.
    """

    def __init__(
        self,
        root: Path,
        settings: BatchSettings,
        files: FileStore,
        jobs: BatchStore,
        tenants: Sequence[Tenant],
        turns: Turns,
        answer: Answer,
    ) -> None:
        self._root, self._settings = root, settings
        self._files, self._jobs, self._tenants = files, jobs, tenants
        self._turns, self._answer = turns, answer
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ended: set[str] = set()
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Says that there is a new batch."""
        self._news.set()

    async def run(self) -> None:
        """Works until cancelled; waits while another process works on the folder."""
        while True:
            try:
                with held(self._root / "lock", f"the batches in {self._root}"):
                    await self._supervise()
            except InUse:
                await asyncio.sleep(SCAN_SECONDS)

    async def _supervise(self) -> None:
        try:
            while True:
                self._news.clear()
                for tenant in self._tenants:
                    await asyncio.to_thread(self._files.sweep, tenant)
                    for name in await asyncio.to_thread(self._jobs.names, tenant):
                        if name not in self._running and name not in self._ended:
                            task = asyncio.create_task(self._batch(tenant, name), name=name)
                            self._running[name] = task
                            task.add_done_callback(lambda task: self._running.pop(task.get_name()))
                try:
                    async with asyncio.timeout(SCAN_SECONDS):
                        await self._news.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _batch(self, tenant: Tenant, name: str) -> None:
        """Takes one batch from wherever it stands to its end."""
        while True:
            try:
                state = await asyncio.to_thread(self._jobs.load, tenant, name)
                if state.batch.status in FINAL:
                    self._ended.add(name)
                    return
                await self._step(tenant, state)
            except LookonceError as error:  # a full disk above all; what was done is safe
                logger.error("batch %s rests: %s", name, error.message)
                await asyncio.sleep(REST_SECONDS)

    async def _step(self, tenant: Tenant, state: BatchState) -> None:
        batch = state.batch
        if batch.status == "validating":
            await self._validate(tenant, state)
        elif batch.status == "finalizing":
            await self._finalize(tenant, state)
        else:
            await self._answer_lines(tenant, state)

    async def _validate(self, tenant: Tenant, state: BatchState) -> None:
        batch = state.batch
        try:
            path = self._files.content(tenant, batch.input_file_id)
            checked = await asyncio.to_thread(check, path, batch.endpoint, self._settings.max_requests)
            faults, total = checked.faults, checked.total
        except (UnknownFile, FileNotFoundError):
            faults, total = _gone(), 0
        if faults is None:
            batch.request_counts = batch.request_counts.model_copy(update={"total": total})
        else:
            batch.errors = faults
        self._enter(tenant, state, "in_progress" if faults is None else "failed")

    async def _answer_lines(self, tenant: Tenant, state: BatchState) -> None:
        batch = state.batch
        journal = self._journal(tenant, state)
        await asyncio.to_thread(journal.recover)
        try:
            path = self._files.content(tenant, batch.input_file_id)
            undone = _undone(path, journal)
        except (UnknownFile, FileNotFoundError):
            batch.errors = _gone()
            state.outcome = "failed"
            self._enter(tenant, state, "finalizing")
            return
        work = asyncio.create_task(self._pump(tenant, state, journal, undone))
        try:
            state.outcome = await self._watch(tenant, state, journal, work)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        batch.request_counts = journal.counts
        batch.cancelling_at = self._jobs.cancelled_at(tenant, batch.id)
        self._enter(tenant, state, "finalizing")

    async def _watch(self, tenant: Tenant, state: BatchState, journal: Journal, work: asyncio.Task[None]) -> Status:
        """Waits for the lines; tells how it came out."""
        batch = state.batch
        while True:
            if self._jobs.cancelled_at(tenant, batch.id) is not None:
                return "cancelled"
            if time.time() >= batch.expires_at:
                return "expired"
            await asyncio.wait({work}, timeout=LOOK_SECONDS)
            if work.done():
                work.result()
                return "completed"
            if journal.counts != batch.request_counts:
                batch.request_counts = journal.counts
                await asyncio.to_thread(self._jobs.save, tenant, state)

    async def _pump(self, tenant: Tenant, state: BatchState, journal: Journal, undone: Iterator[bytes]) -> None:
        """Starts line after line, as turns come."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._turns.take(tenant.name)
                raw = None
                try:
                    raw = await asyncio.to_thread(next, undone, None)
                finally:
                    if raw is None:
                        self._turns.give()
                if raw is None:
                    return
                task = group.create_task(self._line(tenant, state.batch.endpoint, journal, raw))
                task.add_done_callback(lambda _: self._turns.give())  # also of a task that never began

    async def _line(self, tenant: Tenant, endpoint: str, journal: Journal, raw: bytes) -> None:
        row, failed = await attempt(self._answer, endpoint, raw, tenant)
        await journal.add(row, failed=failed)

    async def _finalize(self, tenant: Tenant, state: BatchState) -> None:
        """Writes both files, by names chosen before, so that doing it twice is doing it once."""
        if state.output_name is None or state.error_name is None:
            state.output_name, state.error_name = new_id(FILE), new_id(FILE)
            await asyncio.to_thread(self._jobs.save, tenant, state)
        journal = self._journal(tenant, state)
        await asyncio.to_thread(self._write_files, tenant, state, journal)
        self._enter(tenant, state, state.outcome or "completed")
        await asyncio.to_thread(journal.remove)

    def _write_files(self, tenant: Tenant, state: BatchState, journal: Journal) -> None:
        batch = state.batch
        journal.recover()
        if journal.counts.completed:
            batch.usage = BatchUsage()
            rows = map(_counted(batch.usage), journal.answers())
            self._put(tenant, state, str(state.output_name), "output", rows)
            batch.output_file_id = state.output_name
        missing = self._left_out(tenant, state, journal) if state.outcome in ("cancelled", "expired") else []
        if journal.counts.failed or missing:
            self._put(tenant, state, str(state.error_name), "error", [*journal.errors(), *missing])
            batch.error_file_id = state.error_name
        failed = journal.counts.failed + len(missing)
        batch.request_counts = journal.counts.model_copy(update={"failed": failed})

    def _left_out(self, tenant: Tenant, state: BatchState, journal: Journal) -> list[dict[str, Any]]:
        try:
            path = self._files.content(tenant, state.batch.input_file_id)
        except UnknownFile:
            return []
        return [left_out(custom_id(raw), str(state.outcome)) for raw in _undone(path, journal)]

    def _put(self, tenant: Tenant, state: BatchState, name: str, kind: str, rows: Iterable[dict[str, Any]]) -> None:
        encoded = (json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n" for row in rows)
        self._files.put(tenant, name, f"{state.batch.id}_{kind}.jsonl", state.output_seconds, encoded)

    def _journal(self, tenant: Tenant, state: BatchState) -> Journal:
        return Journal(self._jobs.folder(tenant, state.batch.id), state.batch.request_counts.total)

    def _enter(self, tenant: Tenant, state: BatchState, status: Status) -> None:
        batch = state.batch
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        self._jobs.save(tenant, state)
        logger.info("batch %s: %s", batch.id, status, extra={"tenant": tenant.name})


def _undone(path: Path, journal: Journal) -> Iterator[bytes]:
    return (raw for _, raw in lines(path) if custom_id(raw) not in journal.done)


def _gone() -> LineFaults:
    return LineFaults(data=[LineFault(code="file_not_found", message="the input file is gone", param="input_file_id")])


def _counted(usage: BatchUsage) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Adds up the tokens of the rows that pass."""

    def count(row: dict[str, Any]) -> dict[str, Any]:
        told = row["response"]["body"]["usage"]
        usage.input_tokens += told["prompt_tokens"]
        usage.input_tokens_details.cached_tokens += told["prompt_tokens_details"]["cached_tokens"]
        usage.output_tokens += told["completion_tokens"]
        usage.total_tokens += told["total_tokens"]
        return row

    return count
