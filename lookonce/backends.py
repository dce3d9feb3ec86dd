"""Who answers a captioning job: pools started for it, pools of a service in this process, or a service over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from llm_service.api.chat import ModelService
from llm_service.captioning.desks import Desk, PoolDesk
from llm_service.captioning.http_desk import HttpDesk, described
from llm_service.captioning.question import checkpoint_fingerprint
from lookonce.client import key_headers
from lookonce.listening import free_port
from lookonce.service import Report, Service, ray_running, service
from shared.config import ModelSettings, Settings
from shared.errors import ConfigError
from shared.families import has_language

#: makes a worker's desk; travels to the worker
Desks = Callable[[], AbstractAsyncContextManager[Desk]]


@dataclass(frozen=True)
class Backend:
    """Who answers.

    Attributes:
        model: its name.
        identity: what of the model its answers depend on, as JSON values.
        open: starts what is needed for the length of a ``with`` block.
    """

    model: str
    identity: dict[str, Any]
    open: Callable[[Report], AbstractContextManager[Desks]]


def local(name: str | None, settings: Settings, pools: Service | None) -> Backend:
    """The pools of a service in this process, or pools that are started for the job.

    Args:
        name: of the model; None takes the first.
        settings: the whole tree.
        pools: of the service that runs; None starts some.

    Raises:
        ConfigError, CheckpointError: no such model.
    """
    model = settings.model(name) if name else settings.models[0]
    if not has_language(model.checkpoint):
        raise ConfigError(f"model {model.name} has no language half to caption with; lookonce encode runs its encoder")
    http = settings.http.model_copy(update={"port": free_port(), "host": "127.0.0.1"})
    own = settings.model_copy(update={"models": (model,), "http": http})

    @contextmanager
    def start(report: Report) -> Iterator[Desks]:
        if pools is not None:
            yield partial(_pool_desk, own, pools.cache_url)
            return
        with service(own, report) as started:
            yield partial(_pool_desk, own, started.cache_url)

    return Backend(model.name, _identity(model), start)


def remote(address: str, name: str | None, settings: Settings) -> Backend:
    """A service that runs, over HTTP; only the flow of rows runs here.

    Args:
        address: base URL.
        name: of the model; None takes the first.
        settings: for the flow.

    Raises:
        Unavailable: nobody answers there.
        RequestError: the service does not know the key or the model.
    """
    headers = key_headers()
    model = described(address, headers, name)

    @contextmanager
    def start(report: Report) -> Iterator[Desks]:
        with ray_running(settings, report):
            yield partial(_http_desk, address, headers, model["id"], settings.jobs.row_timeout)

    return Backend(model["id"], {"name": model["id"], "fingerprint": model.get("fingerprint")}, start)


def _identity(model: ModelSettings) -> dict[str, Any]:
    return {
        "name": model.name,
        "checkpoint": checkpoint_fingerprint(model.checkpoint),
        "encoder": [model.encoder.dtype, model.encoder.quantization],
        "language": model.language.dtype,
    }


@asynccontextmanager
async def _pool_desk(settings: Settings, cache_url: str) -> AsyncIterator[Desk]:
    """Over the pools of the cluster that the worker lives in."""
    from lookonce.application import model_service
    from shared.cache import AsyncEmbeddingCache
    from shared.fetch import ImageFetcher

    cache, fetcher = AsyncEmbeddingCache(settings.cache, cache_url), ImageFetcher(settings.images)
    try:
        service = model_service(settings, settings.models[0], cache, fetcher, batch=True)
        assert isinstance(service, ModelService), "local() refuses models without a language half"
        yield PoolDesk(service)
    finally:
        await fetcher.aclose()
        await cache.close()


@asynccontextmanager
async def _http_desk(address: str, headers: dict[str, str], model: str, timeout: float) -> AsyncIterator[Desk]:
    desk = HttpDesk(address, headers, model, timeout)
    try:
        yield desk
    finally:
        await desk.close()
