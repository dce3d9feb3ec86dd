"""Routes of files and batches, as OpenAI's clients call them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel

from llm_service.api.batches.files import page
from llm_service.api.batches.records import Batch, BatchList, BatchRequest, DeletedFile, FileList, StoredFile
from llm_service.api.endpoint import parse
from llm_service.api.openapi import answer, body, faults
from llm_service.api.state import KnownTenant, StateOf, TenantOf
from shared.errors import RequestError

router = APIRouter()
#: body models that routes here name in the document
BODIES: list[type[BaseModel]] = [BatchRequest]
_READ = faults(400, 401, 404, 500, 507)
_WRITE = faults(400, 401, 404, 409, 413, 429, 500, 507)

Order = Literal["asc", "desc"]
After = Annotated[str | None, Query(description="id of the last one that you have")]
Seconds = Annotated[int | None, Form(alias="expires_after[seconds]", ge=3600, le=2592000)]
Anchor = Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]")]


@router.post("/v1/files", response_model=StoredFile, responses=_WRITE)
async def upload_file(
    state: StateOf,
    tenant: TenantOf,
    file: Annotated[UploadFile, File()],
    purpose: Annotated[Literal["batch"], Form()],
    seconds: Seconds = None,
    anchor: Anchor = None,
) -> StoredFile:
    """Stores a file of requests, one JSON object a line."""
    if (seconds is None) != (anchor is None):
        raise RequestError("expires_after needs both anchor and seconds", param="expires_after")
    return await asyncio.to_thread(state.batches.files.add, tenant, file.filename or "file", file.file, seconds)


@router.get("/v1/files", response_model=FileList, responses=_READ)
async def list_files(
    state: StateOf,
    tenant: KnownTenant,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10000)] = 10000,
    order: Order = "desc",
    purpose: Annotated[Literal["batch", "batch_output"] | None, Query()] = None,
) -> FileList:
    """The tenant's files."""
    found = await asyncio.to_thread(state.batches.files.list, tenant, purpose)
    data, more = page(found, [file.id for file in found], after, limit, order)
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return FileList(data=data, first_id=first, last_id=last, has_more=more)


@router.get("/v1/files/{file_id}", response_model=StoredFile, responses=_READ)
async def file_state(state: StateOf, tenant: KnownTenant, file_id: str) -> StoredFile:
    """What is known of a file."""
    return await asyncio.to_thread(state.batches.files.get, tenant, file_id)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses=answer({"content": {"application/jsonl": {"schema": {"type": "string"}}}}) | _READ,
)
async def file_content(state: StateOf, tenant: KnownTenant, file_id: str) -> Response:
    """A file's bytes."""
    path = await asyncio.to_thread(state.batches.files.content, tenant, file_id)
    return FileResponse(path, media_type="application/jsonl")


@router.delete("/v1/files/{file_id}", response_model=DeletedFile, responses=_WRITE)
async def delete_file(state: StateOf, tenant: TenantOf, file_id: str) -> DeletedFile:
    """Deletes a file."""
    await asyncio.to_thread(state.batches.delete_file, tenant, file_id)
    return DeletedFile(id=file_id)


_EXAMPLE = {"input_file_id": "file-" + 32 * "0", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


@router.post("/v1/batches", response_model=Batch, responses=_WRITE, openapi_extra=body(BatchRequest, batch=_EXAMPLE))
async def create_batch(request: Request, state: StateOf, tenant: TenantOf) -> Batch:
    """Makes a batch of the requests in a file; they are answered when there is room."""
    wanted = await parse(BatchRequest, await request.body())
    return await asyncio.to_thread(state.batches.create, tenant, wanted)


@router.get("/v1/batches", response_model=BatchList, responses=_READ)
async def list_batches(
    state: StateOf, tenant: KnownTenant, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> BatchList:
    """The tenant's batches, newest first."""
    names = await asyncio.to_thread(state.batches.jobs.names, tenant)
    chosen, more = page(names, names, after, limit, "desc")
    data = [await asyncio.to_thread(state.batches.jobs.get, tenant, name) for name in chosen]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return BatchList(data=data, first_id=first, last_id=last, has_more=more)


@router.get("/v1/batches/{batch_id}", response_model=Batch, responses=_READ)
async def batch_state(state: StateOf, tenant: KnownTenant, batch_id: str) -> Batch:
    """How a batch fares."""
    return await asyncio.to_thread(state.batches.jobs.get, tenant, batch_id)


@router.post("/v1/batches/{batch_id}/cancel", response_model=Batch, responses=_WRITE)
async def cancel_batch(state: StateOf, tenant: TenantOf, batch_id: str) -> Batch:
    """Stops a batch; what was answered by then stays."""
    return await asyncio.to_thread(state.batches.jobs.cancel, tenant, batch_id)
