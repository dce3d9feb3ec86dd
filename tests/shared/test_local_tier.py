"""The node's tier in front of a real Redis."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shared.cache.local.tier
from shared.cache import EmbeddingCache
from shared.cache.local import folder_of
from shared.config import CacheSettings, LocalSettings
from shared.keys import image_digest
from shared.local_redis import LocalRedis
from shared.records import decode_record, encode_record
from shared.sizing import Grid
from tests.shared.redis_kit import ALIAS, DIGEST, LARGE, NAMESPACE, cache_of, embedding, key, record, until


def local(**changes: Any) -> dict[str, Any]:
    return {"local": LocalSettings(**{"mib": 16, **changes})}


@pytest.fixture
async def two_nodes(kind: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, tier_path: Path) -> Any:
    """Two caches of one Redis, each with a tier of its own."""
    paths = iter([tier_path, Path(f"{tier_path}-b")])
    monkeypatch.setattr(shared.cache.local.tier, "folder_of", lambda url: next(paths))
    async with cache_of(kind, redis_url, **local()) as one, cache_of(kind, redis_url, **local()) as two:
        yield one, two


async def filled(*caches: Any, names: tuple[object, ...] = (1,)) -> None:
    for name in names:
        await caches[0].put(key(name), record(name, **LARGE), alias=ALIAS, digest=DIGEST)
    for cache in caches:
        for name in names:
            assert await cache.fetch(key(name)) == record(name, **LARGE)
        await asyncio.to_thread(lambda cache=cache: cache.local.settle())


async def test_the_second_fetch_asks_redis_for_the_header_alone(two_nodes: Any, raw: Any) -> None:
    cache, _ = two_nodes
    await filled(cache, names=(1, 2))
    before = raw.info("stats")["total_net_output_bytes"]
    found = await cache.fetch_many([key(2), key("absent"), key(1), key(2)])
    assert found == [record(2, **LARGE), None, record(1, **LARGE), record(2, **LARGE)]
    assert raw.info("stats")["total_net_output_bytes"] - before < 20_000
    assert cache.stats.count("local", "hit") == 2
    assert cache.stats.snapshot()["hits"] == 4
    assert torch.equal(decode_record(found[2], key(1))[1], embedding(1, **LARGE))


@pytest.mark.parametrize("how", ["delete", "UNLINK", "FLUSHALL", "expired", "renamed"])
async def test_what_is_gone_in_redis_is_gone_on_every_node(how: str, two_nodes: Any, raw: Any) -> None:
    """By whatever way: nobody has to be told."""
    one, two = two_nodes
    await filled(one, two)
    if how == "delete":
        assert await one.delete([key(1)]) == 1
    elif how == "UNLINK":
        raw.unlink(key(1))
    elif how == "FLUSHALL":
        raw.flushall()
    elif how == "expired":
        raw.pexpire(key(1), 1)
        await asyncio.sleep(0.05)
    else:
        raw.rename(key(1), key(2))
    assert await one.fetch(key(1)) is None
    assert await two.fetch(key(1)) is None
    assert await two.describe(key(1)) is None
    if how == "renamed":
        assert await two.fetch(key(2)) is None, "it carries another key"
    await one.put(key(1), record(1, **LARGE))
    assert await two.fetch(key(1)) == record(1, **LARGE), "made again after the purge"


async def test_what_redis_has_otherwise_is_fetched(two_nodes: Any, raw: Any) -> None:
    cache, _ = two_nodes
    await filled(cache)
    other = encode_record(key(1), embedding("other", **LARGE), Grid(2, 2 * LARGE["tokens"]), 2)
    raw.set(key(1), other)
    assert await cache.fetch(key(1)) == other
    raw.delete(key(1))
    raw.lpush(key(1), "no string")
    assert await cache.fetch(key(1)) is None
    assert cache.stats.snapshot()["corrupt"] == {"type": 1}
    assert not raw.exists(key(1))


async def test_damage_is_never_stored_here(two_nodes: Any, raw: Any) -> None:
    cache, _ = two_nodes
    hurt = bytearray(record(1, **LARGE))
    hurt[-1] ^= 1
    raw.set(key(1), bytes(hurt))
    assert await cache.fetch(key(1)) is None
    await asyncio.to_thread(cache.local.settle)
    assert cache.local.usage().records == 0


async def test_tenants_do_not_meet(two_nodes: Any) -> None:
    """C18: the same picture under two salts, and under none."""
    cache, _ = two_nodes
    pixels = np.zeros((4, 4, 3), np.uint8)
    keys = [NAMESPACE.embedding_key(image_digest(pixels, salt)) for salt in (None, "x", "y")]
    await cache.put(keys[1], encode_record(keys[1], embedding(1), Grid(2, 8), 2))
    assert await cache.fetch(keys[1]) is not None
    await asyncio.to_thread(cache.local.settle)
    assert cache.local.usage().records == 1
    assert await cache.fetch_many(keys) == [None, await cache.fetch(keys[1]), None]
    assert set(cache.local.copies(keys)) == {keys[1]}


@pytest.mark.parametrize(("grace", "found"), [(60.0, True), (0.0, False)])
async def test_while_redis_is_silent_a_copy_serves_for_its_grace(
    grace: float, found: bool, kind: str, redis_server: LocalRedis
) -> None:
    async with cache_of(kind, redis_server.url, **local(grace=grace)) as cache:
        await filled(cache)
        redis_server.stop()
        assert (await cache.fetch(key(1)) is not None) is found
        assert (await cache.describe(key(1)) is not None) is found
        assert await cache.fetch(key("other")) is None
        for _ in range(4):  # the circuit opens: now nobody asks
            await cache.ping()
        assert (await cache.fetch(key(1)) == record(1, **LARGE)) is found


async def test_grace_ends(kind: str, redis_server: LocalRedis) -> None:
    async with cache_of(kind, redis_server.url, **local(grace=0.5)) as cache:
        await filled(cache)
        redis_server.stop()
        await asyncio.sleep(0.6)
        assert await cache.fetch(key(1)) is None
        assert await cache.describe(key(1)) is None


async def test_a_tier_without_a_place_is_no_tier(
    kind: str, redis_url: str, tier_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.cache.local.tier, "folder_of", lambda url: tier_path / "nowhere")
    async with cache_of(kind, redis_url, **local()) as cache:
        await filled(cache)
        assert cache.local.usage() is None
    async with cache_of(kind, redis_url) as off:
        await filled(off)
        assert off.local.usage() is None
    assert not folder_of(redis_url).exists(), "off unless it is asked for"


async def test_the_memory_is_given_back(kind: str, redis_url: str) -> None:
    """Idle records while somebody lives, everything with the last process."""
    async with cache_of(kind, redis_url, **local(idle=1.0)) as cache:
        await filled(cache)
        assert cache.local.usage().records == 1
        await until(lambda: cache.local.usage().records == 0)
        assert folder_of(redis_url).exists()
    assert not folder_of(redis_url).exists()


def test_a_forked_process_has_a_writer_of_its_own(redis_url: str) -> None:
    cache = EmbeddingCache(CacheSettings(timeout=2.0, **local()), redis_url)
    cache.put(key(1), record(1))
    cache.put(key(2), record(2))
    assert cache.fetch(key(1)) == record(1)
    assert cache.local.settle()

    def child() -> None:
        good = cache.fetch(key(1)) == record(1) and cache.fetch(key(2)) == record(2) and cache.local.settle()
        os._exit(0 if good and cache.local.usage().records == 2 else 1)  # type: ignore[union-attr]

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    cache.close()
    assert not folder_of(redis_url).exists()


def test_what_processes_count_comes_together(redis_url: str) -> None:
    settings = CacheSettings(timeout=2.0, **local())
    caches = [EmbeddingCache(settings, redis_url) for _ in range(2)]
    caches[0].put(key(1), record(1))
    for cache in caches:
        for _ in range(3):
            assert cache.fetch(key(1)) is not None
            assert cache.local.settle()

    def counts() -> dict[str, int]:
        usage = caches[0].local.usage()
        assert usage is not None
        return dict(usage.counts)

    wait_for(lambda: counts()["hit"] == 5 and counts()["stored"] == 1)
    for cache in caches:
        cache.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
