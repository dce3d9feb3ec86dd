"""Runs the sides in turns and sums up what the clients saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.e2e.load import Client, Result
from benchmarks.e2e.servers import Server, spent_between
from benchmarks.e2e.workloads import Workload, kinds


@dataclass(frozen=True)
class Row:
    """One side's figures in one workload, over all rounds.

    Attributes:
        workload, side: which.
        requests, failed: how many.
        rate: answered requests per second, each round's median.
        ttft: seconds to the first token, median over the compared kind.
        ttft_by_kind: medians of every kind.
        gap_p50, gap_p99: inter-token seconds of the compared kind.
        cpu: processor seconds of the side for one request.
        memory: bytes of all its processes at the end.
    """

    workload: str
    side: str
    requests: int
    failed: int
    rate: float
    ttft: float
    ttft_by_kind: dict[str, float]
    gap_p50: float
    gap_p99: float
    cpu: float
    memory: int

    def to_json(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)


@dataclass
class _Round:
    results: list[Result]
    cpu: float

    @property
    def rate(self) -> float:
        good = [result for result in self.results if not result.error]
        begin, end = min(r.sent for r in self.results), max((r.pieces[-1] for r in good), default=float("inf"))
        return len(good) / (end - begin)


async def in_turns(servers: Sequence[Server], workload: Workload, rounds: Sequence[int]) -> list[Row]:
    """A B, B A, A B …: whatever else the machine does hits both sides alike."""
    seen: dict[str, list[_Round]] = {server.name: [] for server in servers}
    for turn, number in enumerate(rounds):
        for server in servers if turn % 2 == 0 else reversed(servers):
            async with Client(server.url, server.model) as client:
                if workload.warm is not None:
                    await workload.warm(client, number)
                before = server.cpu_seconds()
                results = await workload.run(client, number)
                spent = spent_between(before, server.cpu_seconds())
            seen[server.name].append(_Round(results, spent))
            errors = [result.error for result in results if result.error]
            print(
                f"  {workload.name} · {server.name}: {len(results)} requests, {len(errors)} failed, "
                f"{seen[server.name][-1].rate:.3f}/s {errors[:1] or ''}",
                flush=True,
            )
    return [_row(workload, server, seen[server.name]) for server in servers]


def _row(workload: Workload, server: Server, rounds: list[_Round]) -> Row:
    results = [result for one in rounds for result in one.results]
    names = sorted({result.ask.kind for result in results})
    gaps = [gap for result in kinds(results, workload.gaps_of) for gap in result.gaps] or [float("nan")]
    medians = {name: _middle([result.ttft for result in kinds(results, name)]) for name in names}
    return Row(
        workload.name,
        server.name,
        len(results),
        sum(bool(result.error) for result in results),
        median(one.rate for one in rounds),
        medians.get(workload.latency_of, float("nan")),
        medians,
        float(np.percentile(gaps, 50)),
        float(np.percentile(gaps, 99)),
        sum(one.cpu for one in rounds) / len(results),
        server.memory(),
    )


def _middle(values: list[float]) -> float:
    return median(values) if values else float("nan")
