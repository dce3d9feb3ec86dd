"""Suspects and culprits, with a real Redis and without any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from llm_service.api.quarantine import Quarantine
from shared.cache import AsyncEmbeddingCache
from shared.config import CacheSettings, ImageSettings
from shared.errors import QuarantinedImage, ReplicaLost
from shared.items import VisionItem
from shared.local_redis import LocalRedis
from shared.sizing import Grid

ITEM = VisionItem("key", Grid(2, 2), 1, 4)
SETTINGS = ImageSettings(quarantine_seconds=1.0)
POISON, GOOD = 64 * "a", 64 * "b"


class Pool:
    """Encoders that die over poison, together with whatever they had in work."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self._in_work: dict[asyncio.Future[VisionItem], str] = {}

    async def encode(self, digest: str, again: bool) -> VisionItem:
        self.calls.append((digest, again))
        future = asyncio.get_running_loop().create_future()
        self._in_work[future] = digest
        asyncio.get_running_loop().call_later(0.02, self._finish, future)
        return await future

    def _finish(self, future: asyncio.Future[VisionItem]) -> None:
        if self._in_work.get(future) == POISON:
            for victim in self._in_work:
                if not victim.done():
                    victim.set_exception(ReplicaLost("died"))
            self._in_work.clear()
        elif not future.done():
            del self._in_work[future]
            future.set_result(ITEM)


async def ask(quarantine: Quarantine, pool: Pool, digest: str) -> VisionItem:
    return await quarantine.guard(digest, lambda again: pool.encode(digest, again))


@pytest_asyncio.fixture
async def cache(tmp_path: Path) -> AsyncIterator[AsyncEmbeddingCache]:
    redis = LocalRedis(tmp_path / "redis", maxmemory_mib=16)
    redis.start()
    cache = AsyncEmbeddingCache(CacheSettings(), redis.url)
    try:
        yield cache
    finally:
        await cache.close()
        redis.stop()


async def test_the_innocent_are_cleared_and_the_culprit_refused(cache: AsyncEmbeddingCache) -> None:
    quarantine, pool = Quarantine("m", cache, SETTINGS), Pool()
    good = [f"{number:064x}" for number in range(8)]
    results = await asyncio.gather(
        *(ask(quarantine, pool, digest) for digest in [POISON, *good]), return_exceptions=True
    )
    assert isinstance(results[0], QuarantinedImage)
    assert results[0].status == 422
    assert results[1:] == [ITEM] * len(good)
    assert [again for digest, again in pool.calls if digest == POISON] == [False, True], "two deaths, not three"
    pool.calls.clear()
    with pytest.raises(QuarantinedImage):
        await ask(Quarantine("m", cache, SETTINGS), pool, POISON)
    assert pool.calls == [], "another ingress replica knows as well, and asks no encoder"
    assert await ask(Quarantine("m", cache, SETTINGS), pool, good[0]) == ITEM


async def test_another_model_may_take_the_image(cache: AsyncEmbeddingCache) -> None:
    pool = Pool()
    with pytest.raises(QuarantinedImage):
        await ask(Quarantine("m", cache, SETTINGS), pool, POISON)
    pool.calls.clear()
    with pytest.raises(QuarantinedImage):
        await ask(Quarantine("other", cache, SETTINGS), pool, POISON)
    assert pool.calls, "its own encoders had to find out"


async def test_a_quarantine_ends(cache: AsyncEmbeddingCache) -> None:
    quarantine, pool = Quarantine("m", cache, SETTINGS), Pool()
    with pytest.raises(QuarantinedImage):
        await ask(quarantine, pool, POISON)
    await asyncio.sleep(SETTINGS.quarantine_seconds + 0.2)
    pool.calls.clear()
    with pytest.raises(QuarantinedImage):
        await ask(quarantine, pool, POISON)
    assert pool.calls


async def test_deaths_are_counted_without_redis(tmp_path: Path) -> None:
    cache = AsyncEmbeddingCache(CacheSettings(), f"unix://{tmp_path}/nobody.sock")
    quarantine, pool = Quarantine("m", cache, SETTINGS), Pool()
    with pytest.raises(QuarantinedImage):
        await ask(quarantine, pool, POISON)
    assert len(pool.calls) == SETTINGS.quarantine_after
    with pytest.raises(QuarantinedImage):
        await ask(quarantine, pool, POISON)
    assert len(pool.calls) == SETTINGS.quarantine_after
    assert await ask(quarantine, pool, GOOD) == ITEM
    await cache.close()
