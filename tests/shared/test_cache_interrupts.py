"""Operations that are cut off, cancelled or too many: no reply ever reaches another caller."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import redis

from shared.local_redis import LocalRedis
from tests.shared.redis_kit import Proxy, cache_of, key, proxy, record, until


async def _interrupted_fetch(kind: str, between: Proxy, url: str, what: str, at: int) -> None:
    """Interrupts a fetch after ``at`` bytes; then other keys are asked for on the same cache."""
    async with cache_of(kind, url, timeout=0.06 if kind == "threads" else 2.0) as cache:
        assert await cache.fetch(key("mine")) == record("mine")
        connections = between.accepted
        setattr(between, what, at)
        fetch = asyncio.create_task(cache.fetch(key("other")))
        await until(lambda: between.held)
        if kind == "loop":
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
        else:  # a thread can only be interrupted by its deadline
            assert await fetch is None
        between.release()
        for name in ("mine", "third", "mine"):
            found = await cache.fetch(key(name))
            while found is None:  # the machine is busy
                found = await cache.fetch(key(name))
            assert found == record(name)
        assert between.accepted > connections  # the interrupted connection was not used again
        assert cache.stats.snapshot()["corrupt"] == {}


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("what", ["replies", "requests"])
async def test_interrupted_at_every_byte(
    kind: str, redis_server: LocalRedis, tmp_path: Path, tcp: bool, what: str
) -> None:
    """The reply of an interrupted caller never reaches the next: that would be another user's picture."""
    async with cache_of("loop", redis_server.url) as cache:
        for name in ("mine", "other", "third"):
            await cache.put(key(name), record(name))
    whole = len(record("other")) + len("$000\r\n\r\n") if what == "replies" else len(key("other")) + 20
    # a thread needs its whole deadline each time
    step = 1 if kind == "loop" else 23
    async with proxy(redis_server.socket, tcp, tmp_path) as (between, url):
        for at in range(0, whole, step):
            await _interrupted_fetch(kind, between, url, what, at)


async def test_a_large_put_interrupted_anywhere_stores_nothing_or_all(
    kind: str, redis_server: LocalRedis, tmp_path: Path
) -> None:
    large = record("large", tokens=64, width=1152)
    async with proxy(redis_server.socket, False, tmp_path) as (between, url):
        for at in range(0, len(large), len(large) // 12):
            async with cache_of(kind, url, timeout=0.1 if kind == "threads" else 5.0) as cache:
                await cache.delete([key("large")])
                between.requests = at
                put = asyncio.create_task(cache.put(key("large"), large))
                await until(lambda: between.held)
                if kind == "loop":
                    # asyncio.wait_for in Python 3.11 swallows some cancellations; the client must not use it
                    put.cancel()
                    done, _ = await asyncio.wait([put], timeout=2)
                    assert done
                    assert put.cancelled()
                else:
                    assert not await put
                between.release()
                await asyncio.sleep(0.02)
                assert await cache.fetch(key("large")) in (None, large)
                assert cache.stats.snapshot()["corrupt"] == {}


async def test_large_reads_interrupted_at_any_moment(redis_server: LocalRedis) -> None:
    """Many at once on few connections; whoever is not interrupted gets its own."""
    async with cache_of("loop", redis_server.url, timeout=20) as cache:
        values = [record(name, tokens=1024, width=128) for name in range(4)]
        for name, value in enumerate(values):
            await cache.put(key(name), value)

        async def read(name: int, patience: float) -> bool:
            try:
                async with asyncio.timeout(patience):
                    found = await cache.fetch(key(name))
            except TimeoutError:
                return False
            assert bytes(found) == values[name]
            return True

        done = [await asyncio.gather(*(read(n % 4, 0.0005 * (n + turn % 7)) for n in range(12))) for turn in range(40)]
        whole = sum(map(sum, done))
        assert 0 < whole < 480
        assert all(await asyncio.gather(*(read(n % 4, 20) for n in range(12))))


async def test_500_requests_half_of_them_cancelled(redis_server: LocalRedis) -> None:
    """R4: more than the connections there are; all others complete, nothing leaks, and it can be done again."""
    with redis.Redis.from_url(redis_server.url) as raw:
        async with cache_of("loop", redis_server.url, timeout=20) as cache:
            values = [record(name, tokens=64, width=64) for name in range(20)]
            for name, value in enumerate(values):
                await cache.put(key(name), value)
            rng = random.Random(3)
            for _ in range(3):
                tasks = [asyncio.create_task(cache.fetch(key(n % 20))) for n in range(500)]
                for n in rng.sample(range(500), 250):
                    await asyncio.sleep(0)
                    tasks[n].cancel()
                    if rng.random() < 0.3:
                        asyncio.get_running_loop().call_soon(tasks[n].cancel)  # and again while it cleans up
                found = await asyncio.gather(*tasks, return_exceptions=True)
                for n, one in enumerate(found):
                    assert one == values[n % 20] or isinstance(one, asyncio.CancelledError)
                assert sum(not isinstance(one, BaseException) for one in found) >= 250
                await asyncio.sleep(0.1)
                assert len(raw.client_list()) <= 33
            assert cache.stats.snapshot()["errors"] == 0
            # all places are free again: as many at once as there may be
            assert all(await asyncio.gather(*(cache.ping() for _ in range(100))))
        await asyncio.sleep(0.1)
        assert len(raw.client_list()) == 1


async def test_threads_burst_beyond_the_connections(redis_server: LocalRedis) -> None:
    async with cache_of("threads", redis_server.url, timeout=20) as cache:
        await cache.put(key(1), record(1))
        assert await asyncio.gather(*(cache.fetch(key(1)) for _ in range(500))) == [record(1)] * 500


async def test_a_replica_and_a_locked_redis_are_misses(kind: str, redis_server: LocalRedis) -> None:
    """A failover left a replica, which reads and does not write; then somebody set a password."""
    with redis.Redis.from_url(redis_server.url) as raw:
        async with cache_of(kind, redis_server.url) as cache:
            assert await cache.put(key(1), record(1))
            raw.replicaof("127.0.0.1", "1")
            assert not await cache.put(key(2), record(2))
            assert await cache.claim(key(2), "me")
            assert await cache.fetch(key(1)) == record(1)
            assert not cache.stats.snapshot()["breaker_open"]
            raw.replicaof("NO", "ONE")
            assert await cache.put(key(2), record(2))
        raw.config_set("requirepass", "secret")
        async with cache_of(kind, redis_server.url) as cache:
            assert await cache.fetch(key(1)) is None
            assert not await cache.put(key(1), record(1))
