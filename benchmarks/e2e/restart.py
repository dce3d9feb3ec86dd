"""A cold restart: how long until the first answers about pictures that were asked for before it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from benchmarks.e2e.load import Client, closed_loop
from benchmarks.e2e.prompts import Prompts
from benchmarks.e2e.servers import Server

FIRST_PICTURE = 99_000_000


@dataclass(frozen=True)
class Restart:
    """One side's restart.

    Attributes:
        side: which.
        ready: seconds from starting the process until it has answered a text.
        first: seconds from starting the process until the first token of the first answer.
        ttft: seconds to first token of each of the first answers, in order, counted from asking.
        answered: seconds from the first question until the last first token, one question after another.
    """

    side: str
    ready: float
    first: float
    ttft: list[float]
    answered: float

    @property
    def middle(self) -> float:
        """Median of the first answers' times to first token."""
        return median(self.ttft)


async def restart(server: Server, prompts: Prompts, pictures: int) -> Restart:
    """Asks about pictures, starts the side anew, and asks about the same pictures behind other text."""
    seeds = range(FIRST_PICTURE, FIRST_PICTURE + pictures)
    async with Client(server.url, server.model) as client:
        await closed_loop(client, [prompts.image(seed, answer=1) for seed in seeds], 2)
    server.stop()
    ready = server.start()
    async with Client(server.url, server.model) as client:
        # what the first request pays for in any engine is paid by a text, on both sides
        await closed_loop(client, [prompts.text(48, f"after {server.name}", answer=2)], 1)
        asked = time.perf_counter() - server.started
        asks = [prompts.image(seed, before=f"again {seed}", answer=2) for seed in seeds]
        results = await closed_loop(client, asks, 1)
    if errors := [result.error for result in results if result.error]:
        raise RuntimeError(f"{server.name} failed after its restart: {errors[0]}")
    ttft = [result.ttft for result in results]
    return Restart(server.name, ready, asked + results[0].pieces[0], ttft, results[-1].pieces[0])
