"""Batches of tenants on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from llm_service.api.access import Tenant
from llm_service.api.batches.files import names_in, tenant_folder
from llm_service.api.batches.ids import BATCH, is_id, new_id
from llm_service.api.batches.records import FINAL, Batch, BatchRequest, BatchState
from shared.durable import storage_errors, sync_folder, write_whole
from shared.errors import Conflict, UnknownBatch

STATE, CANCEL, ANSWERS, ERRORS = "batch.json", "cancel", "answers.jsonl", "errors.jsonl"


class BatchStore:
    """Batches of all tenants.

    Args:
        root: folder of the whole store.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, tenant: Tenant, request: BatchRequest) -> Batch:
        """Makes a batch that waits for its turn.

        Raises:
            StorageError: the disk is full.
        """
        now = int(time.time())
        batch = Batch(
            id=new_id(BATCH),
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + request.window_seconds(),
            metadata=request.metadata,
        )
        expiry = request.output_expires_after
        state = BatchState(batch=batch, output_seconds=None if expiry is None else expiry.seconds)
        folder = self.folder(tenant, batch.id)
        with storage_errors(folder):
            folder.mkdir(parents=True)
            self.save(tenant, state)
            sync_folder(folder.parent)
        return batch

    def save(self, tenant: Tenant, state: BatchState) -> None:
        """Writes a batch's state; only the process that runs batches may, once a batch is made."""
        write_whole(self.folder(tenant, state.batch.id) / STATE, state.model_dump_json().encode())

    def load(self, tenant: Tenant, name: str) -> BatchState:
        """A batch's state as it stands on disk.

        Raises:
            UnknownBatch: not there, or another tenant's.
        """
        if is_id(BATCH, name):
            with suppress(OSError, ValidationError):
                return BatchState.model_validate_json((self.folder(tenant, name) / STATE).read_bytes())
        raise UnknownBatch(f"no batch {name[:64]!r} here", param="batch_id")

    def get(self, tenant: Tenant, name: str) -> Batch:
        """What clients see of a batch; one that was told to stop is ``cancelling`` from then on.

        Raises:
            UnknownBatch: as for :meth:`load`.
        """
        batch = self.load(tenant, name).batch
        if batch.status not in FINAL and (at := self.cancelled_at(tenant, name)) is not None:
            return batch.model_copy(update={"status": "cancelling", "cancelling_at": at})
        return batch

    def cancelled_at(self, tenant: Tenant, name: str) -> int | None:
        """When a batch was told to stop; None if it was not."""
        try:
            return int((self.folder(tenant, name) / CANCEL).stat().st_mtime)
        except FileNotFoundError:
            return None

    def cancel(self, tenant: Tenant, name: str) -> Batch:
        """Tells a batch to stop.

        Raises:
            UnknownBatch: as for :meth:`load`.
            Conflict: it has ended.
        """
        batch = self.get(tenant, name)
        if batch.status in FINAL:
            raise Conflict(f"this batch is {batch.status}; there is nothing to cancel", param="batch_id")
        mark = self.folder(tenant, name) / CANCEL
        with storage_errors(mark):
            mark.touch(exist_ok=True)
        return self.get(tenant, name)

    def all(self, tenant: Tenant) -> list[Batch]:
        """A tenant's batches, oldest first."""
        return [self.get(tenant, name) for name in self.names(tenant)]

    def names(self, tenant: Tenant) -> list[str]:
        """Ids of a tenant's batches, oldest first."""
        folder = tenant_folder(self._root, tenant) / "batches"
        return [name for name in names_in(folder) if (folder / name / STATE).exists()]

    def users_of(self, tenant: Tenant, file: str) -> Iterator[Batch]:
        """Batches that still need a file."""
        for batch in self.all(tenant):
            if batch.input_file_id == file and batch.status not in FINAL:
                yield batch

    def folder(self, tenant: Tenant, name: str) -> Path:
        """A batch's folder; its name was checked."""
        return tenant_folder(self._root, tenant) / "batches" / name
