"""The FastAPI application: middleware, lifetimes, and errors in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cache

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from llm_service.api.access import Access
from llm_service.api.batches.routes import BODIES as BATCH_BODIES
from llm_service.api.batches.routes import router as batch_router
from llm_service.api.batches.service import running_batches
from llm_service.api.departures import CancelOnDeparture
from llm_service.api.endpoint import Backend, Endpoint
from llm_service.api.middleware import ID_IN_SCOPE, BodyLimit, RequestId
from llm_service.api.openapi import document
from llm_service.api.responses import error_body
from llm_service.api.routes import BODIES, router
from llm_service.api.state import State
from llm_service.api.uploads import Uploads
from shared.config import AccessSettings, BatchSettings, HttpSettings
from shared.errors import LookonceError, RequestError, RetryableError, StorageError, Unauthorized
from shared.log import NO_REQUEST, request_id

logger = logging.getLogger(__name__)

#: what a form adds to the file in it, at most
FORM_BYTES = 1 << 16


def create_app(
    settings: HttpSettings,
    access: AccessSettings,
    connect: Callable[[], AbstractAsyncContextManager[Backend]],
    batches: BatchSettings | None = None,
) -> FastAPI:
    """Builds the application.

    Args:
        settings: limits and deadlines.
        access: who may ask.
        connect: opens the services of all models, and the cache, for the application's life.
        batches: where files and batches are kept; None for the defaults.
    """

    batches = batches or BatchSettings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with connect() as backend, AsyncExitStack() as stack:
            endpoint, gate, uploads = Endpoint(settings, backend), Access(access), Uploads()
            running = running_batches(batches, gate.everyone(), endpoint.answer, lambda: endpoint.in_work)
            app.state.lookonce = State(endpoint, gate, uploads, await stack.enter_async_context(running))
            try:
                yield
            finally:
                await uploads.close()

    app = FastAPI(title="lookonce", version="0.1.0", lifespan=lifespan)
    larger = {"/v1/files": batches.max_file_bytes + FORM_BYTES}
    app.add_middleware(CancelOnDeparture)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, larger=larger)
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(access.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestId)
    app.include_router(router)
    app.include_router(batch_router)
    _add_error_handlers(app)
    app.openapi = cache(lambda: document(app, [*BODIES, *BATCH_BODIES], keys=bool(access.tenants)))  # type: ignore[method-assign]
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(LookonceError)
    async def on_lookonce_error(_: Request, error: LookonceError) -> JSONResponse:
        if error.status >= 500:
            logger.error("request failed: %s", error.message, extra={"code": error.code})
        headers = {}
        if isinstance(error, RetryableError):
            headers["Retry-After"] = str(max(1, round(error.retry_after)))
        if isinstance(error, Unauthorized):
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(error_body(error), status_code=error.status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def on_wrong_parameter(_: Request, error: RequestValidationError) -> JSONResponse:
        fault = error.errors()[0]
        where = ".".join(str(step) for step in fault["loc"][1:])
        return JSONResponse(error_body(RequestError(f"{where}: {fault['msg']}", param=where or None)), status_code=400)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, OSError):  # a large part of a form goes through a file; no fault of the client's
            logger.error("a body found no room: %s", error.__cause__)
            return await on_lookonce_error(request, StorageError("no space left here for this body; try again later"))
        wrapped = RequestError(f"{request.method} {request.scope['path']}: {error.detail}")
        return JSONResponse(error_body(wrapped), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        own = request.scope.get(ID_IN_SCOPE, NO_REQUEST)
        request_id.set(own)  # this handler stands outside of the middleware that did
        logger.exception("unexpected error", exc_info=error)
        hidden = LookonceError("an internal error; the log has the details under this response's x-request-id")
        return JSONResponse(error_body(hidden), status_code=500, headers={"X-Request-Id": own})
