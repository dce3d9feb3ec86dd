"""Redis slow, frozen, killed or lying: time is lost within bounds, nothing raises, nothing wrong comes out."""

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

from shared.cache.breaker import OPEN_SECONDS
from shared.local_redis import LocalRedis
from tests.shared.redis_kit import ALIAS, DIGEST, KINDS, answering, cache_of, key, record, until

TIMEOUT = 0.25
#: what a busy machine may add to a deadline
SLACK = 1.0


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
