"""The FastAPI application: routes, errors in OpenAI's shape, admission."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from llm_service.api.chat import ChatService, PreparedChat
from llm_service.api.middleware import BodyLimit, RequestId
from llm_service.api.responses import CompletionWriter, error_body, report_body, usage_body
from llm_service.api.schemas import ChatCompletionRequest
from llm_service.messages import Chunk, EngineUsage
from shared import metrics
from shared.config import HttpSettings
from shared.errors import Busy, DeadlineExceeded, LookonceError, RequestError, RetryableError, UnknownModel
from shared.log import request_id

logger = logging.getLogger(__name__)

Services = Mapping[str, ChatService]
#: bodies above this many bytes are parsed beside the event loop, so that running streams keep flowing
PARSE_IN_THREAD_BYTES = 1 << 18


def create_app(settings: HttpSettings, connect: Callable[[], AbstractAsyncContextManager[Services]]) -> FastAPI:
    """Builds the application.

    Args:
        settings: limits and deadlines.
        connect: opens the services of all models for the application's life.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with connect() as services:
            app.state.endpoint = Endpoint(settings, services)
            yield

    app = FastAPI(title="lookonce", version="0.1.0", lifespan=lifespan)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(RequestId)
    _add_error_handlers(app)

    schema = ChatCompletionRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    @app.post("/v1/chat/completions", openapi_extra=body)
    async def chat_completions(request: Request) -> Response:
        """Answers a chat about images and text, streamed or whole."""
        return await _endpoint(request).chat(await request.body())

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """The models that this service answers for."""
        names = _endpoint(request).services
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "lookonce"} for name in names]
        return {"object": "list", "data": cards}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        """One model."""
        _endpoint(request).service(name)
        return {"id": name, "object": "model", "created": 0, "owned_by": "lookonce"}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answers while the ingress lives."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Prometheus metrics of every process on this node."""
        text, content_type = await asyncio.to_thread(metrics.render)
        return Response(text, media_type=content_type)

    return app


def _endpoint(request: Request) -> Endpoint:
    endpoint: Endpoint = request.app.state.endpoint
    return endpoint


class Endpoint:
    """Chat completions over the services of all models, with admission and deadlines."""

    def __init__(self, settings: HttpSettings, services: Services) -> None:
        self.services = services
        self._settings = settings
        self._in_work = 0

    def service(self, model: str) -> ChatService:
        """The chat service of a model.

        Raises:
            UnknownModel: names the models that there are.
        """
        if model not in self.services:
            raise UnknownModel(f"no model {model!r} here; there is: {', '.join(self.services)}", param="model")
        return self.services[model]

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._in_work >= self._settings.max_concurrent:
            raise Busy(f"{self._in_work} requests are in work, which is the limit; try again in a moment")
        self._in_work += 1
        try:
            yield
        finally:
            self._in_work -= 1

    async def chat(self, body: bytes) -> Response:
        """Answers one chat request."""
        begin = time.perf_counter()
        model, status = "", 500
        try:
            request = await _parse(body)
            service = self.service(request.model)
            model = request.model
            response = await (self._stream if request.stream else self._whole)(request, service)
            status = response.status_code
            return response
        except LookonceError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = 499  # the client left
            raise
        finally:
            metrics.REQUESTS.labels("chat", model, str(status)).inc()
            metrics.REQUEST_SECONDS.labels("chat", model).observe(time.perf_counter() - begin)

    async def _whole(self, request: ChatCompletionRequest, service: ChatService) -> Response:
        with self._admitted():
            try:
                async with asyncio.timeout(self._settings.request_timeout):
                    chat = await service.prepare(request, salt=None)
                    async with aclosing(service.generate(request_id.get(), chat)) as stream:
                        chunks = [chunk async for chunk in stream]
            except TimeoutError as error:
                raise self._late() from error
        usage = _final_usage(chunks, chat)
        _observe(request.model, chat, usage)
        writer = CompletionWriter(request_id.get(), request.model)
        report = report_body(usage, chat.items) if request.timings else None
        return JSONResponse(writer.whole(chunks, request.n, usage_body(usage, chat.items), report))

    async def _stream(self, request: ChatCompletionRequest, service: ChatService) -> Response:
        events = self._events(request, service)
        first = await anext(events)  # errors before the first token still get their HTTP status
        return StreamingResponse(_prepend(first, events), media_type="text/event-stream")

    async def _events(self, request: ChatCompletionRequest, service: ChatService) -> AsyncGenerator[str, None]:
        """Server-sent events of a streamed completion."""
        writer = CompletionWriter(request_id.get(), request.model)
        chunks: list[Chunk] = []
        with self._admitted():
            try:
                async with asyncio.timeout(self._settings.request_timeout):
                    chat = await service.prepare(request, salt=None)
                    async with aclosing(service.generate(request_id.get(), chat)) as stream:
                        async for chunk in stream:
                            if not chunks:
                                yield "".join(_event(writer.opening(index)) for index in range(request.n))
                            chunks.append(chunk)
                            yield _event(writer.piece(chunk))
            except TimeoutError as error:
                if not chunks:
                    raise self._late() from error
                yield _event(error_body(self._late()))
            except LookonceError as error:
                if not chunks:
                    raise
                yield _event(error_body(error))
            else:
                usage = _final_usage(chunks, chat)
                _observe(request.model, chat, usage)
                if (request.stream_options and request.stream_options.include_usage) or request.timings:
                    report = report_body(usage, chat.items) if request.timings else None
                    yield _event(writer.closing(usage_body(usage, chat.items), report))
        yield "data: [DONE]\n\n"

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request took longer than {self._settings.request_timeout:g} s")


async def _parse(body: bytes) -> ChatCompletionRequest:
    """Reads a body.

    Raises:
        RequestError: not JSON, or a field of the wrong type; names the field.
    """
    try:
        if len(body) > PARSE_IN_THREAD_BYTES:
            return await asyncio.to_thread(ChatCompletionRequest.model_validate_json, body)
        return ChatCompletionRequest.model_validate_json(body)
    except ValidationError as error:
        # of a union's complaints the deepest is about what the client meant
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        deepest = max(faults, key=lambda fault: len(fault["loc"]))
        # steps like "list[…]" and "str" name the branch of a union, not a field
        path = [str(step) for step in deepest["loc"] if "[" not in str(step) and step != "str"]
        where = ".".join(path)
        raise RequestError(f"{where}: {deepest['msg']}" if where else deepest["msg"], param=where or None) from None


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _prepend(first: str, rest: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


def _final_usage(chunks: list[Chunk], chat: PreparedChat) -> EngineUsage:
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    return usages[-1] if usages else EngineUsage(len(chat.prompt.token_ids), sum(len(c.token_ids) for c in chunks))


def _observe(model: str, chat: PreparedChat, usage: EngineUsage) -> None:
    for item in chat.items:
        source = "cache" if item.cached else "encoder"
        metrics.IMAGES.labels(model, source).inc()
        metrics.IMAGE_TOKENS.labels(model, source).inc(item.tokens)
        for stage, seconds in item.timings.items():
            metrics.STAGE_SECONDS.labels(model, stage).observe(seconds)
    for stage, seconds in usage.timings.items():
        metrics.STAGE_SECONDS.labels(model, f"engine_{stage}").observe(seconds)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(LookonceError)
    async def on_lookonce_error(_: Request, error: LookonceError) -> JSONResponse:
        if error.status >= 500:
            logger.error("request failed: %s", error.message, extra={"code": error.code})
        headers = {"Retry-After": str(max(1, round(error.retry_after)))} if isinstance(error, RetryableError) else None
        return JSONResponse(error_body(error), status_code=error.status, headers=headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        wrapped = RequestError(f"{request.method} {request.scope['path']}: {error.detail}")
        return JSONResponse(error_body(wrapped), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> JSONResponse:
        logger.exception("unexpected error", exc_info=error)
        hidden = LookonceError("an internal error; the log has the details under this response's x-request-id")
        return JSONResponse(error_body(hidden), status_code=500)
