"""Files and batches for the routes: the stores, and the runner for as long as the application lives."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from llm_service.api.access import Tenant
from llm_service.api.batches.attempts import Answer
from llm_service.api.batches.files import FileStore
from llm_service.api.batches.jobs import BatchStore
from llm_service.api.batches.records import Batch, BatchRequest
from llm_service.api.batches.runner import BatchRunner
from llm_service.api.batches.turns import Turns
from shared.config import BatchSettings
from shared.durable import storage_errors
from shared.errors import Conflict


class Batches:
    """Files and batches of all tenants.

    Args:
        files: the store's files.
        jobs: its batches.
        runner: runs them.
    """

    def __init__(self, files: FileStore, jobs: BatchStore, runner: BatchRunner) -> None:
        self.files = files
        self.jobs = jobs
        self._runner = runner

    def create(self, tenant: Tenant, request: BatchRequest) -> Batch:
        """Makes a batch.

        Raises:
            UnknownFile: its input is not there.
        """
        self.files.get(tenant, request.input_file_id)
        batch = self.jobs.create(tenant, request)
        self._runner.tell()
        return batch

    def delete_file(self, tenant: Tenant, name: str) -> None:
        """Deletes a file.

        Raises:
            UnknownFile: it is not there.
            Conflict: a batch still needs it.
        """
        self.files.get(tenant, name)
        for user in self.jobs.users_of(tenant, name):
            raise Conflict(f"{user.id} still needs this file; cancel it first", param="file_id")
        self.files.delete(tenant, name)


@asynccontextmanager
async def running_batches(
    settings: BatchSettings, tenants: Sequence[Tenant], answer: Answer, interactive: Callable[[], int]
) -> AsyncIterator[Batches]:
    """The service, with its runner at work.

    Args:
        settings: where and how much.
        tenants: who there is.
        answer: answers one request.
        interactive: number of interactive requests in work now.

    Raises:
        ConfigError: the folder cannot be written.
    """
    with ExitStack() as stack:
        root = settings.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookonce-batches-")))
        with storage_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        files, jobs = FileStore(root, settings), BatchStore(root)
        runner = BatchRunner(root, settings, files, jobs, tenants, Turns(settings, interactive), answer)
        task = asyncio.create_task(runner.run(), name="batches")
        try:
            yield Batches(files, jobs, runner)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
