"""A Redis that is full, under every policy of eviction."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from shared.local_redis import LocalRedis
from tests.shared.redis_kit import ALIAS, DIGEST, LARGE, cache_of, key, record


@contextmanager
def policy(server: LocalRedis, name: str, mib: int) -> Any:
    """The server with another limit and policy, as its owner may have set it."""
    with redis.Redis.from_url(server.url) as raw:
        raw.config_set("maxmemory-policy", name)
        raw.config_set("maxmemory", mib << 20)
        yield raw


@pytest.mark.parametrize("name", ["noeviction", "volatile-lru"])
async def test_a_full_redis_that_evicts_nothing(kind: str, redis_server: LocalRedis, name: str) -> None:
    """R6: puts are refused and counted, leases count as taken, reads go on, and the circuit stays closed."""
    with policy(redis_server, name, 20) as raw:
        async with cache_of(kind, redis_server.url) as cache:
            stored = [await cache.put(key(n), record(n, **LARGE)) for n in range(30)]
            assert stored[0]
            assert not any(stored[-8:])
            assert cache.stats.snapshot()["rejected"] == stored.count(False)
            await asyncio.to_thread(raw.config_set, "maxmemory", 10 << 20)  # now not even small ones fit
            assert not await cache.add_alias(ALIAS, DIGEST)
            assert await cache.claim(key("new"), "me")
            await cache.release(key("new"), "me")
            assert await cache.fetch(key(0)) == record(0, **LARGE)
            assert await cache.describe(key(0))
            counts = cache.stats.snapshot()
            assert not counts["breaker_open"]
            assert (counts["skipped"], counts["errors"], counts["corrupt"]) == (0, 0, {})


async def test_volatile_lru_with_a_life_evicts(kind: str, redis_server: LocalRedis) -> None:
    with policy(redis_server, "volatile-lru", 20):
        async with cache_of(kind, redis_server.url, ttl=600) as cache:
            assert all([await cache.put(key(n), record(n, **LARGE)) for n in range(30)])


async def test_allkeys_lru_keeps_what_is_used(kind: str, redis_server: LocalRedis) -> None:
    with policy(redis_server, "allkeys-lru", 20) as raw:
        raw.config_set("maxmemory-samples", 64)  # of so few keys that is all: no luck in who goes first
        async with cache_of(kind, redis_server.url) as cache:
            assert all([await cache.put(key(n), record(n, **LARGE)) for n in range(8)])
            await asyncio.sleep(2.1)  # Redis counts idleness in whole seconds
            for n in (0, 1):
                assert await cache.fetch(key(n)) == record(n, **LARGE)
            for n in range(8, 60):
                assert await cache.put(key(n), record(n, **LARGE))
                if raw.exists(*(key(old) for old in range(2, 8))) < 6:  # EXISTS is no use in LRU's eyes
                    break
            assert n < 59, "nothing was evicted"
            assert raw.exists(key(0), key(1)) == 2
            assert cache.stats.snapshot()["corrupt"] == {}


async def test_a_record_that_would_evict_the_others_is_not_sent(kind: str, redis_server: LocalRedis) -> None:
    with policy(redis_server, "allkeys-lru", 20) as raw:
        async with cache_of(kind, redis_server.url) as cache:
            for n in range(5):
                assert await cache.put(key(n), record(n))
            huge = record("huge", tokens=600, width=1152)
            assert len(huge) * 8 > 20 << 20
            assert not await cache.put(key("huge"), huge, alias=ALIAS, digest=DIGEST)
            assert await cache.put(key("fits"), record("fits", tokens=500, width=1152))
            assert raw.exists(*(key(n) for n in range(5))) == 5
            assert not raw.exists(key("huge"), ALIAS)
            assert cache.stats.snapshot()["refused"] == 1


async def test_a_redis_without_a_limit_takes_any_record(kind: str, redis_server: LocalRedis) -> None:
    with policy(redis_server, "noeviction", 0):
        async with cache_of(kind, redis_server.url) as cache:
            assert await cache.put(key("huge"), record("huge", tokens=600, width=1152))
