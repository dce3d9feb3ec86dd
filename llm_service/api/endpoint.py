"""Completions over the services of all models: admission, deadlines, whole bodies and event streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

from llm_service.api.access import Tenant
from llm_service.api.accounts import measured, observe_engine, observe_images
from llm_service.api.chat import ImageService, ModelService
from llm_service.api.responses import ChatWriter, TextWriter, Writer, error_body, report_body, usage_body
from llm_service.api.schemas import Body, ChatCompletionRequest, CompletionRequest
from llm_service.api.several import collected, final_usage, generated, items_of
from llm_service.messages import Chunk, EngineUsage
from shared.cache import AsyncEmbeddingCache
from shared.config import HttpSettings
from shared.errors import Busy, DeadlineExceeded, LookonceError, RequestError, UnknownModel
from shared.items import VisionItem
from shared.log import request_id


@dataclass(frozen=True)
class Backend:
    """What the application's life opens.

    Attributes:
        services: by model name.
        cache: the embedding cache, for its state.
    """

    services: Mapping[str, ImageService]
    cache: AsyncEmbeddingCache


Request = ChatCompletionRequest | CompletionRequest
SomeRequest = TypeVar("SomeRequest", ChatCompletionRequest, CompletionRequest)
SomeBody = TypeVar("SomeBody", bound=Body)
#: what lines of a batch may ask for
BATCHED: dict[str, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}
#: bodies above this many bytes are parsed beside the event loop, so that running streams keep flowing
PARSE_IN_THREAD_BYTES = 1 << 18


class Endpoint:
    """Answers completion requests.

    Args:
        settings: limits and deadlines.
        backend: services and cache.
    """

    def __init__(self, settings: HttpSettings, backend: Backend) -> None:
        self.services = backend.services
        self.cache = backend.cache
        self._settings = settings
        #: interactive requests
        self.in_work = 0

    def models(self, tenant: Tenant) -> list[str]:
        """Names of the models that a tenant may use."""
        return [name for name in self.services if not tenant.models or name in tenant.models]

    def talking(self, model: str, tenant: Tenant) -> ModelService:
        """The service of a model that answers in words.

        Raises:
            UnknownModel: names the models that there are.
            RequestError: an encoder alone.
        """
        service = self.service(model, tenant)
        if not isinstance(service, ModelService):
            raise RequestError(f"{model} is an encoder without a language model; ask /v1/embeddings", param="model")
        return service

    def service(self, model: str, tenant: Tenant) -> ImageService:
        """The service of a model.

        Raises:
            UnknownModel: names the models that there are.
        """
        known = self.models(tenant)
        if model not in known:
            raise UnknownModel(f"no model {model!r} here; there is: {', '.join(known)}", param="model")
        return self.services[model]

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Holds one of the places for requests in work.

        Raises:
            Busy: all are taken.
        """
        if self.in_work >= self._settings.max_concurrent:
            raise Busy(f"{self.in_work} requests are in work, which is the limit; try again in a moment")
        self.in_work += 1
        try:
            yield
        finally:
            self.in_work -= 1

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Ends work that takes longer than a request may.

        Raises:
            DeadlineExceeded: it did.
        """
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                yield
        except TimeoutError as error:
            raise self._late() from error

    async def chat(self, body: bytes, tenant: Tenant) -> Response:
        """Answers one chat request."""
        return await self._answer("chat", ChatCompletionRequest, body, tenant)

    async def complete(self, body: bytes, tenant: Tenant) -> Response:
        """Answers one plain completion request."""
        return await self._answer("completion", CompletionRequest, body, tenant)

    async def answer(self, endpoint: str, body: bytes, tenant: Tenant, request: str) -> dict[str, Any]:
        """Answers one request of a batch, whole; it takes no place from interactive ones.

        Args:
            endpoint: path of the endpoint that the request is for.
            body: its body.
            tenant: whose it is.
            request: its id.

        Raises:
            LookonceError: what the endpoint would have answered.
        """
        request_id.set(request)
        with measured("batch") as outcome:
            asked = await parse(BATCHED[endpoint], body)
            service = self.talking(asked.model, tenant)
            outcome.model = asked.model
            if asked.stream:
                raise RequestError("a batch has no streams; leave stream out", param="stream")
            whole = await self._completion(asked, service, tenant)
            outcome.status = 200
            return whole

    async def _answer(self, route: str, kind: type[SomeRequest], body: bytes, tenant: Tenant) -> Response:
        with measured(route) as outcome:
            request = await parse(kind, body)
            service = self.talking(request.model, tenant)
            outcome.model = request.model
            response = await (self._stream if request.stream else self._whole)(request, service, tenant)
            outcome.status = response.status_code
            return response

    async def _whole(self, request: Request, service: ModelService, tenant: Tenant) -> Response:
        with self.admitted():
            return JSONResponse(await self._completion(request, service, tenant))

    async def _completion(self, request: Request, service: ModelService, tenant: Tenant) -> dict[str, Any]:
        async with self.deadline():
            prepared = await service.prepare(request, tenant.salt)
            chunks = await collected(service, prepared)
        usage, items = final_usage(chunks, prepared), items_of(prepared)
        self._observe(request, items, usage)
        report = report_body(usage, items) if request.timings else None
        return _writer(request).whole(chunks, request.answers, usage_body(usage, items), report)

    async def _stream(self, request: Request, service: ModelService, tenant: Tenant) -> Response:
        events = self._events(request, service, tenant)
        first = await anext(events)  # errors before the first token still get their HTTP status
        return StreamingResponse(_prepend(first, events), media_type="text/event-stream")

    async def _events(self, request: Request, service: ModelService, tenant: Tenant) -> AsyncGenerator[str, None]:
        """Server-sent events of a streamed completion."""
        writer = _writer(request)
        chunks: list[Chunk] = []
        with self.admitted():
            try:
                async with asyncio.timeout(self._settings.request_timeout):
                    prepared = await service.prepare(request, tenant.salt)
                    async with aclosing(generated(service, prepared)) as stream:
                        async for chunk in stream:
                            if not chunks and (openings := writer.openings(request.answers)):
                                yield "".join(map(_event, openings))
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
                usage, items = final_usage(chunks, prepared), items_of(prepared)
                self._observe(request, items, usage)
                if (request.stream_options and request.stream_options.include_usage) or request.timings:
                    report = report_body(usage, items) if request.timings else None
                    yield _event(writer.closing(usage_body(usage, items), report))
        yield "data: [DONE]\n\n"

    @staticmethod
    def _observe(request: Request, items: Sequence[VisionItem], usage: EngineUsage) -> None:
        observe_images(request.model, items)
        observe_engine(request.model, usage)

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request took longer than {self._settings.request_timeout:g} s")


async def parse(kind: type[SomeBody], body: bytes) -> SomeBody:
    """Reads a body.

    Raises:
        RequestError: not JSON, or a field of the wrong type; names the field.
    """
    try:
        if len(body) > PARSE_IN_THREAD_BYTES:
            return await asyncio.to_thread(kind.model_validate_json, body)
        return kind.model_validate_json(body)
    except ValidationError as error:
        # of a union's complaints the deepest is about what the client meant
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        deepest = max(faults, key=lambda fault: len(fault["loc"]))
        # steps like "list[…]" and "str" name the branch of a union, not a field
        path = [str(step) for step in deepest["loc"] if "[" not in str(step) and step != "str"]
        where = ".".join(path)
        raise RequestError(f"{where}: {deepest['msg']}" if where else deepest["msg"], param=where or None) from None


def _writer(request: Request) -> Writer:
    kind = ChatWriter if isinstance(request, ChatCompletionRequest) else TextWriter
    return kind(request_id.get(), request.model)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _prepend(first: str, rest: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event
