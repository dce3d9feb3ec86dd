"""Rights, options and housekeeping of the cache's connections."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.cache.connections import AsyncConnections, ThreadConnections
from shared.config import CacheSettings
from shared.errors import ConfigError
from shared.keys import lease_key
from shared.local_redis import LocalRedis
from tests.shared.redis_kit import ALIAS, DIGEST, cache_of, key, record

#: what the document tells an operator to allow
DOCUMENT = (Path(__file__).parents[2] / "docs" / "record-format.md").read_text()
RIGHTS = re.search(r"^ACL SETUSER lookonce on >PASSWORD (.*)$", DOCUMENT, re.MULTILINE)


async def test_a_user_without_scripting_is_enough(kind: str, redis_server: LocalRedis, raw: Any) -> None:
    assert RIGHTS
    raw.execute_command("ACL", "SETUSER", "lookonce", "on", ">secret", *RIGHTS[1].split())
    url = f"unix://lookonce:secret@{redis_server.socket}"
    async with cache_of(kind, url) as cache:
        assert await cache.ping()
        assert (await cache.info())["maxmemory_policy"] == "allkeys-lru"
        assert await cache.claim(key(1), "one")
        wait = asyncio.create_task(cache.wait_for(key(1), 10))
        await asyncio.sleep(0.1)
        assert await cache.put(key(1), record(1), alias=ALIAS, digest=DIGEST)
        assert await wait
        await cache.release(key(1), "one")
        assert await cache.claim(key(1), "two")
        assert await cache.renew(key(1), "two")
        if kind == "loop":
            assert await cache.count_up("lookonce:strikes:m:file", 60) == 1
        assert await cache.describe(key(1))
        assert await cache.fetch(key(1)) == record(1)
        assert await cache.resolve_alias(ALIAS) == DIGEST
        assert await cache.delete([key(1)]) == 1
        counts = cache.stats.snapshot()
        assert (counts["errors"], counts["rejected"]) == (0, 0)
    assert raw.acl_log() == []


async def test_a_user_with_fewer_rights_gets_misses(kind: str, redis_server: LocalRedis, raw: Any) -> None:
    """Without channels waiters look by themselves; without writes nothing is stored; nothing ever raises."""
    raw.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~lookonce:*", "-@all", "+@read")
    await asyncio.to_thread(raw.set, key(1), record(1))
    async with cache_of(kind, f"unix://reader:secret@{redis_server.socket}") as cache:
        assert await cache.fetch(key(1)) == record(1)
        assert await cache.describe(key(1))
        assert not await cache.put(key(2), record(2), alias=ALIAS, digest=DIGEST)
        assert not await cache.add_alias(ALIAS, DIGEST)
        assert await cache.claim(key(2), "one")
        await cache.release(key(2), "one")
        assert await cache.delete([key(1)]) == 0
        assert await cache.info() == {}
        raw.set(lease_key(key(2)), "other", px=300)
        wait = asyncio.create_task(cache.wait_for(key(2), 5))
        await asyncio.sleep(0.1)
        raw.set(key(2), record(2))
        assert await wait
        assert not cache.stats.snapshot()["breaker_open"]


async def test_a_wrong_password_is_a_miss(
    kind: str, redis_server: LocalRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async with cache_of(kind, f"unix://nobody:topsecret@{redis_server.socket}") as cache:
        assert not await cache.ping()
        assert await cache.fetch(key(1)) is None
    assert "topsecret" not in caplog.text


@pytest.mark.parametrize("factory", [AsyncConnections, ThreadConnections])
@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1",
        "unix:///nowhere",
        "rediss://host",
        "redis://host/?socket_timeout=60&socket_connect_timeout=60&retry_on_timeout=yes&health_check_interval=9"
        "&protocol=3&decode_responses=True",
    ],
)
async def test_waits_of_the_library_are_pinned(factory: Any, url: str) -> None:
    """redis-py's own defaults block for 58 s on a hung server; the URL cannot bring them back."""
    connection = factory(CacheSettings(timeout=0.25), url).make()
    # the loop's own deadline covers everything that its client does
    assert connection.socket_timeout == (0.25 if factory is ThreadConnections else None)
    assert connection.socket_connect_timeout == 0.25
    assert connection.retry.get_retries() == 0
    assert not connection.retry_on_timeout
    assert connection.retry_on_error == []
    assert connection.health_check_interval == 0
    assert connection.protocol == 2
    assert not connection.encoder.decode_responses


@pytest.mark.parametrize("factory", [AsyncConnections, ThreadConnections])
@pytest.mark.parametrize("url", ["", "http://host", "localhost:6379", "redis://host:port", "redis://host/?colour=red"])
async def test_urls_that_cannot_be_used_are_named(factory: Any, url: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.url"):
        factory(CacheSettings(), url)


async def test_closing_leaves_no_connection(kind: str, redis_url: str, raw: Any) -> None:
    raw.ping()
    async with cache_of(kind, redis_url) as cache:
        await asyncio.gather(*(cache.ping() for _ in range(20)))
        assert len(raw.client_list()) > 1
    await asyncio.sleep(0.1)
    assert len(raw.client_list()) == 1
    assert await cache.ping()  # a straggler does not fail, and leaves nothing either
    await asyncio.sleep(0.1)
    assert len(raw.client_list()) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_forked_child_uses_connections_of_its_own(redis_url: str) -> None:
    async with cache_of("threads", redis_url) as cache:
        for name in range(20):
            await cache.put(key(name), record(name))
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            good = all(cache.inner.fetch(key(name)) == record(name) for name in range(20) for _ in range(20))
            os.write(writer, b"good" if good else b"bad")
            os._exit(0)
        for _ in range(20):
            for name in range(20):
                assert cache.inner.fetch(key(name)) == record(name)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert os.read(reader, 9) == b"good"
        assert cache.stats.snapshot()["errors"] == 0


async def test_many_threads_share_one_cache(redis_url: str) -> None:
    async with cache_of("threads", redis_url) as cache:
        for name in range(8):
            await cache.put(key(name), record(name, tokens=64, width=64))
        wrong: list[int] = []

        def read(seed: int) -> None:
            for name in np.random.default_rng(seed).integers(0, 8, 100):
                if cache.inner.fetch(key(name)) != record(name, tokens=64, width=64):
                    wrong.append(int(name))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert not wrong
