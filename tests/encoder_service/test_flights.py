"""Single flight: one run for all who want the same, nobody left waiting, failures not remembered."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import LookonceError, Unavailable
from shared.flights import FollowedFailure, SingleFlight


class Work:
    """Counts its runs and ends when told."""

    def __init__(self, error: LookonceError | None = None) -> None:
        self.runs = self.cancelled = 0
        self.go = asyncio.Event()
        self.error = error

    async def __call__(self) -> int:
        self.runs += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        return self.runs


async def start(flights: SingleFlight[int], work: Work, count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.run("key", work)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_64_callers_one_run() -> None:
    """C19."""
    flights, work = SingleFlight[int](), Work()
    tasks = await start(flights, work, 64)
    assert "key" in flights
    work.go.set()
    assert await asyncio.gather(*tasks) == [1] * 64
    assert not len(flights)
    assert await flights.run("key", work) == 2


async def test_a_failure_reaches_everybody_and_is_not_remembered() -> None:
    flights, work = SingleFlight[int](), Work(LookonceError("no"))
    tasks = await start(flights, work, 3)
    work.go.set()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [LookonceError, FollowedFailure, FollowedFailure]
    assert isinstance(errors[1], FollowedFailure)
    assert FollowedFailure(errors[1]).error is work.error
    work.error = None
    assert await flights.run("key", work) == 2


async def test_the_run_ends_only_when_the_last_caller_leaves() -> None:
    flights, work = SingleFlight[int](), Work()
    tasks = await start(flights, work, 3)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert work.cancelled == 0
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert work.cancelled == 1
    assert not len(flights)


async def test_who_comes_after_a_cancelled_run_starts_a_new_one() -> None:
    flights, work = SingleFlight[int](), Work()
    (task,) = await start(flights, work, 1)
    task.cancel()
    await asyncio.sleep(0)
    (other,) = await start(flights, work, 1)
    work.go.set()
    assert await other == 2


async def test_stopping_answers_every_caller() -> None:
    flights, work = SingleFlight[int](), Work()
    tasks = await start(flights, work, 3)
    await flights.cancel_all()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, Unavailable) for error in errors), errors


async def test_keys_do_not_mix() -> None:
    flights: SingleFlight[str] = SingleFlight()

    async def work(text: str) -> str:
        await asyncio.sleep(0)
        return text

    assert await asyncio.gather(*(flights.run(f"{n}", lambda n=n: work(f"{n}")) for n in range(50))) == [
        f"{n}" for n in range(50)
    ]


@pytest.mark.parametrize("left", [0, 1])
async def test_a_thousand_callers_that_leave_at_random(left: int) -> None:
    """C16: whatever the moment of leaving, nothing stays behind."""
    flights, work = SingleFlight[int](), Work()
    tasks = [asyncio.create_task(flights.run(f"{n % 7}", work)) for n in range(1000)]
    for n, task in enumerate(tasks[left:]):
        if n % 3 == 0:
            await asyncio.sleep(0)
        task.cancel()
    work.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(results) == 1000
    assert sum(isinstance(result, int) for result in results) >= left
    await asyncio.sleep(0)
    assert not len(flights)
