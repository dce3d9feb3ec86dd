"""Our own transport for large values: memory, protocol, and which addresses it serves."""

from __future__ import annotations

import gc
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import AuthenticationError, BusyLoadingError, InvalidResponse, ResponseError

from shared.cache.buffers import ALIGNMENT, SMALLEST, Lender
from shared.cache.connections import AsyncConnections, ThreadConnections, deadline
from shared.cache.links import WireLink
from shared.cache.resp import SMALL, Incoming, Outgoing, Pending, pack
from shared.config import CacheSettings
from shared.local_redis import LocalRedis
from shared.records import HEADER_BYTES, decode_record
from tests.shared.redis_kit import LARGE, cache_of, embedding, key, proxy, record

# memory


@pytest.mark.parametrize("size", [1, SMALLEST - 1, SMALLEST, SMALLEST + 1, 4_718_720, (64 << 20) + 1, 130 << 20])
def test_lent_memory_is_aligned_and_as_large_as_asked(size: int) -> None:
    lent = Lender().lend(size)
    assert len(lent) == size
    assert np.frombuffer(lent, np.uint8).ctypes.data % ALIGNMENT == 0
    lent[0] = lent[-1] = 1  # writable to its ends


def test_memory_comes_back_when_the_last_view_goes() -> None:
    """Not sooner: it would be another user's picture."""
    lender = Lender()
    lent = lender.lend(1 << 20)
    where = np.frombuffer(lent, np.uint8).ctypes.data
    tensor = torch.frombuffer(lent[128:].toreadonly(), dtype=torch.uint8)[64:].view(2, -1)
    del lent
    gc.collect()
    assert lender.idle == 0
    assert np.frombuffer(lender.lend(1 << 20), np.uint8).ctypes.data != where
    del tensor
    gc.collect()
    again = [np.frombuffer(lender.lend(1 << 20), np.uint8).ctypes.data for _ in range(2)]
    assert where in again


def test_idle_memory_is_bounded_and_follows_the_sizes_in_use() -> None:
    lender = Lender(4 << 20)
    for size in (1 << 20, 2 << 20):
        held = [lender.lend(size) for _ in range(8)]
        del held
        assert 0 < lender.idle <= 4 << 20
    assert lender.idle == 4 << 20  # both of the later size; the earlier made room
    lender.lend(8 << 20).release()
    assert lender.idle == 4 << 20  # too large to keep


def test_memory_is_lent_to_one_at_a_time_whatever_the_threads_do() -> None:
    lender, wrong = Lender(), []

    def use(mark: int) -> None:
        for _ in range(300):
            lent = lender.lend(SMALLEST)
            lent[:8] = bytes([mark] * 8)
            os.sched_yield()
            if lent[:8] != bytes([mark] * 8):
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# protocol


def test_large_arguments_are_sent_from_where_they_are() -> None:
    large = bytearray(SMALL + 1)
    buffers = pack([("SET", "key", (b"head", memoryview(large)), "PX", 5), ("PING",)])
    assert [bytes(part) for part in buffers] == [
        b"*5\r\n$3\r\nSET\r\n$3\r\nkey\r\n$4101\r\nhead",
        bytes(large),
        b"\r\n$2\r\nPX\r\n$1\r\n5\r\n*1\r\n$4\r\nPING\r\n",
    ]
    large[0] = 7
    assert buffers[1][0] == 7


def test_what_was_sent_is_not_sent_again() -> None:
    commands = [("SET", "a", bytes(range(256)) * 40), ("SET", "b", (b"x" * 5000, b"y" * 5000)), ("GET", "é")]
    whole, rng = b"".join(pack(commands)), random.Random(1)
    for _ in range(50):
        outgoing, sent = Outgoing(commands), b""
        while True:
            count = rng.choice([0, 1, 100, 6000])
            part = b"".join(outgoing.next)[:count]
            sent += part
            if outgoing.sent(len(part)):
                break
        assert sent == whole


def fed(data: bytes, cuts: list[int]) -> list[Any]:
    """Replies in ``data`` when it comes in pieces of these sizes, in turn."""
    incoming, replies, at, turn = Incoming(Lender()), [], 0, 0
    while True:
        while (reply := incoming.reply()) is not Pending.PENDING:
            replies.append(reply)
        if at == len(data):
            assert incoming.empty
            return replies
        room = incoming.target()
        count = min(len(room), cuts[turn % len(cuts)], len(data) - at)
        room[:count] = data[at : at + count]
        incoming.received(count)
        at, turn = at + count, turn + 1


VALUES = [b"", b"x", b"\r\n", b"$5\r\n", bytes(SMALL), bytes(range(256)) * 17, os.urandom(70_000), os.urandom(200_001)]


@given(
    st.lists(st.sampled_from([*VALUES, None, 0, -1, 1 << 62, "OK", ""]), max_size=6),
    st.lists(st.integers(1, 80_000) | st.integers(1, 9), min_size=1, max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_replies_however_they_are_cut(expected: list[Any], cuts: list[int]) -> None:
    if max(cuts) < 100:
        expected = [value for value in expected if not isinstance(value, bytes) or len(value) <= SMALL]
    data = b""
    for value in expected:
        if isinstance(value, bytes):
            data += b"$%d\r\n%b\r\n" % (len(value), value)
        else:
            text = "$-1" if value is None else f":{value}" if isinstance(value, int) else f"+{value}"
            data += text.encode() + b"\r\n"
    expected = [value.encode() if isinstance(value, str) else value for value in expected]
    assert fed(data, cuts) == expected


def test_errors_that_answer_are_values_and_the_rest_are_faults() -> None:
    (error,) = fed(b"-OOM command not allowed\r\n", [99])
    assert isinstance(error, ResponseError)
    for text, kind_of in ((b"-LOADING x\r\n", BusyLoadingError), (b"-NOAUTH x\r\n", AuthenticationError)):
        with pytest.raises(kind_of):
            fed(text, [99])


@pytest.mark.parametrize(
    "data",
    [
        b"$-2\r\n",
        b"$999999999999\r\n",
        b"$5_0\r\n",
        b"$+5\r\n",
        b":\r\n",
        b":1x\r\n",
        b"*1\r\n:1\r\n",
        b"%1\r\n",
        b"HTTP/1.1 400\r\n",
        b"\r\n",
        b"$1\r\nxyz",
        b"+" + b"x" * 5000,
    ],
)
def test_nonsense_is_a_fault(data: bytes) -> None:
    for cuts in ([1], [len(data)]):
        with pytest.raises(InvalidResponse):
            fed(data, cuts)


# addresses


@pytest.mark.parametrize("factory", [AsyncConnections, ThreadConnections])
@pytest.mark.parametrize(
    ("url", "greeting"),
    [
        ("redis://host", ()),
        ("redis://host:1/0?socket_timeout=9&protocol=3", ()),
        ("unix:///path", ()),
        ("unix://user:secret@/path?db=3", (("AUTH", "user", "secret"), ("SELECT", 3))),
        ("redis://:secret@host/2", (("AUTH", "secret"), ("SELECT", 2))),
        ("rediss://host", None),
        ("redis://host?client_name=x", None),
    ],
)
def test_what_needs_redis_py_goes_through_it(factory: Any, url: str, greeting: Any) -> None:
    address = factory(CacheSettings(), url).address
    assert (None if address is None else address.greeting) == greeting


async def test_large_records_come_aligned_and_read_only(kind: str, redis_url: str) -> None:
    async with cache_of(kind, redis_url) as cache:
        assert await cache.put(key(1), record(1, **LARGE))
        found = await cache.fetch(key(1))
        assert isinstance(found, memoryview)
        assert found.readonly
        tensor = decode_record(found, key(1), verify=False)[1]
        assert tensor.data_ptr() % ALIGNMENT == 0
        del found
        for name in range(3):  # later fetches don't touch what is still held
            await cache.put(key(name), record(name, **LARGE))
            await cache.fetch(key(name))
        assert torch.equal(tensor, embedding(1, **LARGE))


async def test_a_record_in_parts_is_stored_whole(kind: str, redis_server: LocalRedis) -> None:
    """With our own transport and, for an option that only redis-py knows, with redis-py."""
    whole = record(1, **LARGE)
    parts = (whole[:HEADER_BYTES], memoryview(whole)[HEADER_BYTES:])
    for url in (redis_server.url, f"{redis_server.url}?client_name=x"):
        async with cache_of(kind, url) as cache:
            assert await cache.put(key(1), parts)
            assert await cache.fetch(key(1)) == whole
            assert cache.stats.snapshot()["bytes_written"] == len(whole)
            await cache.delete([key(1)])


async def test_password_and_database(kind: str, redis_server: LocalRedis) -> None:
    """Both kinds of connections of a cache look at the same database, as the same user."""
    with redis.Redis.from_url(redis_server.url) as raw:
        raw.execute_command("ACL", "SETUSER", "u", "on", ">secret", "~lookonce:*", "&*", "+@all")
        async with cache_of(kind, f"unix://u:secret@{redis_server.socket}?db=3") as cache:
            assert await cache.put(key(1), record(1, **LARGE))
            assert await cache.describe(key(1))
            assert await cache.fetch(key(1)) == record(1, **LARGE)
        assert not raw.exists(key(1))
        raw.select(3)
        assert raw.exists(key(1))


async def test_over_tcp(kind: str, redis_server: LocalRedis, tmp_path: Path) -> None:
    async with proxy(redis_server.socket, True, tmp_path) as (between, url), cache_of(kind, url) as cache:
        assert await cache.put(key(1), record(1, **LARGE))
        assert await cache.fetch(key(1)) == record(1, **LARGE)
        assert between.accepted == 1


def test_a_deadline_that_has_passed_reads_nothing(redis_server: LocalRedis) -> None:
    address = ThreadConnections(CacheSettings(), redis_server.url).address
    assert address is not None
    link = WireLink(address, Lender())
    with deadline(5):
        link.open()
        assert link.exchange([("PING",)]) == [b"PONG"]
    with deadline(0), pytest.raises(TimeoutError):
        link.exchange([("PING",)])
    link.close()
