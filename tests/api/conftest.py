"""The HTTP application over real engines in this process, without Ray: two tenants and an administrator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import uvicorn
from openai import OpenAI

from llm_service.api.access import key_hash
from llm_service.api.app import create_app
from llm_service.api.chat import ImageService, ModelService
from llm_service.api.endpoint import Backend
from llm_service.api.pools import PoolStatus
from llm_service.api.vision import ImageResolver
from llm_service.messages import Chunk
from llm_service.prompts import Prompt, prompt_builder
from llm_service.sampling import SamplingOptions
from lookonce.listening import free_port
from shared.cache import AsyncEmbeddingCache
from shared.config import (
    AccessSettings,
    CacheSettings,
    EncoderOutput,
    EncoderSettings,
    HttpSettings,
    ImageSettings,
    LanguageSettings,
    ModelSettings,
    TenantSettings,
)
from shared.families import has_language, size_rule
from shared.fetch import ImageFetcher
from shared.items import VisionItem
from shared.keys import Namespace
from shared.local_redis import LocalRedis
from shared.sizing_radio import ONE_ROW

if TYPE_CHECKING:
    from encoder_service.engine import EncoderEngine
    from llm_service.engine import LanguageEngine

ROOT = Path(__file__).parent.parent.parent
MODEL = "demo"
KEYS = {"alice": "lo-alice", "bob": "lo-bob", "carol": "lo-carol", "operator": "lo-operator"}
MAX_MODEL_LEN = 512


@dataclass
class EngineEncoderPool:
    """An encoder pool of one engine."""

    engine: EncoderEngine

    async def identity(self) -> Namespace:
        return self.engine.identity()

    async def encode(self, data: bytes, *, salt: str | None, inline: bool, again: bool = False) -> VisionItem:
        return await self.engine.encode(data, salt=salt, inline=inline, again=again)

    async def ready(self) -> bool:
        return True

    async def status(self) -> PoolStatus:
        return PoolStatus({"RUNNING": 1}, self.engine.stats())


@dataclass
class EngineLanguagePool:
    """A language pool of one engine."""

    engine: LanguageEngine

    def generate(
        self, request_id: str, prompt: Prompt, items: list[VisionItem], sampling: SamplingOptions
    ) -> AsyncIterator[Chunk]:
        return self.engine.generate(request_id, prompt, items, sampling)

    async def answer(
        self, request_id: str, prompt: Prompt, items: list[VisionItem], sampling: SamplingOptions
    ) -> list[Chunk]:
        return await self.engine.answer(request_id, prompt, items, sampling)

    async def ready(self) -> bool:
        return True

    async def status(self) -> PoolStatus:
        return PoolStatus({"RUNNING": 1}, dict(self.engine.stats()))


@contextmanager
def serving(
    folder: Path,
    access: AccessSettings,
    checkpoint: Path = ROOT / "models" / "demo",
    output: EncoderOutput = "features",
) -> Iterator[str]:
    """Base URL of the application on engines of the demo model, or of another; of an encoder alone, on that."""
    from encoder_service.engine import EncoderEngine
    from llm_service.engine import LanguageEngine

    model = ModelSettings(
        name=MODEL,
        checkpoint=checkpoint,
        encoder=EncoderSettings(output=output),
        language=LanguageSettings(max_model_len=MAX_MODEL_LEN, max_num_seqs=16),
    )
    images, settings = ImageSettings(allow_private_hosts=True), CacheSettings()

    @asynccontextmanager
    async def connect() -> AsyncIterator[Backend]:
        cache, fetcher = AsyncEmbeddingCache(settings, redis.url), ImageFetcher(images)
        encoder, language = EncoderEngine(model, images, cache), LanguageEngine(model, settings, redis.url)
        resolver = ImageResolver(EngineEncoderPool(encoder), cache, fetcher, images, MODEL)
        rule = ONE_ROW if output == "summary" else size_rule(model.checkpoint)
        service = ImageService(resolver, rule)
        try:
            if has_language(model.checkpoint):
                await asyncio.gather(encoder.start(), language.start())
                prompts = prompt_builder(model.checkpoint)
                service = ModelService(resolver, EngineLanguagePool(language), prompts, rule, MAX_MODEL_LEN)
            else:
                await encoder.start()
            yield Backend({MODEL: service}, cache)
        finally:
            await language.stop()
            await encoder.stop()
            await fetcher.aclose()
            await cache.close()

    redis = LocalRedis(folder, maxmemory_mib=64)
    redis.start()
    try:
        port = free_port()
        app = create_app(HttpSettings(port=port), access, connect)
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            url = f"http://127.0.0.1:{port}"
            await_start(url, thread)
            yield url
        finally:
            server.should_exit = True
            thread.join(60)
    finally:
        redis.stop()


def await_start(url: str, thread: threading.Thread) -> None:
    while True:
        assert thread.is_alive(), "the application did not start"
        try:
            httpx.get(f"{url}/healthz", timeout=1)
            return
        except httpx.TransportError:
            thread.join(0.2)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    def tenant(name: str, **settings: object) -> TenantSettings:
        return TenantSettings(name=name, keys=(key_hash(KEYS[name]),), **settings)

    tenants = (
        tenant("alice"),
        tenant("bob"),
        tenant("carol", models=("another",), requests_per_minute=4),
        tenant("operator", admin=True),
    )
    with serving(
        tmp_path_factory.mktemp("redis"), AccessSettings(tenants=tenants, cors_origins=("https://example.org",))
    ) as base:
        yield base


def as_tenant(url: str, name: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEYS[name]}"}, timeout=60, trust_env=False)


@pytest.fixture
def alice(url: str) -> Iterator[httpx.Client]:
    with as_tenant(url, "alice") as client:
        yield client


@pytest.fixture
def bob(url: str) -> Iterator[httpx.Client]:
    with as_tenant(url, "bob") as client:
        yield client


@pytest.fixture
def openai(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=KEYS["alice"], max_retries=0)
