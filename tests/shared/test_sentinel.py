"""Redis behind Sentinels: the master is found, and found again after a failover, by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.cache import EmbeddingCache
from shared.cache.inventory import Inventory
from shared.config import CacheSettings
from shared.errors import Unavailable
from tests.shared.redis_kit import LARGE, cache_of, key, record
from tests.shared.sentinel_kit import Group, free_ports, group

pytestmark = pytest.mark.slow
#: what a busy machine may need; an idle one takes a few seconds
PATIENCE = 40.0


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Group]:
    with group(tmp_path) as made:
        yield made


async def recovered(cache: Any, name: object) -> None:
    """Waits until a large record is stored and read again, and a small question answered."""
    end = time.monotonic() + PATIENCE
    while not (
        await cache.put(key(name), record(name, **LARGE))
        and await cache.fetch(key(name)) == record(name, **LARGE)
        and await cache.describe(key(name))
    ):
        assert time.monotonic() < end, "it does not recover"
        await asyncio.sleep(0.05)


async def test_a_killed_master_is_followed_and_nothing_raises(kind: str, servers: Group) -> None:
    """SIGKILL under load; then the old one comes back as a replica, and a second failover leads back to it."""
    first = servers.master()
    async with cache_of(kind, servers.url, timeout=0.5) as cache:
        assert await cache.put(key("large"), record("large", **LARGE))
        assert await cache.claim(key("new"), "me")
        asked = 0

        async def caller(seed: int, over: asyncio.Event) -> None:
            nonlocal asked
            while not over.is_set():
                found = await cache.fetch(key("large"))
                assert found is None or found == record("large", **LARGE)
                await cache.put(key(seed), record(seed))
                await cache.describe(key(seed))
                asked += 1
                await asyncio.sleep(0.01)

        over = asyncio.Event()
        callers = [asyncio.create_task(caller(seed, over)) for seed in range(8)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(servers.kill, first)
        await recovered(cache, "after")
        over.set()
        await asyncio.gather(*callers)
        assert asked > 100
        second = servers.master()
        assert second != first
        with servers.client(second) as client:
            assert client.get(key("after")) == record("after", **LARGE)

        await asyncio.to_thread(servers.start_server, first, second)
        with servers.client(servers.sentinels[0]) as sentinel:
            await until_failover(sentinel)
        await asyncio.to_thread(servers.until_moved, second)
        await moved_to(servers, first, cache)


async def moved_to(servers: Group, port: int, cache: Any) -> None:
    """Waits until entries arrive there; the old master takes some for a moment more, and forgets them."""
    end = time.monotonic() + PATIENCE
    with servers.client(port) as client:
        while not client.exists(key("moved")):
            assert time.monotonic() < end, "still with the old master"
            await cache.put(key("moved"), record("moved", **LARGE))
            await asyncio.sleep(0.05)
    await recovered(cache, "then")


async def until_failover(sentinel: redis.Redis) -> None:
    """Asks for a failover until the Sentinel has a replica to promote."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            sentinel.execute_command("SENTINEL", "FAILOVER", "embeddings")
            return
        except redis.ResponseError:
            assert time.monotonic() < end, "no failover"
            await asyncio.sleep(0.1)


async def test_a_frozen_master_is_followed(kind: str, servers: Group) -> None:
    """SIGSTOP: nothing is refused, nothing is answered; awake again, it takes no writes that would be lost."""
    first = servers.master()
    async with cache_of(kind, servers.url, timeout=0.3) as cache:
        await recovered(cache, "before")
        os.kill(servers.processes[first].pid, signal.SIGSTOP)
        try:
            await asyncio.to_thread(servers.until_moved, first)
            await recovered(cache, "during")
        finally:
            os.kill(servers.processes[first].pid, signal.SIGCONT)
        await recovered(cache, "later")
        with servers.client(servers.servers[1]) as client:
            assert client.exists(key("during"), key("later")) == 2


async def test_a_demoted_master_is_left_though_it_answers(kind: str, servers: Group) -> None:
    """READONLY is the only sign, when nobody closes our connections."""
    first, second = servers.servers
    async with cache_of(kind, servers.url) as cache:
        await recovered(cache, "before")
        for port in servers.sentinels:  # nobody tidies up
            os.kill(servers.processes[port].pid, signal.SIGSTOP)
        with servers.client(second) as new, servers.client(first) as old:
            new.replicaof("NO", "ONE")
            old.replicaof("127.0.0.1", second)
        assert not await cache.put(key("lost"), record("lost"))
        for port in servers.sentinels:
            servers.kill(port)
        servers.servers.reverse()
        for port in servers.sentinels:
            await asyncio.to_thread(servers.start_sentinel, port)
        await moved_to(servers, second, cache)


async def test_dead_sentinels_are_passed_over(kind: str, servers: Group) -> None:
    """One that is gone, one that is frozen; and with all of them gone, the master that is known goes on being used."""
    servers.kill(servers.sentinels[0])
    os.kill(servers.processes[servers.sentinels[1]].pid, signal.SIGSTOP)
    async with cache_of(kind, servers.url) as cache:
        assert await cache.put(key(1), record(1))
        for port in servers.sentinels[1:]:
            servers.kill(port)
        with servers.client(servers.servers[0]) as client:
            client.client_kill_filter(_type="normal", skipme=True)  # every connection must be made anew
        await recovered(cache, 2)
        assert await cache.fetch(key(1)) == record(1)


async def test_passwords_of_servers_and_sentinels(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with group(tmp_path, "secret") as servers:
        async with cache_of(kind, servers.url) as cache:
            await recovered(cache, 1)
        wrong = servers.url.replace("sentinel_password=ssecret", "sentinel_password=topsecret")
        async with cache_of(kind, wrong) as cache:
            assert not await cache.ping()
            assert await cache.fetch(key(1)) is None
    assert "secret" not in caplog.text
    assert "no Sentinel tells" in caplog.text


async def test_waiters_are_woken_over_the_master(kind: str, servers: Group) -> None:
    async with cache_of(kind, servers.url) as cache:
        assert await cache.claim(key(1), "one")
        wait = asyncio.create_task(cache.wait_for(key(1), 10))
        await asyncio.sleep(0.2)
        with servers.client(servers.servers[0]) as client:
            assert client.pubsub_channels()
        assert await cache.put(key(1), record(1))
        assert await wait


def test_the_tool_finds_the_master(servers: Group) -> None:
    cache = EmbeddingCache(CacheSettings(timeout=2.0), servers.url)
    assert cache.put(key(1), record(1))
    cache.close()
    inventory = Inventory(servers.url)
    assert list(inventory.embeddings()) == [key(1)]
    assert inventory.delete([key(1)]) == 1
    inventory.close()
    with pytest.raises(Unavailable, match="Sentinel"):
        Inventory(f"redis+sentinel://127.0.0.1:{free_ports(1)[0]}/embeddings")


async def test_a_name_that_no_sentinel_knows_is_a_miss_and_said(
    kind: str, servers: Group, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with cache_of(kind, servers.url.replace("/embeddings/", "/elsewhere/")) as cache:
            assert await cache.fetch(key(1)) is None
            assert not await cache.put(key(1), record(1))
    assert "no master of the name elsewhere" in caplog.text
