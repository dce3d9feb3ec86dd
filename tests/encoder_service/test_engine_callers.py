"""The engine when callers leave, hurry, or come in crowds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from encoder_service.batching import Priority
from tests.encoder_service.kit import HeldForwards, Make, file, idle, pixels, until


async def test_an_image_that_nobody_waits_for_is_dropped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make(max_batch_patches=1)
    forwards = HeldForwards(monkeypatch)
    running = asyncio.create_task(engine.encode(file(pixels(60))))
    await forwards.begun()
    left = [asyncio.create_task(engine.encode(file(pixels(61)))) for _ in range(2)]
    stayed = asyncio.create_task(engine.encode(file(pixels(62))))
    shared = [asyncio.create_task(engine.encode(file(pixels(63)))) for _ in range(2)]
    await until(lambda: engine.stats()["waiting"] >= 3)
    for task in (*left, shared[0]):
        task.cancel()
    await asyncio.gather(*left, shared[0], return_exceptions=True)
    forwards.release()
    await asyncio.gather(running, stayed, shared[1])
    assert engine.stats()["images"] == 3
    assert engine.stats()["cancelled"] == 1
    await idle(engine)
    assert not (await engine.encode(file(pixels(61)))).cached


async def test_callers_that_leave_at_random_moments_leave_nothing_behind(make: Make) -> None:
    """C16, A4: places, pixels and leases return to where they began."""
    engine = await make(max_queue=1000)
    chance = np.random.default_rng(5)

    async def leave_early(n: int) -> None:
        task = asyncio.create_task(engine.encode(file(pixels(1000 + n % 80))))
        await asyncio.sleep(float(chance.random()) * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(leave_early(n) for n in range(300)))
    await idle(engine)
    items = await asyncio.wait_for(asyncio.gather(*(engine.encode(file(pixels(1000 + n))) for n in range(20))), 10)
    assert len({item.key for item in items}) == 20
    await idle(engine)


async def test_an_interactive_caller_hurries_a_batch_image(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make(max_batch_patches=1)
    forwards = HeldForwards(monkeypatch)
    first = asyncio.create_task(engine.encode(file(pixels(70))))
    await forwards.begun()
    jobs = [asyncio.create_task(engine.encode(file(pixels(71 + n)), priority=Priority.BATCH)) for n in range(8)]
    await until(lambda: engine.stats()["waiting"] >= 8)
    user = asyncio.create_task(engine.encode(file(pixels(78))))  # the last of the batch
    await asyncio.sleep(0.1)
    done: list[str] = []
    for name, task in [("user", user), *((f"job{n}", job) for n, job in enumerate(jobs))]:
        task.add_done_callback(lambda _, name=name: done.append(name))
    forwards.release()
    await asyncio.gather(first, user, *jobs)
    assert done.index("user") <= 2
    assert engine.stats()["images"] == 9
