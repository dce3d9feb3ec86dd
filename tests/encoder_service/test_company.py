"""The images of one request are looked up and claimed together: counted by Redis, not by the code that should do it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from encoder_service import company
from encoder_service.company import Company
from encoder_service.pictures import PixelGate
from shared.local_redis import LocalRedis
from tests.encoder_service.kit import Make, embedding, expected, file, idle, pixels

IMAGES = 8


async def _trips(engine: Any, raw: redis.Redis, seed: int, request: str | None) -> tuple[int, list[Any]]:
    """Round trips of eight new images; what was made of them."""

    def reads() -> int:
        return int(raw.info("stats")["total_reads_processed"])

    pictures = [pixels(seed + number) for number in range(IMAGES)]
    own = -reads() + reads()  # of INFO itself
    claims = raw.info("commandstats")["cmdstat_set"]["calls"]
    before = reads()
    items = await asyncio.gather(*(engine.encode(file(picture), request=request) for picture in pictures))
    await idle(engine)
    after = reads()
    # a record and its alias are two, a claim is one
    assert raw.info("commandstats")["cmdstat_set"]["calls"] - claims == 3 * IMAGES
    return after - before - own, list(zip(pictures, items, strict=True))


async def test_eight_images_of_a_request_are_claimed_in_one_round_trip(
    make: Make, redis_server: LocalRedis, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record costs one round trip, giving a lease back two; what is left are look-ups and claims: two and an INFO."""
    monkeypatch.setattr(company, "COMPANY_SECONDS", 10.0)
    engine = await make(max_queue=64)
    with redis.Redis.from_url(redis_server.url) as raw:
        await engine.encode(file(pixels(90_000)))  # opens connections
        after_that = 3 * IMAGES
        alone, _ = await _trips(engine, raw, 91_000, None)
        together, made = await _trips(engine, raw, 92_000, "request")
    print(f"{alone} round trips for {IMAGES} images one by one, {together} together")
    assert together <= after_that + 3
    for picture, item in made[:2]:
        assert (await embedding(engine, item) - expected(checkpoint, picture)).abs().max() < 1e-5


async def test_company_waits_for_nobody_who_is_held_up_or_gone() -> None:
    reading = Company()
    order: list[str] = []

    async def image(name: str, seconds: float, held_up: float = 0.0) -> None:
        with reading.reading("r"):
            if held_up:
                with reading.held_up("r"):
                    await asyncio.sleep(held_up)
            await asyncio.sleep(seconds)
        await reading.gather("r")
        order.append(name)

    await asyncio.gather(image("quick", 0.001), image("slow", 0.01))
    assert order == ["slow", "quick"], "the quick one waited"
    order.clear()
    tasks = [asyncio.create_task(image("quick", 0.001)), asyncio.create_task(image("gone", 10))]
    await asyncio.sleep(0.003)
    tasks[1].cancel()
    await asyncio.wait(tasks, timeout=1)
    assert order == ["quick"]
    order.clear()
    await asyncio.gather(image("quick", 0.001), image("held up", 0.001, 0.2))
    assert order[0] == "quick"
    begin = asyncio.get_running_loop().time()
    tasks = [asyncio.create_task(image("quick", 0.001)), asyncio.create_task(image("for ever", 10))]
    await tasks[0]
    assert asyncio.get_running_loop().time() - begin < 1, "bounded"
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert not reading._reading
    assert not reading._waiting


async def test_images_that_do_not_fit_into_memory_at_once_do_not_wait_for_each_other(make: Make) -> None:
    """A picture that waits for the room which its company holds is not waited for."""
    engine = await make(max_queue=64)
    engine._require().pipeline.reader.gate = PixelGate(40 * 30)
    async with asyncio.timeout(30):
        await asyncio.gather(*(engine.encode(file(pixels(93_000 + number)), request="r") for number in range(IMAGES)))
    await idle(engine)
