"""The cache's operations on a real Redis, on an event loop and in threads alike."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch

from shared.cache import breaker as breakers
from shared.cache.breaker import Breaker
from shared.cache.connections import AsyncConnections, ThreadConnections
from shared.cache.stats import CacheStats
from shared.cache.steps import Look, Operations, next_pause
from shared.config import CacheSettings
from shared.errors import ConfigError
from shared.keys import alias_key, bytes_digest, image_digest, lease_key, seal_alias, wake_channel
from shared.local_redis import LocalRedis
from shared.records import HEADER_BYTES, decode_record, encode_record, read_header
from shared.sizing import Grid
from tests.shared.redis_kit import KINDS, NAMESPACE, cache_of, embedding, key, record, until

ALIAS, DIGEST = alias_key("a" * 64), "b" * 64


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which of the two clients."""
    return str(request.param)


@pytest.fixture
async def cache(kind: str, redis_url: str) -> AsyncIterator[Any]:
    async with cache_of(kind, redis_url) as made:
        yield made


@pytest.fixture
def raw(redis_url: str) -> Any:
    """Redis as somebody else sees it."""
    return redis.Redis.from_url(redis_url)


# storing and finding


async def test_what_was_put_is_found(cache: Any) -> None:
    assert await cache.describe(key(1)) is None
    assert await cache.fetch(key(1)) is None
    assert await cache.put(key(1), record(1))
    header = await cache.describe(key(1))
    assert header == read_header(record(1), key(1))
    found = await cache.fetch(key(1))
    assert torch.equal(decode_record(found, key(1))[1], embedding(1))
    counts = cache.stats.snapshot()
    assert counts == {
        "hits": 2,
        "misses": 2,
        "puts": 1,
        "refused": 0,
        "rejected": 0,
        "skipped": 0,
        "errors": 0,
        "bytes_read": len(record(1)),
        "bytes_written": len(record(1)),
        "corrupt": {},
        "breaker_open": False,
    }


async def test_both_clients_share_entries(redis_url: str) -> None:
    async with cache_of("loop", redis_url) as one, cache_of("threads", redis_url) as other:
        await one.put(key(1), record(1), alias=ALIAS, digest=DIGEST)
        assert await other.fetch(key(1)) == record(1)
        assert await other.resolve_alias(ALIAS) == DIGEST


async def test_many_records_come_in_order(cache: Any) -> None:
    for name in range(5):
        await cache.put(key(name), record(name))
    wanted = [3, "absent", 0, 3, 4, "absent", 1]
    found = await cache.fetch_many([key(name) for name in wanted])
    assert found == [None if name == "absent" else record(name) for name in wanted]
    assert await cache.fetch_many([]) == []


async def test_large_records(cache: Any) -> None:
    """A true-size embedding, and sixteen of them in one request."""
    large = {name: record(name, tokens=256, width=1152) for name in range(16)}
    for name, value in large.items():
        assert await cache.put(key(name), value)
    assert await cache.fetch_many([key(name) for name in large]) == list(large.values())


async def test_a_put_names_the_picture_of_its_file(cache: Any) -> None:
    assert await cache.resolve_alias(ALIAS) is None
    assert await cache.put(key(1), record(1), alias=ALIAS, digest=DIGEST)
    assert await cache.resolve_alias(ALIAS) == DIGEST
    other = alias_key("c" * 64)
    assert await cache.add_alias(other, DIGEST)
    assert await cache.resolve_alias(other) == DIGEST


async def test_deleting(cache: Any, raw: Any) -> None:
    for name in range(3):
        await cache.put(key(name), record(name))
    assert await cache.delete([key(0), key(1), key("absent")]) == 2
    assert await cache.delete([]) == 0
    assert raw.exists(key(0), key(1), key(2)) == 1


async def test_life_of_entries(kind: str, redis_url: str, raw: Any) -> None:
    async with cache_of(kind, redis_url, ttl=60) as cache:
        await cache.put(key(1), record(1), alias=ALIAS, digest=DIGEST)
        for name in (key(1), ALIAS):
            assert 50_000 < raw.pttl(name) <= 60_000
    async with cache_of(kind, redis_url) as cache:
        await cache.put(key(1), record(1))
        assert raw.pttl(key(1)) == -1


async def test_an_entry_that_vanishes_between_two_looks(cache: Any, raw: Any) -> None:
    """R1: described is not fetched."""
    await cache.put(key(1), record(1))
    assert await cache.describe(key(1))
    raw.delete(key(1))
    assert await cache.fetch(key(1)) is None
    await cache.put(key(1), record(1), alias=ALIAS, digest=DIGEST)
    raw.delete(key(1))
    assert await cache.resolve_alias(ALIAS) == DIGEST
    assert await cache.describe(key(1)) is None


async def test_entries_that_vanish_and_return_all_the_time(cache: Any, raw: Any) -> None:
    """R1: whatever the moment, an answer is the whole record or a miss, and nothing counts as damage."""
    stop = threading.Event()
    values = [record(name, tokens=64, width=64) for name in range(4)]

    def stir() -> None:
        client = raw.client()
        while not stop.is_set():
            for name, value in enumerate(values):
                client.set(key(name), value)
                client.delete(key(name))

    thread = threading.Thread(target=stir)
    thread.start()
    try:
        found = missed = 0
        for _ in range(300):
            for name, value in enumerate(values):
                got = await cache.fetch(key(name))
                assert got in (None, value)
                header = await cache.describe(key(name))
                assert header is None or header.payload_bytes == len(value) - HEADER_BYTES
                found, missed = found + (got is not None), missed + (got is None)
    finally:
        stop.set()
        thread.join()
    assert found
    assert missed
    assert cache.stats.snapshot()["corrupt"] == {}


async def test_tenants_never_meet(cache: Any) -> None:
    """C18: the same tenant hits, another misses, in both directions."""
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for salt in ("x", "y", None):
        place = NAMESPACE.embedding_key(image_digest(picture, salt))
        alias = alias_key(bytes_digest(b"file", salt))
        assert await cache.describe(place) is None
        assert await cache.resolve_alias(alias) is None
        assert not await cache.delete([lease_key(place)])
        await cache.claim(place, f"owner {salt}")
        value = encode_record(place, embedding(salt), Grid(2, 8), 2)
        await cache.put(place, value, alias=alias, digest=image_digest(picture, salt))
        assert await cache.describe(place)
        assert await cache.resolve_alias(alias) == image_digest(picture, salt)


# damage


def _damages() -> dict[str, tuple[bytes, str]]:
    good = record(1)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    return {
        "cut in half": (good[: len(good) // 2], "truncated"),
        "cut in the header": (good[:50], "truncated"),
        "too long": (good + b"\0", "truncated"),
        "flipped bit": (bytes(flipped), "payload"),
        "another picture's": (record(2), "key"),
        "empty": (b"", "truncated"),
        "pickle": (pickle.dumps({"embedding": [1.0]}), "truncated"),
        "long pickle": (pickle.dumps({"embedding": bytes(1000)}), "magic"),
        "text": (b"null", "truncated"),
    }


@pytest.mark.parametrize("name", _damages())
async def test_a_damaged_record_is_counted_deleted_and_a_miss(cache: Any, raw: Any, name: str) -> None:
    """R8, R10."""
    data, reason = _damages()[name]
    raw.set(key(1), data)
    assert await cache.fetch(key(1)) is None
    assert cache.stats.snapshot()["corrupt"] == {reason: 1}
    assert not raw.exists(key(1))
    await cache.put(key(1), record(1))
    assert await cache.fetch(key(1)) == record(1)


@pytest.mark.parametrize("name", [name for name in _damages() if name not in ("flipped bit", "empty")])
async def test_a_damaged_record_is_not_described(cache: Any, raw: Any, name: str) -> None:
    data, reason = _damages()[name]
    raw.set(key(1), data)
    assert await cache.describe(key(1)) is None
    assert cache.stats.snapshot()["corrupt"] == {reason: 1}
    assert not raw.exists(key(1))


async def test_keys_of_another_type(cache: Any, raw: Any) -> None:
    for look in (cache.describe, cache.fetch, cache.resolve_alias):
        raw.lpush(key(1), "x")
        assert await look(key(1)) is None
        assert not raw.exists(key(1))
    assert cache.stats.snapshot()["corrupt"] == {"type": 3}


async def test_one_damaged_record_does_not_cost_the_others(cache: Any, raw: Any) -> None:
    for name in range(3):
        await cache.put(key(name), record(name))
    raw.setrange(key(1), 140, b"\xff")
    assert await cache.fetch_many([key(name) for name in range(3)]) == [record(0), None, record(2)]
    assert raw.exists(key(0), key(1), key(2)) == 2


@pytest.mark.parametrize(
    "value",
    [b"", b"x", DIGEST.encode(), seal_alias(alias_key("c" * 64), DIGEST), seal_alias(ALIAS, DIGEST)[:-1], b"\xff" * 97],
)
async def test_a_damaged_or_exchanged_alias_is_deleted_and_a_miss(cache: Any, raw: Any, value: bytes) -> None:
    raw.set(ALIAS, value)
    assert await cache.resolve_alias(ALIAS) is None
    assert not raw.exists(ALIAS)
    assert cache.stats.snapshot()["corrupt"] == {"alias": 1}


# leases and waiting


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


def test_a_lease_that_changes_hands_during_its_release_stays(raw: Any) -> None:
    """The steps by hand: between the look and the deletion the lease expires and another takes it."""
    operations = Operations(CacheSettings(), CacheStats(Breaker()))
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


# rights, options, housekeeping

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


# the circuit


def test_the_circuit_opens_probes_and_closes() -> None:
    now = 0.0
    circuit = Breaker(lambda: now)
    for _ in range(breakers.FAILURES_TO_OPEN):
        assert circuit.allows()
        assert not circuit.is_open
        circuit.failed()
    assert circuit.is_open
    assert not circuit.allows()
    now = breakers.OPEN_SECONDS + 0.01
    assert circuit.allows()  # one probe
    assert not circuit.allows()
    circuit.failed()
    now += breakers.OPEN_SECONDS / 2
    assert not circuit.allows()
    now += breakers.OPEN_SECONDS
    assert circuit.allows()
    circuit.succeeded()
    assert circuit.allows()
    assert circuit.allows()


def test_single_failures_do_not_open_the_circuit() -> None:
    circuit = Breaker()
    for _ in range(20):
        for _ in range(breakers.FAILURES_TO_OPEN - 1):
            circuit.failed()
        circuit.succeeded()
    assert circuit.allows()


def test_stats_are_safe_for_threads(tmp_path: Path) -> None:
    stats = CacheStats(Breaker())

    def count() -> None:
        for _ in range(500):
            stats.record("fetch", "hit")
            stats.moved(read=2, written=1)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = stats.snapshot()
    assert (counts["hits"], counts["bytes_read"], counts["bytes_written"]) == (4000, 8000, 4000)
