"""Entries that are missing, damaged, late or gone, and requests that are given up: the engine stays right and alive."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from llm_service.messages import Chunk
from llm_service.sampling import SamplingOptions
from shared.errors import EmbeddingLost
from shared.sizing import Grid
from tests.llm_service.conftest import EngineThread
from tests.llm_service.desk import SQUARE, WIDE, Desk, tokens
from tests.llm_service.pictures import Embedded, Picture, embed


@pytest.fixture(scope="module")
def desk(engine: EngineThread, flat: Path, redis_url: str) -> Desk:
    return Desk(engine, flat, redis.Redis.from_url(redis_url))


@pytest.fixture(autouse=True)
def alive_after(desk: Desk) -> Iterator[None]:
    yield
    desk.check_alive()


def test_a_missing_entry_is_lost(desk: Desk) -> None:
    here, gone = desk.embed(SQUARE)[0], desk.embed(WIDE, store=False)[0]
    with pytest.raises(EmbeddingLost) as lost:
        desk.ask([here, gone])
    assert gone.key in lost.value.keys
    # as the ingress does it then
    again = desk.engine.ask(desk.prompt([here, gone]), [here.item(), gone.item(inline=True)])
    assert tokens(again) == tokens(desk.ask(desk.embed(SQUARE, WIDE)))


@pytest.mark.parametrize("fault", ["cut", "flipped", "foreign", "empty", "pickle", "rows", "grid", "width"])
def test_a_damaged_entry_is_lost(desk: Desk, flat: Path, fault: str) -> None:
    """R8, R10."""
    (image,) = desk.embed(SQUARE)
    record = image.record
    wrong = {
        "cut": record[: len(record) // 2],
        "flipped": record[:-40] + bytes([record[-40] ^ 1]) + record[-39:],
        "foreign": embed(flat, SQUARE, "somebody else").record,
        "empty": b"",
        "pickle": b"cos\nsystem\n(S'touch /tmp/lookonce-pwned'\ntR.",
        "rows": image._replace(rows=image.rows[:4], grid=Grid(4, 4)).record,
        "grid": image._replace(grid=Grid(2, 18)).record,
        "width": image._replace(rows=image.rows[:, :32]).record,
    }
    desk.client.set(image.key, wrong[fault])
    with pytest.raises(EmbeddingLost):
        desk.ask([image])
    assert fault == "empty" or not desk.client.exists(image.key), "deleted"
    assert not Path("/tmp/lookonce-pwned").exists()


def test_a_damaged_record_in_the_request_is_told(desk: Desk) -> None:
    (image,) = desk.embed(SQUARE)
    item = replace(image.item(), record=image.record[:-10])
    with pytest.raises(EmbeddingLost, match=r"damaged"):
        desk.engine.ask(desk.prompt([image]), [item])


def test_entries_may_vanish_while_an_answer_runs(desk: Desk) -> None:
    images = desk.embed(SQUARE, WIDE)

    async def run() -> list[Chunk]:
        chunks = []
        sampling = SamplingOptions(max_tokens=30, temperature=0, ignore_eos=True)
        items = [image.item() for image in images]
        async for chunk in desk.engine.engine.generate("v", desk.prompt(images), items, sampling):
            if not chunks:
                desk.client.flushall()
            chunks.append(chunk)
        return chunks

    assert tokens(desk.engine.run(run())) == tokens(desk.ask(desk.embed(SQUARE, WIDE), max_tokens=30))


def test_entries_that_vanish_at_any_moment(desk: Desk) -> None:
    """Each request ends with the right answer or with EmbeddingLost, never otherwise."""
    rng = random.Random(5)
    expected = {picture: tokens(desk.ask(desk.embed(picture))) for picture in (SQUARE, WIDE)}

    async def one(image: Embedded, picture: Picture) -> bool:
        await asyncio.sleep(rng.random() * 0.05)
        try:
            got = await desk.engine.collect(desk.prompt([image]), [image.item()])
        except EmbeddingLost:
            return False
        assert tokens(got) == expected[picture]
        return True

    async def delete(keys: list[str]) -> None:
        for key in keys:
            await asyncio.sleep(rng.random() * 0.004)
            desk.client.delete(key)

    async def run() -> list[bool]:
        pictures = [rng.choice((SQUARE, WIDE)) for _ in range(40)]
        images = [desk.embed(picture)[0] for picture in pictures]
        work = [one(image, picture) for image, picture in zip(images, pictures, strict=True)]
        _, *answers = await asyncio.gather(delete([image.key for image in images]), *work)
        return answers

    answers = desk.engine.run(run())
    assert any(answers), "every entry was lost: the test is idle"


def test_a_closed_stream_is_aborted(desk: Desk) -> None:
    """H11."""
    images = desk.embed(SQUARE)

    async def run() -> None:
        sampling = SamplingOptions(max_tokens=400, temperature=0, ignore_eos=True)
        stream = desk.engine.engine.generate("c", desk.prompt(images), [images[0].item()], sampling)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    for _ in range(3):
        desk.engine.run(run())
    assert desk.quiet()


def test_one_aborted_one_finishing(desk: Desk) -> None:
    """C13: the same request twice at once."""
    images = desk.embed(SQUARE, SQUARE)
    images = [images[0], images[0]]
    expected = tokens(desk.ask(images))

    async def aborted() -> None:
        task = asyncio.create_task(desk.engine.collect(desk.prompt(images), [i.item() for i in images], max_tokens=200))
        await asyncio.sleep(0.03)
        task.cancel()

    async def run() -> list[Chunk]:
        work = [desk.engine.collect(desk.prompt(images), [i.item() for i in images]) for _ in range(2)]
        first, second, _ = await asyncio.gather(*work, aborted())
        assert tokens(first) == tokens(second)
        return first

    for _ in range(5):
        assert tokens(desk.engine.run(run())) == expected


def test_capacity_returns_after_many_aborts(desk: Desk) -> None:
    """C16: cancelled while queued, while fetching, while decoding."""
    rng = random.Random(9)
    images = desk.embed(SQUARE, WIDE)

    async def one() -> None:
        chosen = rng.sample(images, rng.randint(0, 2))
        items = [image.item() for image in chosen]
        task = asyncio.create_task(desk.engine.collect(desk.prompt(chosen), items, max_tokens=100))
        await asyncio.sleep(rng.random() * 0.4)
        task.cancel()

    async def run() -> None:
        await asyncio.gather(*(one() for _ in range(150)))

    desk.engine.run(run())
    assert desk.quiet()


def test_text_goes_on_while_redis_hangs(desk: Desk, engine: EngineThread) -> None:
    """The step loop never waits for Redis; a request that needs it is lost within the cache's deadline."""
    (image,) = desk.embed(SQUARE)
    server = int(desk.client.info()["process_id"])  # type: ignore[index, arg-type]
    os.kill(server, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        waiting = asyncio.run_coroutine_threadsafe(engine.collect(desk.prompt([image]), [image.item()]), engine.loop)
        durations = []
        while not waiting.done():
            start = time.monotonic()
            engine.ask(desk.prompt([]), max_tokens=2)
            durations.append(time.monotonic() - start)
        with pytest.raises(EmbeddingLost):
            waiting.result()
        assert time.monotonic() - begin < 5
        assert len(durations) > 3
        assert max(durations) < 1
    finally:
        os.kill(server, signal.SIGCONT)
