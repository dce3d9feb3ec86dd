"""Redis slow, frozen, killed, full or lying: time is lost within bounds, nothing raises, nothing wrong comes out."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.cache.breaker import OPEN_SECONDS
from shared.keys import alias_key
from shared.local_redis import LocalRedis
from tests.shared.redis_kit import KINDS, Proxy, answering, cache_of, key, proxy, record, until

ALIAS, DIGEST = alias_key("a" * 64), "b" * 64
TIMEOUT = 0.25
#: what a busy machine may add to a deadline
SLACK = 1.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which of the two clients."""
    return str(request.param)


def operations(cache: Any) -> dict[str, tuple[Callable[[], Awaitable[Any]], Any]]:
    """Every operation, and what it gives when Redis does not answer."""
    return {
        "describe": (lambda: cache.describe(key(1)), None),
        "fetch": (lambda: cache.fetch(key(1)), None),
        "fetch_many": (lambda: cache.fetch_many([key(1), key(2)]), [None, None]),
        "put": (lambda: cache.put(key(1), record(1), alias=ALIAS, digest=DIGEST), False),
        "add_alias": (lambda: cache.add_alias(ALIAS, DIGEST), False),
        "resolve_alias": (lambda: cache.resolve_alias(ALIAS), None),
        "delete": (lambda: cache.delete([key(1)]), 0),
        "claim": (lambda: cache.claim(key(1), "me"), True),
        "release": (lambda: cache.release(key(1), "me"), None),
        "wait_for": (lambda: cache.wait_for(key(1), 0.6), None),
        "ping": (lambda: cache.ping(), False),
        "info": (lambda: cache.info(), {}),
    }


NAMES = tuple(operations(None))


@contextmanager
def frozen(server: LocalRedis) -> Any:
    """SIGSTOP: it accepts connections and requests, and never answers."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("connected", [True, False])
async def test_a_frozen_redis_costs_each_operation_its_deadline(
    kind: str, redis_server: LocalRedis, connected: bool
) -> None:
    """R5."""
    for name in NAMES:
        async with cache_of(kind, redis_server.url, timeout=TIMEOUT) as cache:
            if connected:
                assert await cache.ping()
            work, otherwise = operations(cache)[name]
            with frozen(redis_server):
                begin = time.monotonic()
                assert await work() == otherwise
                took = time.monotonic() - begin
            # a wait subscribes before it looks
            assert TIMEOUT * 0.9 < took < (2 if name == "wait_for" else 1) * TIMEOUT + SLACK, name
            assert cache.stats.snapshot()["errors"], name


@pytest.mark.parametrize("name", ["fetch", "describe", "resolve_alias", "put"])
async def test_after_a_few_silences_nobody_waits_and_later_all_is_well(
    kind: str, redis_server: LocalRedis, name: str
) -> None:
    """R5: the circuit opens for reads too, and closes by itself."""
    async with cache_of(kind, redis_server.url, timeout=TIMEOUT) as cache:
        assert await cache.put(key(1), record(1))
        work, otherwise = operations(cache)[name]
        with frozen(redis_server):
            for _ in range(3):
                assert await work() == otherwise
            assert cache.stats.snapshot()["breaker_open"]
            begin = time.monotonic()
            for _ in range(100):
                assert await work() == otherwise
            assert time.monotonic() - begin < 0.5
            assert cache.stats.snapshot()["skipped"] >= 99
        begin = time.monotonic()
        while await cache.fetch(key(1)) != record(1):
            assert time.monotonic() - begin < OPEN_SECONDS + SLACK
            await asyncio.sleep(0.02)
        assert not cache.stats.snapshot()["breaker_open"]


async def test_a_burst_on_a_frozen_redis(kind: str, redis_server: LocalRedis) -> None:
    """More callers than connections: the queue for one does not add to the deadline."""
    async with cache_of(kind, redis_server.url, timeout=TIMEOUT) as cache:
        with frozen(redis_server):
            begin = time.monotonic()
            found = await asyncio.gather(*(cache.fetch(key(name)) for name in range(200)))
            assert time.monotonic() - begin < 2 * TIMEOUT + 2 * SLACK
        assert found == [None] * 200


async def test_a_killed_redis_is_missed_and_comes_back(kind: str, redis_server: LocalRedis) -> None:
    """R5: SIGKILL in the middle of load; nobody restarts anything by hand."""
    async with cache_of(kind, redis_server.url, timeout=TIMEOUT) as cache:
        stop = asyncio.Event()
        worst = 0.0

        async def load(seed: int) -> None:
            nonlocal worst
            while not stop.is_set():
                name, begin = (seed, random.random()), time.monotonic()
                await cache.put(key(name), record(name))
                assert await cache.fetch(key(name)) in (None, record(name))
                worst = max(worst, time.monotonic() - begin)
                await asyncio.sleep(0.005)

        tasks = [asyncio.create_task(load(seed)) for seed in range(8)]
        await asyncio.sleep(0.3)
        before = redis_server.pid
        os.kill(before, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert cache.stats.snapshot()["errors"]
        await until(lambda: redis_server.pid != before)
        puts = cache.stats.snapshot()["puts"]
        await until(lambda: cache.stats.snapshot()["puts"] > puts + 20, OPEN_SECONDS + 4)
        stop.set()
        await asyncio.gather(*tasks)
        assert worst < 2 * TIMEOUT + SLACK


async def test_nobody_listens(kind: str, tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but not listening: refused
        taken.bind(("127.0.0.1", 0))
        for url in (f"redis://127.0.0.1:{taken.getsockname()[1]}", f"unix://{tmp_path}/nothing"):
            for name in NAMES:
                async with cache_of(kind, url, timeout=TIMEOUT) as cache:
                    work, otherwise = operations(cache)[name]
                    begin = time.monotonic()
                    assert await work() == otherwise
                    assert time.monotonic() - begin < TIMEOUT + SLACK


async def test_a_server_that_drips_cannot_stretch_the_deadline(kind: str, tmp_path: Path) -> None:
    """Each byte comes in time, the reply does not."""

    async def drip(request: bytes) -> AsyncIterator[bytes]:
        yield b"$1000\r\n"
        for _ in range(1000):
            yield b"x"
            await asyncio.sleep(TIMEOUT / 10)

    async with answering(drip, tmp_path) as url, cache_of(kind, url, timeout=TIMEOUT) as cache:
        begin = time.monotonic()
        assert await cache.fetch(key(1)) is None
        assert TIMEOUT * 0.9 < time.monotonic() - begin < TIMEOUT + SLACK


LIES = [
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$3\r\nfoo\r\n",
    b"$99999999999\r\n",
    b"$-5\r\n",
    b"*-1\r\n",
    b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
    b"*9999\r\n",
    b":1\r\n",
    b":-1\r\n",
    b":99999999999999999999999\r\n",
    b"+OK\r\n",
    b"+PONG\r\n",
    b"+\xff\xfe\r\n",
    b"-ERR no\r\n",
    b"-\xff\xfe\r\n",
    b"-\r\n",
    b"-MOVED 1 host:1\r\n",
    b"-ASK\r\n",
    b"-LOADING wait\r\n",
    b"-WRONGTYPE x\r\n",
    b"-NOAUTH x\r\n",
    b"-READONLY x\r\n",
    b"-OOM x\r\n",
    b"-BUSY x\r\n",
    b"-MISCONF x\r\n",
    b"_\r\n",
    b"#t\r\n",
    b"%1\r\n+a\r\n+b\r\n",
    b">2\r\n+a\r\n+b\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\0\0\0\0",
    b"\r\n\r\n",
    b"",
]


async def test_a_lying_server_gives_misses(kind: str, tmp_path: Path) -> None:
    """Any reply to any command: no operation raises, none hangs, no read finds anything."""
    rng = random.Random(5)

    async def lie(request: bytes) -> AsyncIterator[bytes]:
        yield b"".join(rng.choice(LIES) for _ in range(rng.randrange(1, 9)))

    async with answering(lie, tmp_path) as url:
        for _ in range(60):
            async with cache_of(kind, url, timeout=0.05) as cache:
                for name, (work, _) in operations(cache).items():
                    found = await asyncio.wait_for(work(), 10)
                    if name in ("describe", "fetch", "resolve_alias", "wait_for"):
                        assert found is None
                    if name == "fetch_many":
                        assert found == [None, None]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: repr(lie[:12]))
async def test_one_lie_to_everything(tmp_path: Path, lie: bytes) -> None:
    async def answer(request: bytes) -> AsyncIterator[bytes]:
        yield lie * request.count(b"*")

    async with answering(answer, tmp_path) as url:
        for kind in KINDS:
            for name in NAMES:
                async with cache_of(kind, url, timeout=0.03) as cache:
                    found = await asyncio.wait_for(operations(cache)[name][0](), 10)
                    if name == "fetch_many":
                        assert found == [None, None]
                    elif name in ("describe", "fetch", "resolve_alias", "wait_for", "release"):
                        assert found is None


# interruptions


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


# memory


@contextmanager
def policy(server: LocalRedis, name: str, mib: int) -> Any:
    """The server with another limit and policy, as its owner may have set it."""
    with redis.Redis.from_url(server.url) as raw:
        raw.config_set("maxmemory-policy", name)
        raw.config_set("maxmemory", mib << 20)
        yield raw


LARGE = {"tokens": 256, "width": 1152}


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
    with policy(redis_server, "allkeys-lru", 20):
        async with cache_of(kind, redis_server.url) as cache:
            for n in range(60):
                assert await cache.put(key(n), record(n, **LARGE))
                assert await cache.fetch(key(n)) == record(n, **LARGE)
            kept = [await cache.describe(key(n)) is not None for n in range(60)]
            assert all(kept[-5:])
            assert not all(kept)
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
