"""Leases and those who wait for them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis

from shared.cache.breaker import Breaker
from shared.cache.local import LocalTier
from shared.cache.stats import CacheStats
from shared.cache.steps import Look, Operations, next_pause
from shared.config import CacheSettings
from shared.keys import lease_key, wake_channel
from shared.records import read_header
from tests.shared.redis_kit import cache_of, key, record, until


async def test_one_owner_at_a_time(cache: Any) -> None:
    assert await cache.claim(key(1), "one")
    assert not await cache.claim(key(1), "two")
    assert not await cache.claim(key(1), "one")
    assert await cache.claim(key(2), "two")
    await cache.release(key(1), "two")  # not its own
    assert not await cache.claim(key(1), "two")
    await cache.release(key(1), "one")
    assert await cache.claim(key(1), "two")
    await cache.release(key("never claimed"), "one")


async def test_a_lease_of_a_dead_owner_is_taken_over(kind: str, redis_url: str) -> None:
    async with cache_of(kind, redis_url, lease=0.2) as cache:
        assert await cache.claim(key(1), "dead")
        begin = time.monotonic()
        assert await cache.wait_for(key(1), 10) is None
        assert 0.1 < time.monotonic() - begin < 1
        assert await cache.claim(key(1), "heir")
        await cache.release(key(1), "dead")  # it was not dead after all
        assert not await cache.claim(key(1), "third")


async def test_a_renewed_lease_does_not_end(kind: str, redis_url: str, raw: Any) -> None:
    async with cache_of(kind, redis_url, lease=0.6) as cache:
        assert await cache.claim(key(1), "one")
        for _ in range(4):
            await asyncio.sleep(0.25)
            assert await cache.renew(key(1), "one")
        assert not await cache.claim(key(1), "two")
        assert not await cache.renew(key(1), "two")
        assert not await cache.renew(key("nobody's"), "one")
        assert not raw.exists(lease_key(key("nobody's")))
        await asyncio.sleep(0.7)
        assert not await cache.renew(key(1), "one")
        assert await cache.claim(key(1), "two")
        assert not await cache.renew(key(1), "one")
        assert raw.get(lease_key(key(1))) == b"two"


def test_a_lease_that_changes_hands_during_its_release_stays(raw: Any) -> None:
    """The steps by hand: between the look and the deletion the lease expires and another takes it."""
    settings, stats = CacheSettings(), CacheStats(Breaker())
    operations = Operations(settings, stats, LocalTier(settings.local, "", stats))
    place = lease_key(key(1))
    raw.set(place, "one")
    with raw.pipeline() as connection:
        connection.watch(place)
        steps = operations.release(key(1), "one")
        assert next(steps)[0] == ("WATCH", place)
        raw.set(place, "two")
        assert steps.send([b"OK", b"one"])[0] == ("MULTI",)
        connection.multi()
        connection.delete(place)
        with pytest.raises(redis.WatchError):
            connection.execute()
    assert raw.get(place) == b"two"


@pytest.mark.parametrize("how", ["put", "release"])
async def test_32_waiters_are_woken_at_once_and_do_not_storm(cache: Any, raw: Any, how: str) -> None:
    """C19: they sleep until something happens; a look of each a second at most meanwhile."""
    await cache.claim(key(1), "owner")
    waits = [asyncio.create_task(cache.wait_for(key(1), 20)) for _ in range(32)]
    await until(lambda: raw.pubsub_numsub(wake_channel(key(1)))[0][1] == 32)
    await asyncio.sleep(0.1)
    before = raw.info("commandstats")["cmdstat_pttl"]["calls"]
    await asyncio.sleep(1.5)
    looks = raw.info("commandstats")["cmdstat_pttl"]["calls"] - before
    assert not any(wait.done() for wait in waits)
    assert looks <= 32 * 3
    begin = time.monotonic()
    if how == "put":
        await cache.put(key(1), record(1))
    else:
        await cache.release(key(1), "owner")
    headers = await asyncio.gather(*waits)
    assert time.monotonic() - begin < 0.7  # sooner than their own next look on average
    assert headers == [read_header(record(1), key(1)) if how == "put" else None] * 32


async def test_a_wait_for_what_is_there_or_nobodys_is_over_at_once(cache: Any) -> None:
    begin = time.monotonic()
    assert await cache.wait_for(key("nobody's"), 10) is None
    await cache.put(key(1), record(1))
    assert await cache.wait_for(key(1), 10)
    assert time.monotonic() - begin < 1


async def test_a_wait_ends_with_its_time(cache: Any) -> None:
    await cache.claim(key(1), "owner")
    begin = time.monotonic()
    assert await cache.wait_for(key(1), 0.3) is None
    assert 0.25 < time.monotonic() - begin < 0.9


async def test_more_waiters_than_subscriptions(kind: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest look by themselves, each about once a second."""
    monkeypatch.setattr(f"shared.cache.{'aio' if kind == 'loop' else 'threads'}.MAX_WAITERS", 1)
    async with cache_of(kind, redis_url) as cache:
        await cache.claim(key(1), "owner")
        waits = [asyncio.create_task(cache.wait_for(key(1), 20)) for _ in range(4)]
        await asyncio.sleep(0.3)
        await cache.put(key(1), record(1))
        async with asyncio.timeout(2):
            assert all(await asyncio.gather(*waits))


async def test_cancelled_waiters_leave_nothing_behind(redis_url: str, raw: Any) -> None:
    async with cache_of("loop", redis_url) as cache:
        await cache.claim(key(1), "owner")
        before = len(raw.client_list())
        waits = [asyncio.create_task(cache.wait_for(key(1), 20)) for _ in range(20)]
        await asyncio.sleep(0.3)
        assert len(raw.client_list()) > before
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert raw.pubsub_numsub(wake_channel(key(1)))[0][1] == 0
        assert await cache.ping()


def test_pauses_of_a_waiter() -> None:
    header = read_header(record(1), key(1))
    assert next_pause(None, 10) is None
    assert next_pause(Look(header, 5), 10) is None
    assert next_pause(Look(None, None), 10) is None
    assert next_pause(Look(None, 5), 0) is None
    assert next_pause(Look(None, 5), 0.1) == 0.1
    assert 0.2 <= (next_pause(Look(None, 0.2), 10) or 0) < 0.3
    assert 0.7 < (next_pause(Look(None, 30), 10) or 0) < 1.3
