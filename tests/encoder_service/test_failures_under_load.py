"""The failure rule under load: over 1,000 requests while Redis does everything that it can do to us.

A request is what the service makes of one: find or make the embedding, fetch it as a language replica would, and have
it sent along when it cannot be fetched.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import redis
import torch

from encoder_service.engine import EncoderEngine
from shared.cache import AsyncEmbeddingCache
from shared.cache.breaker import OPEN_SECONDS
from shared.config import CacheSettings
from shared.local_redis import LocalRedis
from shared.records import decode_record
from tests.encoder_service.chaos_proxy import ChaosProxy, chaos_proxy
from tests.encoder_service.kit import Make, expected, file, pixels
from tests.shared.sentinel_kit import Group, group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TIMEOUT = 0.25
PICTURES, REQUESTS, CALLERS = 16, 70, 8
#: operations of one request that may each wait for their deadline before the circuit opens, at most
OPERATIONS = 9
#: what a busy machine adds
SLACK = 5.0
#: what Sentinels may take, seconds
FAILOVER = 60.0
POLICIES = (
    "noeviction",
    *(f"{keys}-{how}" for keys in ("allkeys", "volatile") for how in ("lru", "lfu", "random")),
    "volatile-ttl",
)

Fault = Callable[[], AbstractAsyncContextManager[object]]


class Load:
    """Requests with known answers."""

    def __init__(self, engine: EncoderEngine, reader: AsyncEmbeddingCache, checkpoint: Path) -> None:
        self.engine, self.reader = engine, reader
        pictures = [pixels(3000 + n, 40 + 8 * (n % 4), 30) for n in range(PICTURES)]
        self.files = [file(picture) for picture in pictures]
        self.truth = [expected(checkpoint, picture) for picture in pictures]
        self.inline = self.answered = 0

    async def request(self, number: int) -> float:
        """Seconds that it took; its embedding is right."""
        begin = time.monotonic()
        which = number % PICTURES
        item = await self.engine.encode(self.files[which])
        record = item.record or await self.reader.fetch(item.key)
        if record is None:
            record = (await self.engine.encode(self.files[which], inline=True)).record
        assert record is not None
        self.inline += item.record is not None
        _, found = decode_record(record, item.key)
        assert torch.allclose(found, self.truth[which], atol=1e-4), "a wrong embedding"
        self.answered += 1
        return time.monotonic() - begin

    async def run(self) -> list[float]:
        numbers = iter(range(REQUESTS))
        took: list[float] = []

        async def caller() -> None:
            for number in numbers:
                took.append(await self.request(number))

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return took

    async def recovered(self, within: float = OPEN_SECONDS) -> float:
        """Seconds until a picture is stored and fetched again, by itself."""
        begin = time.monotonic()
        while True:
            item = await self.engine.encode(self.files[0])
            if item.record is None and await self.reader.fetch(item.key) is not None:
                return time.monotonic() - begin
            assert time.monotonic() - begin < within + SLACK
            await asyncio.sleep(0.05)


@asynccontextmanager
async def _killed(server: LocalRedis) -> AsyncIterator[None]:
    """SIGKILL after a while; the service's keeper starts it again, empty."""
    task = asyncio.get_running_loop().call_later(0.1, os.kill, server.pid, signal.SIGKILL)
    yield
    task.cancel()


@asynccontextmanager
async def _told(client: redis.Redis, *command: object) -> AsyncIterator[None]:
    """A command that holds Redis up, from another connection."""
    task = asyncio.create_task(asyncio.to_thread(client.execute_command, *command))
    await asyncio.sleep(0.05)
    yield
    await task


@asynccontextmanager
async def _full(client: redis.Redis, policy: str) -> AsyncIterator[None]:
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 20_000)
    before = client.info("stats")
    yield
    after = client.info("stats")
    refused = any("OOM" in name for name in client.info("errorstats"))
    assert after["evicted_keys"] > before["evicted_keys"] or refused, "the limit was not reached"
    client.config_set("maxmemory", 0)


@asynccontextmanager
async def _replica(client: redis.Redis) -> AsyncIterator[None]:
    client.replicaof("127.0.0.1", "1")
    yield
    client.replicaof("NO", "ONE")


@asynccontextmanager
async def _locked(client: redis.Redis) -> AsyncIterator[None]:
    """Somebody sets a password that we do not have; open connections end."""
    client.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    yield
    client.execute_command("ACL", "SETUSER", "default", "nopass")


@asynccontextmanager
async def _hurt(proxy: ChaosProxy, **how: float) -> AsyncIterator[None]:
    before = proxy.hurt
    for name, value in how.items():
        setattr(proxy, name, value)
    yield
    for name in how:
        setattr(proxy, name, 0.0)
    assert proxy.hurt > before, "nothing was hurt"


async def test_over_1000_requests_while_redis_fails_in_every_way(make: Make, checkpoint: Path, tmp_path: Path) -> None:
    """R5, R6, R10: 0 failed requests, 0 wrong embeddings, recovery by itself, bounded added latency."""
    server = LocalRedis(tmp_path / "own", 64)
    server.start()
    client = redis.Redis.from_url(server.url)
    try:
        async with chaos_proxy(server.socket, tmp_path) as (proxy, url):
            engine = await make(url=url, timeout=TIMEOUT, lease=2.0)
            reader = AsyncEmbeddingCache(CacheSettings(timeout=TIMEOUT), url)
            load = Load(engine, reader, checkpoint)
            faults: dict[str, Fault] = {
                "kill": partial(_killed, server),
                "CLIENT PAUSE": partial(_told, client, "CLIENT", "PAUSE", 1500),
                "DEBUG SLEEP": partial(_told, client, "DEBUG", "SLEEP", 1.5),
                **{f"full, {policy}": partial(_full, client, policy) for policy in POLICIES},
                "read-only replica": partial(_replica, client),
                "password": partial(_locked, client),
                "delay": partial(_hurt, proxy, delay=0.4),
                "cut": partial(_hurt, proxy, cut=0.05),
                "corrupt": partial(_hurt, proxy, flip=0.05),
            }
            quiet = float(np.median(await load.run()))
            print(f"\n| fault | p50 ms | p99 ms | largest s | recovered after s |\n| none | {quiet * 1e3:.1f} |")
            for name, fault in faults.items():
                client.flushall()
                async with fault():
                    took = await load.run()
                recovery = await load.recovered()
                p50, p99 = (float(np.quantile(took, share)) * 1e3 for share in (0.5, 0.99))
                print(f"| {name} | {p50:.1f} | {p99:.1f} | {max(took):.2f} | {recovery:.2f} |")
                assert max(took) < OPERATIONS * TIMEOUT + SLACK, name
            assert load.answered >= 1000
            assert load.inline > 0
            await reader.close()
    finally:
        client.close()
        server.stop()


async def test_over_1000_requests_through_failovers(make: Make, checkpoint: Path, tmp_path: Path) -> None:
    """Behind Sentinels the master is killed under load, twice: 0 failed requests, 0 wrong embeddings, recovery."""
    with group(tmp_path) as servers:
        engine = await make(url=servers.url, timeout=TIMEOUT, lease=2.0)
        reader = AsyncEmbeddingCache(CacheSettings(timeout=TIMEOUT), servers.url)
        load = Load(engine, reader, checkpoint)
        await load.run()
        for number in range(2):
            master = servers.master()
            recovery = asyncio.create_task(_killed_master(0.2, servers, master, load))
            took: list[float] = []
            while len(took) < 480 or not recovery.done():
                took += await load.run()
            print(f"\n| kill {number} | {len(took)} requests | {max(took):.2f} s | {await recovery:.2f} s |")
            assert max(took) < OPERATIONS * TIMEOUT + SLACK
            assert servers.master() != master
            await asyncio.to_thread(servers.start_server, master, servers.master())
            await asyncio.to_thread(servers.ready)
        assert load.answered >= 1000
        assert load.inline > 0, "nothing was requested meanwhile"
        await reader.close()


async def _killed_master(after: float, servers: Group, port: int, load: Load) -> float:
    """SIGKILL of a server; seconds until all is well."""
    await asyncio.sleep(after)
    await asyncio.to_thread(servers.kill, port)
    return await load.recovered(FAILOVER)
