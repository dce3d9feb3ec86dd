"""The OpenAPI document: request bodies that the endpoint parses by itself, faults in one shape, keys, examples."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from llm_service.api.answers import Error

REFERENCE = "#/components/schemas/{model}"
DESCRIPTION = """OpenAI's API for models that see, with a cache of image embeddings behind it.

Every fault has OpenAI's shape. `X-Request-Id` is taken or made, and comes back."""

#: what each status means, whichever route answers with it
FAULTS = {
    400: "The request is at fault; the message says how to mend it.",
    401: "No API key, or not one that may do this.",
    404: "No such thing here, or not for this key.",
    409: "It is in a state in which this cannot be done.",
    413: "The body is above the limit.",
    422: "An image that keeps failing; it is refused for a while.",
    429: "Too much at once; `Retry-After` says when to try again.",
    500: "A fault of the service; its log has the details.",
    503: "A part of the service is down for now; `Retry-After` says when to try again.",
    504: "The deadline passed.",
    507: "The disk is full; nothing was stored.",
}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}


def faults(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses of a route other than its answer."""
    # written out, since FastAPI would give a model the media type of the route's answer
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=Error.__name__)}}}
    return {
        status: {"content": content, "description": FAULTS[status]}
        | ({"headers": _RETRY} if status in (429, 503) else {})
        for status in statuses
    }


def answer(what: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The answer of a route that FastAPI cannot read off its function."""
    return {200: what}


def streamed(model: type[BaseModel], what: str) -> dict[int | str, dict[str, Any]]:
    """An answer in one body, or as server-sent events."""
    event = {
        "type": "object",
        "description": "One server-sent event; its data are a chunk as JSON, a fault, or at the end [DONE].",
        "required": ["data"],
        "properties": {"data": {"type": "string"}},
    }
    events = {"schema": event, "example": 'data: {"object": …}\n\ndata: [DONE]\n\n'}
    return {200: {"model": model, "description": what, "content": {"text/event-stream": events}}}


def body(model: type[BaseModel], **examples: dict[str, Any]) -> dict[str, Any]:
    """A request body that the endpoint parses by itself, large ones beside the event loop.

    Args:
        model: its shape; :func:`document` puts it among the components.
        examples: bodies, by what they show.
    """
    named = {name: {"summary": name.replace("_", " "), "value": value} for name, value in examples.items()}
    schema = {"$ref": REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "examples": named}}}}


def document(app: FastAPI, bodies: list[type[BaseModel]], *, keys: bool) -> dict[str, Any]:
    """The document of all routes.

    Args:
        app: the application.
        bodies: request bodies that routes name by :func:`body`.
        keys: whether requests need an API key.
    """
    tree = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
    components = tree["components"]["schemas"]
    described: list[type[BaseModel]] = [*bodies, Error]
    _, definitions = models_json_schema([(model, "validation") for model in described], ref_template=REFERENCE)
    components.update(definitions["$defs"])
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own; ours is a 400 in OpenAI's shape
        components.pop(unused, None)
    for path in tree["paths"].values():
        for operation in path.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    if keys:
        tree["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        tree["security"] = [{"key": []}]
    return tree
