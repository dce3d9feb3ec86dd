"""The cache on a real Redis: what it keeps, and what happens when Redis does not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import redis
import torch

from shared.cache import MAX_CONNECTIONS, READ_BYTES, AsyncEmbeddingCache, EmbeddingCache, client_options
from shared.config import CacheSettings
from shared.guard import FAILURES_TO_OPEN, OPEN_SECONDS, Guard
from shared.keys import Namespace, alias_key, lease_key
from shared.local_redis import LocalRedis
from shared.records import decode_record, encode_record
from shared.sizing import Grid

SETTINGS = CacheSettings(timeout=0.3, lease=1.0)
NAMESPACE = Namespace("m", "t", "p")


def key(number: int) -> str:
    return NAMESPACE.embedding_key(f"{number:064x}")


def record(number: int, tokens: int = 64, width: int = 64) -> bytes:
    tensor = torch.full((tokens, width), float(number))
    return encode_record(key(number), tensor, Grid(tokens, 1), 1)


@pytest.fixture
async def cache(redis_url: str) -> AsyncIterator[AsyncEmbeddingCache]:
    cache = AsyncEmbeddingCache(SETTINGS, redis_url)
    yield cache
    await cache.close()


@contextmanager
def frozen(server: LocalRedis) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_every_wait_has_a_deadline_and_the_library_retries_nothing() -> None:
    options = client_options(CacheSettings(timeout=0.25))
    assert options["socket_timeout"] == options["socket_connect_timeout"] == options["timeout"] == 0.25
    assert options["retry_on_timeout"] is False
    assert options["socket_read_size"] == READ_BYTES
    cache = EmbeddingCache(CacheSettings(timeout=0.25), "redis://127.0.0.1:1")
    begin = time.monotonic()
    assert cache.fetch(key(1)) is None
    assert time.monotonic() - begin < 1


async def test_put_describe_fetch_delete(cache: AsyncEmbeddingCache, redis_url: str) -> None:
    assert await cache.describe(key(1)) is None
    assert await cache.fetch(key(1)) is None
    assert await cache.put(key(1), record(1), alias=alias_key("f"), digest=f"{1:064x}")
    header = await cache.describe(key(1))
    assert header is not None
    assert (header.tokens, header.grid) == (64, Grid(64, 1))
    assert await cache.fetch(key(1)) == record(1)
    assert await cache.resolve_alias(alias_key("f")) == f"{1:064x}"
    assert EmbeddingCache(SETTINGS, redis_url).fetch(key(1)) == record(1)
    assert await cache.delete([key(1), key(2)]) == 1
    assert await cache.describe(key(1)) is None


async def test_entries_live_as_long_as_configured(redis_url: str) -> None:
    cache = AsyncEmbeddingCache(CacheSettings(ttl=0.2), redis_url)
    await cache.put(key(1), record(1), alias=alias_key("f"), digest="0" * 64)
    assert await cache.describe(key(1))
    await asyncio.sleep(0.3)
    assert await cache.describe(key(1)) is None
    assert await cache.resolve_alias(alias_key("f")) is None
    await cache.close()


@pytest.mark.parametrize("damage", ["cut", "bit", "other key", "pickle", "empty"])
async def test_a_damaged_entry_is_a_miss_that_is_counted_and_deleted(
    cache: AsyncEmbeddingCache, redis_url: str, damage: str
) -> None:
    good = record(1)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    bad = {
        "cut": good[:-5],
        "bit": bytes(flipped),
        "other key": record(2),
        "pickle": b"\x80\x04K\x01." * 50,
        "empty": b"",
    }
    with redis.Redis.from_url(redis_url) as raw:
        raw.set(key(1), bad[damage])
        assert await cache.fetch(key(1)) is None
        if damage != "empty":
            assert not raw.exists(key(1))
            assert cache.guard.count("fetch", "miss") == 0
        raw.set(key(1), bad[damage])
        assert EmbeddingCache(SETTINGS, redis_url).fetch(key(1)) is None


async def test_one_owner_has_the_lease_until_it_ends(cache: AsyncEmbeddingCache) -> None:
    assert await cache.claim(key(1), "me")
    assert not await cache.claim(key(1), "you")
    await cache.release(key(1), "you")
    assert not await cache.claim(key(1), "you")
    await cache.release(key(1), "me")
    assert await cache.claim(key(1), "you")
    await asyncio.sleep(SETTINGS.lease + 0.1)  # the owner died
    assert await cache.claim(key(1), "me")


async def test_thirty_waiters_are_woken_by_the_record(cache: AsyncEmbeddingCache) -> None:
    await cache.claim(key(1), "me")
    waiters = [asyncio.create_task(cache.wait_for(key(1), 20)) for _ in range(30)]
    await asyncio.sleep(0.2)
    await cache.put(key(1), record(1))
    begin = time.monotonic()
    assert all(await asyncio.gather(*waiters))
    assert time.monotonic() - begin < 0.8  # a wake-up, not the poll


async def test_waiters_are_woken_when_the_owner_gives_up(cache: AsyncEmbeddingCache) -> None:
    await cache.claim(key(1), "me")
    waiter = asyncio.create_task(cache.wait_for(key(1), 20))
    await asyncio.sleep(0.2)
    await cache.release(key(1), "me")
    assert await asyncio.wait_for(waiter, 0.8) is None


async def test_waiters_notice_that_the_owner_died(cache: AsyncEmbeddingCache) -> None:
    await cache.claim(key(1), "me")
    begin = time.monotonic()
    assert await cache.wait_for(key(1), 20) is None
    assert time.monotonic() - begin < SETTINGS.lease + 1.2


async def test_a_frozen_redis_costs_bounded_time_and_comes_back(
    cache: AsyncEmbeddingCache, redis_server: LocalRedis
) -> None:
    await cache.put(key(1), record(1))
    with frozen(redis_server):
        begin = time.monotonic()
        for _ in range(FAILURES_TO_OPEN):
            assert await cache.fetch(key(1)) is None
        assert time.monotonic() - begin < FAILURES_TO_OPEN * SETTINGS.timeout + 0.5
        begin = time.monotonic()
        assert await cache.fetch(key(1)) is None
        assert await cache.claim(key(1), "me")
        assert not await cache.put(key(2), record(2))
        assert time.monotonic() - begin < 0.1  # the circuit is open
        assert cache.guard.is_open
    await asyncio.sleep(OPEN_SECONDS + 0.1)
    assert await cache.fetch(key(1)) == record(1)
    assert not cache.guard.is_open


async def test_a_killed_redis_is_a_miss_and_a_new_one_is_found(redis_server: LocalRedis) -> None:
    cache = AsyncEmbeddingCache(SETTINGS, redis_server.url)
    await cache.put(key(1), record(1))
    os.kill(redis_server.pid, signal.SIGKILL)
    await asyncio.sleep(0.1)
    assert await cache.fetch(key(1)) is None
    assert not await cache.put(key(1), record(1))
    assert await cache.wait_for(key(1), 5) is None
    redis_server.stop()
    redis_server.start()
    await asyncio.sleep(OPEN_SECONDS + 0.1)
    assert await cache.put(key(1), record(1))
    assert await cache.fetch(key(1)) == record(1)
    await cache.close()


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-lru"])
async def test_a_full_redis_refuses_or_evicts_but_never_raises(redis_url: str, policy: str) -> None:
    cache = AsyncEmbeddingCache(SETTINGS, redis_url)
    with redis.Redis.from_url(redis_url) as raw:
        raw.config_set("maxmemory-policy", policy)
        raw.config_set("maxmemory", "12mb")
        stored = [await cache.put(key(n), record(n, 1024, 256)) for n in range(24)]
        assert all(stored) == (policy == "allkeys-lru")
        assert stored[0]
        for n in range(24):
            found = await cache.fetch(key(n))
            assert found is None or found == record(n, 1024, 256)
        assert await cache.claim(key(99), "me")
    await cache.close()


async def test_a_record_that_would_evict_all_others_is_refused(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as raw:
        raw.config_set("maxmemory", "8mb")
    cache = AsyncEmbeddingCache(SETTINGS, redis_url)
    assert not await cache.put(key(1), record(1, 2048, 256))
    assert cache.guard.count("put", "refused") == 1
    assert await cache.put(key(2), record(2, 256, 256))
    await cache.close()


async def test_a_read_only_redis_and_a_wrong_password_are_misses(redis_server: LocalRedis) -> None:
    with redis.Redis.from_url(redis_server.url) as raw:
        cache = AsyncEmbeddingCache(SETTINGS, redis_server.url)
        assert await cache.put(key(1), record(1))
        raw.replicaof("127.0.0.1", "1")
        assert not await cache.put(key(2), record(2))
        assert await cache.claim(key(2), "me")
        raw.replicaof("NO", "ONE")
        await cache.close()
        raw.config_set("requirepass", "secret")
        locked = AsyncEmbeddingCache(SETTINGS, redis_server.url)
        assert await locked.fetch(key(1)) is None
        assert not await locked.put(key(1), record(1))
        await locked.close()


async def test_interrupted_reads_never_give_another_entry(cache: AsyncEmbeddingCache) -> None:
    """Cancels reads of large records at random moments, on few connections."""
    for n in range(4):
        assert await cache.put(key(n), record(n, 4096, 128))
    wrong = 0

    async def read(n: int, patience: float) -> None:
        nonlocal wrong
        try:
            async with asyncio.timeout(patience):
                found = await cache.fetch(key(n))
        except TimeoutError:
            return
        if found is not None:
            _, tensor = decode_record(found, key(n))
            wrong += not bool((tensor == n).all())

    for round_ in range(40):
        await asyncio.gather(*(read(n % 4, 0.0001 * (n + round_)) for n in range(12)))
    await asyncio.gather(*(read(n, 5) for n in range(4)))
    assert wrong == 0
    assert cache.guard.count("fetch", "hit") >= 4


async def test_five_hundred_readers_share_few_connections(redis_url: str) -> None:
    cache = AsyncEmbeddingCache(CacheSettings(timeout=20), redis_url)
    await cache.put(key(1), record(1))
    tasks = [asyncio.create_task(cache.fetch(key(1))) for _ in range(500)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks[1::2])
    assert all(result == record(1) for result in results)
    with redis.Redis.from_url(redis_url) as raw:
        assert len(raw.client_list()) <= MAX_CONNECTIONS + 1
    await cache.close()


async def test_tenants_do_not_meet(cache: AsyncEmbeddingCache) -> None:
    from shared.keys import bytes_digest

    mine, theirs = (alias_key(bytes_digest(b"file", salt)) for salt in ("x", "y"))
    await cache.add_alias(mine, "1" * 64)
    assert await cache.resolve_alias(mine) == "1" * 64
    assert await cache.resolve_alias(theirs) is None


def test_the_circuit_opens_after_failures_in_a_row_and_lets_one_through() -> None:
    now = [0.0]
    guard = Guard(clock=lambda: now[0])
    for _ in range(FAILURES_TO_OPEN - 1):
        guard.record("fetch", "error")
    guard.answered()
    for _ in range(FAILURES_TO_OPEN):
        assert guard.allows()
        guard.record("fetch", "error")
    assert not guard.allows()
    now[0] = OPEN_SECONDS + 0.01
    assert [guard.allows(), guard.allows()] == [True, False]
    guard.answered()
    assert guard.allows()


def test_leases_are_apart_from_records() -> None:
    assert lease_key(key(1)) != key(1)
