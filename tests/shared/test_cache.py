"""Storing, finding and damage on a real Redis, on an event loop and in threads alike."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

from shared.keys import alias_key, bytes_digest, image_digest, lease_key, seal_alias
from shared.records import HEADER_BYTES, decode_record, encode_record, read_header
from shared.sizing import Grid
from tests.shared.redis_kit import ALIAS, DIGEST, NAMESPACE, cache_of, embedding, key, record

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
