"""The routes. Each finds its tenant and its model, and hands on; nothing is decided here."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from llm_service.api.access import Tenant
from llm_service.api.answers import (
    ChatCompletion,
    DeletedImage,
    Health,
    KnownImage,
    ModelCard,
    ModelList,
    Readiness,
    ServiceState,
    TextCompletion,
    UploadedImage,
)
from llm_service.api.chat import ImageService
from llm_service.api.embeddings import SAFETENSORS, EmbeddingList, EmbeddingRequest, embed
from llm_service.api.openapi import answer, body, faults, streamed
from llm_service.api.schemas import ChatCompletionRequest, CompletionRequest
from llm_service.api.state import Administrator, KnownTenant, State, StateOf, TenantOf
from llm_service.api.status import service_status, unready
from shared import metrics
from shared.errors import RequestError, Unavailable

PAGE = Path(__file__).parent / "page.html"

router = APIRouter()


#: body models that routes here name in the document
BODIES: list[type[BaseModel]] = [ChatCompletionRequest, CompletionRequest, EmbeddingRequest]
_WORK = faults(400, 401, 404, 413, 422, 429, 500, 503, 504)

_CHAT = {
    "model": "lookonce-demo",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo…"}},
                {"type": "text", "text": "What is at row 1 column 2?"},
            ],
        }
    ],
    "temperature": 0,
}


_NAMED_IMAGE = _CHAT | {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "lookonce://" + 64 * "0"}},
                {"type": "text", "text": "Where is the purple star?"},
            ],
        }
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
}
_SHAPED = _CHAT | {
    "messages": [{"role": "user", "content": "Name a colour."}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "colour", "schema": {"type": "object", "properties": {"colour": {"type": "string"}}}},
    },
}


@router.post(
    "/v1/chat/completions",
    responses=streamed(ChatCompletion, "The completion.") | _WORK,
    openapi_extra=body(ChatCompletionRequest, picture=_CHAT, picture_sent_ahead=_NAMED_IMAGE, json=_SHAPED),
)
async def chat_completions(request: Request, state: StateOf, tenant: TenantOf) -> Response:
    """Answers a chat about images and text, streamed or whole."""
    return await state.endpoint.chat(await request.body(), tenant)


@router.post(
    "/v1/completions",
    responses=streamed(TextCompletion, "The completion.") | _WORK,
    openapi_extra=body(
        CompletionRequest, text={"model": "lookonce-demo", "prompt": "Row 1: red", "max_tokens": 8, "temperature": 0}
    ),
)
async def completions(request: Request, state: StateOf, tenant: TenantOf) -> Response:
    """Goes on with a text, streamed or whole."""
    return await state.endpoint.complete(await request.body(), tenant)


@router.post(
    "/v1/embeddings",
    responses=answer(
        {
            "model": EmbeddingList,
            "description": "The embeddings.",
            "content": {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}},
        }
    )
    | _WORK,
    openapi_extra=body(
        EmbeddingRequest,
        picture={"model": "c-radio", "input": "data:image/png;base64,iVBORw0KGgo…"},
        file={"model": "c-radio", "input": ["lookonce://" + 64 * "0"], "encoding_format": "safetensors"},
    ),
)
async def embeddings(request: Request, state: StateOf, tenant: TenantOf) -> Response:
    """Embeddings of pictures: features, one per patch or token, or summaries, as the model is configured."""
    return await embed(state.endpoint, await request.body(), tenant)


@router.get("/v1/models", response_model=ModelList, responses=faults(401, 500))
async def models(state: StateOf, tenant: KnownTenant) -> dict[str, Any]:
    """The models that this service answers for."""
    return {"object": "list", "data": [_card(name) for name in state.endpoint.models(tenant)]}


@router.get("/v1/models/{name:path}", response_model=ModelCard, responses=faults(401, 404, 500))
async def model(state: StateOf, tenant: KnownTenant, name: str) -> dict[str, Any]:
    """One model."""
    state.endpoint.service(name, tenant)
    return _card(name)


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lookonce"}


@router.post(
    "/v1/images", response_model=UploadedImage, response_model_exclude_unset=True, responses=_WORK | faults(507)
)
async def upload_image(
    state: StateOf, tenant: TenantOf, file: Annotated[UploadFile, File()], model: Annotated[str | None, Form()] = None
) -> dict[str, Any]:
    """Takes a picture ahead of questions: answers with its name, and encodes it in the background."""
    name, service = _service(state, tenant, model)
    with state.endpoint.admitted():
        return await state.uploads.add(name, service, await file.read(), tenant)


ModelQuery = Annotated[str | None, Query(description="may be left out where only one model is served")]


@router.get(
    "/v1/images/{name}",
    response_model=KnownImage,
    response_model_exclude_unset=True,
    responses=faults(400, 401, 404, 429, 500, 503),
)
async def image(state: StateOf, tenant: KnownTenant, name: str, model: ModelQuery = None) -> dict[str, Any]:
    """What is known of a picture."""
    model, service = _service(state, tenant, model)
    return await state.uploads.describe(model, service, name, tenant)


@router.delete("/v1/images/{name}", response_model=DeletedImage, responses=faults(400, 401, 404, 429, 500, 503))
async def purge_image(state: StateOf, tenant: TenantOf, name: str, model: ModelQuery = None) -> dict[str, Any]:
    """Purges a picture's embedding from the cache."""
    model, service = _service(state, tenant, model)
    return await state.uploads.purge(model, service, name, tenant)


def _service(state: State, tenant: Tenant, model: str | None) -> tuple[str, ImageService]:
    if model is None:
        names = state.endpoint.models(tenant)
        if len(names) != 1:
            raise RequestError(f"say which model: {', '.join(names)}", param="model")
        model = names[0]
    return model, state.endpoint.service(model, tenant)


@router.get("/v1/status", response_model=ServiceState, responses=faults(401, 500, 503))
async def status(state: StateOf, _: Administrator) -> dict[str, Any]:
    """Pools and cache, now."""
    return await service_status(state.endpoint)


@router.get("/healthz", response_model=Health, openapi_extra={"security": []})
async def healthz() -> dict[str, str]:
    """Answers while the ingress lives."""
    return {"status": "ok"}


@router.get("/-/healthz", include_in_schema=False)
async def serve_healthz() -> PlainTextResponse:
    """What Ray's operator for Kubernetes asks of every machine, in the words that it looks for."""
    return PlainTextResponse("success")


@router.get(
    "/readyz",
    responses=answer({"model": Readiness}) | faults(500, 503),
    openapi_extra={"security": []},
)
async def readyz(state: StateOf) -> Response:
    """Answers 200 while every pool has a replica that takes requests, or starts one when asked; else 503."""
    if missing := await unready(state.endpoint):
        raise Unavailable(f"{len(missing)} pools have no replica that takes requests", retry_after=5)
    return JSONResponse({"status": "ready"})


@router.get(
    "/metrics",
    responses=answer({"content": {"text/plain": {"schema": {"type": "string"}}}}) | faults(401, 500),
    response_class=PlainTextResponse,
)
async def prometheus(_: Administrator) -> Response:
    """Prometheus metrics of every process on this node."""
    text, content_type = await asyncio.to_thread(metrics.render)
    return Response(text, media_type=content_type)


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> HTMLResponse:
    """The page for people."""
    return HTMLResponse(_page(), headers={"Content-Security-Policy": PAGE_POLICY})


#: the page loads nothing from elsewhere; pictures that a person pastes are shown from memory
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)


@cache
def _page() -> str:
    return PAGE.read_text()
