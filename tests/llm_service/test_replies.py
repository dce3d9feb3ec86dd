"""Chunks over their own connection: order, ends, cuts, strangers, slow readers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from llm_service.messages import Chunk, EngineUsage, SampledLogprobs, TokenLogprob
from llm_service.replies import Replies, ReplyAddress, ReplyListener, ReplySenders, listener, wire
from shared.errors import ReplicaLost, Unavailable

HOST = "127.0.0.1"
FULL = Chunk(
    1,
    "grün 🙂",
    (5, 6),
    (SampledLogprobs(TokenLogprob(5, "g", -0.25), (TokenLogprob(5, "g", -0.25), TokenLogprob(9, "", -3.5))),),
    "stop",
    151645,
    EngineUsage(10, 2, 4, {"queue": 0.5, "prefill": 0.25}),
)


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Serve's replicas run on uvloop."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


@pytest.fixture
async def asking() -> AsyncIterator[ReplyListener]:
    asker = ReplyListener(HOST)
    yield asker
    await asker.close()


async def told(replies: Replies) -> list[Chunk]:
    async with asyncio.timeout(10):
        return [chunk async for chunk in replies]


async def connected(address: ReplyAddress, *pieces: bytes) -> asyncio.StreamReader:
    """What the listener answers to a stranger's bytes; the connection stays open from this side."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    for piece in pieces:
        writer.write(piece)
    await writer.drain()
    return reader


async def ended(reader: asyncio.StreamReader) -> None:
    """Waits for the other side's end, which says nothing."""
    async with asyncio.timeout(5):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""


@given(
    chunks=st.lists(st.sampled_from([FULL, Chunk(0, "x"), Chunk(0, "y" * 300, stop_reason="s"), None]), max_size=20),
    piece=st.integers(1, 2000),
)
def test_frames_survive_any_cut(chunks: list[Chunk | None], piece: int) -> None:
    sent = b"".join(wire.frame(number, chunk) for number, chunk in enumerate(chunks))
    reader, got = wire.FrameReader(), []
    for begin in range(0, len(sent), piece):
        got += list(reader.feed(sent[begin : begin + piece]))
    assert got == list(enumerate(chunks))


async def test_many_answers_share_a_connection_and_keep_their_order(asking: ReplyListener) -> None:
    senders = ReplySenders()

    async def answer(number: int, replies: Replies) -> None:
        stream = await senders.open(replies.address)
        for position in range(50):
            await stream.send(replace(FULL, text=f"{number}.{position}"))
            await asyncio.sleep(0)
        await stream.send(None)

    places = [await asking.open() for _ in range(64)]
    answers = [asyncio.ensure_future(answer(number, place)) for number, place in enumerate(places)]
    got = await asyncio.gather(*(told(place) for place in places))
    await asyncio.gather(*answers)
    for number, chunks in enumerate(got):
        assert chunks == [replace(FULL, text=f"{number}.{position}") for position in range(50)]
    assert len(asking._connections) == 1


async def test_an_answer_that_is_cut_in_its_middle_says_so(asking: ReplyListener) -> None:
    place, other = await asking.open(), await asking.open()
    senders = ReplySenders()
    stream = await senders.open(place.address)
    await stream.send(Chunk(0, "a"))
    chunks = aiter(place)
    assert (await anext(chunks)).text == "a"
    (connection,) = asking._connections
    connection.abort()
    with pytest.raises(ReplicaLost):
        async with asyncio.timeout(5):
            await anext(chunks)
    with pytest.raises(Unavailable):  # the other side notices as well, and would stop its engine
        async with asyncio.timeout(5):
            while True:
                await stream.send(Chunk(0, "b"))
                await asyncio.sleep(0.01)
    # the next one has a new connection
    stream = await senders.open(other.address)
    await stream.send(Chunk(0, "c"))
    await stream.send(None)
    assert [chunk.text for chunk in await told(other)] == ["c"]


async def test_last_frames_that_never_come_are_an_error(asking: ReplyListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LAST_FRAMES_SECONDS", 0.05)
    place = await asking.open()
    place.sent()
    with pytest.raises(ReplicaLost):
        await told(place)


async def test_a_fault_comes_after_what_was_told_before(asking: ReplyListener) -> None:
    place = await asking.open()
    place.put(Chunk(0, "a"))
    place.fail(Unavailable("no more"))
    chunks = aiter(place)
    assert (await anext(chunks)).text == "a"
    with pytest.raises(Unavailable, match="no more"):
        await anext(chunks)


@pytest.mark.parametrize("greeting", [b"\0" * 32, b"GET / HTTP/1.1\r\nHost: somebody-else\r\n\r\n"])
async def test_strangers_are_refused(asking: ReplyListener, greeting: bytes) -> None:
    place = await asking.open()
    reader = await connected(place.address, greeting, wire.frame(place.address.stream, FULL))
    await ended(reader)
    place.put(None)
    assert await told(place) == []


async def test_a_stranger_who_says_nothing_does_not_stay(
    asking: ReplyListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_SECONDS", 0.05)
    place = await asking.open()
    await connected(place.address, b"abc")
    async with asyncio.timeout(5):
        while not asking._connections:  # noqa: ASYNC110 - made by the loop
            await asyncio.sleep(0.01)
        while asking._connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "nonsense",
    [
        struct.pack("<IQ", 1 << 30, 1),
        struct.pack("<IQ", 3, 1) + b"\xff\xff\xff",
        struct.pack("<IQ", 1, 1) + b"\x80",
    ],
)
async def test_nonsense_ends_the_connection_and_nothing_else(asking: ReplyListener, nonsense: bytes) -> None:
    place = await asking.open()
    reader = await connected(place.address, place.address.secret, nonsense)
    await ended(reader)
    stream = await ReplySenders().open(place.address)
    await stream.send(None)
    assert await told(place) == []


async def test_what_nobody_awaits_any_more_is_dropped(asking: ReplyListener) -> None:
    left, stays = await asking.open(), await asking.open()
    senders = ReplySenders()
    left.close()
    for place in (left, stays):
        stream = await senders.open(place.address)
        await stream.send(Chunk(0, "x"))
        await stream.send(None)
    assert len(await told(stays)) == 1
    assert asking._awaited.keys() == {stays.address.stream}


async def test_nobody_there_is_said_with_the_address() -> None:
    asker = ReplyListener(HOST)
    place = await asker.open()
    await asker.close()
    with pytest.raises(Unavailable, match=f"{HOST}:{place.address.port}"):
        await ReplySenders().open(place.address)


def test_the_secret_is_not_shown() -> None:
    assert "hush" not in repr(ReplyAddress(HOST, 1, b"hush", 1))


async def test_a_busy_asker_slows_the_answer_instead_of_filling_memory(asking: ReplyListener) -> None:
    """The event loop of the asker stands still: the replica's buffer stays bounded."""
    place = await asking.open()
    (stream_socket,) = asking._server.sockets if asking._server else ()
    assert stream_socket.getsockname()[0] == HOST
    stream = await ReplySenders().open(place.address)
    await stream.send(Chunk(0, "x"))
    while not asking._connections:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (connection,) = asking._connections
    connection._transport.pause_reading()

    async def flood() -> None:
        for _ in range(10_000):
            await stream.send(Chunk(0, "y" * 10_000))

    flooding = asyncio.ensure_future(flood())
    await asyncio.sleep(0.5)
    assert not flooding.done()
    assert stream._writer.transport.get_write_buffer_size() < 1 << 20
    flooding.cancel()
