"""The routes. Each finds its tenant and its model, and hands on; nothing is decided here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, File, Form, Query, Request, UploadFile
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel

from llm_service.api.access import Access, Tenant
from llm_service.api.chat import ModelService
from llm_service.api.endpoint import Endpoint
from llm_service.api.schemas import ChatCompletionRequest, CompletionRequest
from llm_service.api.status import service_status, unready
from llm_service.api.uploads import Uploads
from shared import metrics
from shared.errors import RequestError, Unavailable

PAGE = Path(__file__).parent / "page.html"

router = APIRouter()


@dataclass(frozen=True)
class State:
    """What the application's life holds for the routes."""

    endpoint: Endpoint
    access: Access
    uploads: Uploads


def _state(request: Request) -> State:
    state: State = request.app.state.lookonce
    return state


def _tenant(request: Request) -> Tenant:
    access = _state(request).access
    tenant = access.tenant(request.headers.get("authorization"))
    access.count(tenant)
    return tenant


def _known(request: Request) -> Tenant:
    """A tenant whose question is too small to count."""
    return _state(request).access.tenant(request.headers.get("authorization"))


def _admin(request: Request) -> Tenant:
    return _state(request).access.admin(request.headers.get("authorization"))


StateOf = Annotated[State, Depends(_state)]
TenantOf = Annotated[Tenant, Depends(_tenant)]
KnownTenant = Annotated[Tenant, Depends(_known)]
Administrator = Annotated[Tenant, Depends(_admin)]


def _body(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """A request body for the OpenAPI document; the endpoint parses it by itself, large ones beside the event loop."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, definitions), "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """A schema with its references put in, so that it stands by itself."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if reference := node.get("$ref"):
        return _inlined(definitions[reference.rsplit("/", 1)[-1]], definitions)
    return {
        name: _inlined(value, definitions)
        for name, value in node.items()
        if name != "discriminator"  # it maps to references
    }


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


@router.post("/v1/chat/completions", openapi_extra=_body(ChatCompletionRequest, _CHAT))
async def chat_completions(request: Request, state: StateOf, tenant: TenantOf) -> Response:
    """Answers a chat about images and text, streamed or whole."""
    return await state.endpoint.chat(await request.body(), tenant)


@router.post(
    "/v1/completions",
    openapi_extra=_body(CompletionRequest, {"model": "lookonce-demo", "prompt": "Row 1: red", "max_tokens": 8}),
)
async def completions(request: Request, state: StateOf, tenant: TenantOf) -> Response:
    """Goes on with a text, streamed or whole."""
    return await state.endpoint.complete(await request.body(), tenant)


@router.get("/v1/models")
async def models(state: StateOf, tenant: KnownTenant) -> dict[str, Any]:
    """The models that this service answers for."""
    return {"object": "list", "data": [_card(name) for name in state.endpoint.models(tenant)]}


@router.get("/v1/models/{name:path}")
async def model(state: StateOf, tenant: KnownTenant, name: str) -> dict[str, Any]:
    """One model."""
    state.endpoint.service(name, tenant)
    return _card(name)


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lookonce"}


@router.post("/v1/images")
async def upload_image(
    state: StateOf, tenant: TenantOf, file: Annotated[UploadFile, File()], model: Annotated[str | None, Form()] = None
) -> dict[str, Any]:
    """Takes a picture ahead of questions: answers with its name, and encodes it in the background."""
    name, service = _service(state, tenant, model)
    with state.endpoint.admitted():
        return await state.uploads.add(name, service, await file.read(), tenant)


ModelQuery = Annotated[str | None, Query(description="may be left out where only one model is served")]


@router.get("/v1/images/{name}")
async def image(state: StateOf, tenant: KnownTenant, name: str, model: ModelQuery = None) -> dict[str, Any]:
    """What is known of a picture."""
    model, service = _service(state, tenant, model)
    return await state.uploads.describe(model, service, name, tenant)


@router.delete("/v1/images/{name}")
async def purge_image(state: StateOf, tenant: TenantOf, name: str, model: ModelQuery = None) -> dict[str, Any]:
    """Purges a picture's embedding from the cache."""
    model, service = _service(state, tenant, model)
    return await state.uploads.purge(model, service, name, tenant)


def _service(state: State, tenant: Tenant, model: str | None) -> tuple[str, ModelService]:
    if model is None:
        names = state.endpoint.models(tenant)
        if len(names) != 1:
            raise RequestError(f"say which model: {', '.join(names)}", param="model")
        model = names[0]
    return model, state.endpoint.service(model, tenant)


@router.get("/v1/status")
async def status(state: StateOf, _: Administrator) -> dict[str, Any]:
    """Pools and cache, now."""
    return await service_status(state.endpoint)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answers while the ingress lives."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(state: StateOf) -> Response:
    """Answers 200 while every pool has a replica that takes requests, or starts one when asked; else 503."""
    if missing := await unready(state.endpoint):
        raise Unavailable(f"{len(missing)} pools have no replica that takes requests", retry_after=5)
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
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
