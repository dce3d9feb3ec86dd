"""ASGI middleware: request ids in and out, and a limit on bodies that holds before they are read."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm_service.api.responses import error_body
from shared import tracing
from shared.errors import PayloadTooLarge, RequestError
from shared.log import request_id

#: where a request's scope keeps its id, for who stands outside of :class:`RequestId`
ID_IN_SCOPE = "lookonce.request_id"
_HARMLESS = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestId:
    """Makes the request's id known to everything below, and to the client: its own ``X-Request-Id``, or a new one.

    An id with unusual characters is replaced before it reaches a log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        own = given if _HARMLESS.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", own)]
            await send(message)

        scope[ID_IN_SCOPE] = own.decode()
        token = request_id.set(own.decode())
        try:
            await self._traced(scope, receive, send_with_id)
        finally:
            request_id.reset(token)

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A span of the request, until its last byte, which goes on with the client's trace if it named one."""
        if scope["method"] != "POST":  # polls of health, metrics and status would drown the rest
            await self._app(scope, receive, send)
            return
        parent = dict(scope["headers"]).get(tracing.TRACEPARENT.encode())
        name = f"POST {scope['path']}"
        with tracing.span(name, parent=parent and parent.decode("latin-1"), request_id=request_id.get()) as work:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    work.note(**{"http.response.status_code": message["status"]})
                await send(message)

            await self._app(scope, receive, send_noted)
            work.rename(f"POST {getattr(scope.get('route'), 'path', 'nowhere')}")  # without what a client wrote into it


class BodyLimit:
    """Refuses bodies above a limit, by their declared length or while they come in, and compressed ones.

    Args:
        app: what is below.
        limit: bytes.
        larger: limits of routes that take more, by path; what they take must not be kept in memory.
    """

    def __init__(self, app: ASGIApp, limit: int, larger: Mapping[str, int]) -> None:
        self._app = app
        self._limit = limit
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._larger.get(scope["path"], self._limit)
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > limit:
            await self._refuse(send, _too_large(limit))
            return
        if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            await self._refuse(send, RequestError("the request body is compressed; send it without Content-Encoding"))
            return
        seen = 0

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, receive_counted, send)

    async def _refuse(self, send: Send, error: RequestError) -> None:
        body = json.dumps(error_body(error)).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is above the limit of {limit} bytes; send less at once")
