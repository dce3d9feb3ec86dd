"""The capacity model against what queueing theory knows exactly."""

from __future__ import annotations

import random

import pytest

from benchmarks.capacity.events import Clock, Host
from benchmarks.capacity.model import Cluster, Costs, Simulation, Traffic
from benchmarks.capacity.queues import erlang_c, mean_wait, servers_for
from benchmarks.capacity.stations import LanguageReplica, Station, StepTimes


def waits(servers: int, rate: float, service: float, count: int) -> tuple[list[float], float, float]:
    """Waits of every customer of a simulated M/M/c, the mean number of waiting ones, and the time it took."""
    draw, clock = random.Random(7), Clock()
    station = Station(clock, servers)
    waited: list[float] = []
    inside, area, since = 0, 0.0, 0.0

    def count_to(change: int) -> None:
        nonlocal inside, area, since
        area += inside * (clock.now - since)
        since, inside = clock.now, inside + change

    def arrive() -> None:
        begin, length = clock.now, draw.expovariate(1 / service)
        count_to(1)

        def done() -> None:
            count_to(-1)
            waited.append(clock.now - begin - length)

        station.serve(length, done)
        if len(waited) + inside < count:
            clock.after(draw.expovariate(rate), arrive)

    clock.after(0, arrive)
    clock.run()
    return waited, area / clock.now, clock.now


@pytest.mark.parametrize(("servers", "rate"), [(1, 0.5), (1, 0.8), (3, 2.1), (10, 8.0)])
def test_waits_are_those_of_m_m_c(servers: int, rate: float) -> None:
    waited, _, _ = waits(servers, rate, 1.0, 60_000)
    assert sum(waited) / len(waited) == pytest.approx(mean_wait(servers, rate, 1.0), rel=0.12)
    assert sum(wait > 1e-9 for wait in waited) / len(waited) == pytest.approx(erlang_c(servers, rate), rel=0.05)


def test_littles_law() -> None:
    """Customers inside = arrivals per second x seconds inside."""
    waited, inside, seconds = waits(2, 1.5, 1.0, 30_000)
    stay = sum(waited) / len(waited) + 1.0
    assert inside == pytest.approx(len(waited) / seconds * stay, rel=0.02)


def test_one_server_is_m_m_1() -> None:
    assert mean_wait(1, 0.5, 1.0) == pytest.approx(1.0)  # rho / (mu - lambda)
    assert erlang_c(1, 0.3) == pytest.approx(0.3)
    assert mean_wait(1, 0.5, 1.0, variation=0.0) == pytest.approx(0.5)  # M/D/1 waits half as long
    assert mean_wait(2, 2.0, 1.0) == float("inf")


def test_fewest_servers() -> None:
    found = servers_for(100.0, 0.05, wait=0.01, use=0.7, variation=1.0)
    assert mean_wait(found, 100.0, 0.05) <= 0.01
    assert mean_wait(found - 1, 100.0, 0.05) > 0.01 or 5 / (found - 1) > 0.7


def test_tasks_share_cores() -> None:
    """Two cores: a task with one thread keeps its core, two with two threads share the other."""
    clock, ends = Clock(), {}
    host = Host(clock, 2)
    for name, threads in (("small", 1), ("a", 2), ("b", 2)):
        host.run(3.0, threads, lambda n=name: ends.update({n: clock.now}))  # type: ignore[misc]
    clock.run()
    assert host.spent == pytest.approx(3 + 6 + 6)
    assert clock.now == pytest.approx(15 / 2)
    assert ends["small"] == pytest.approx(4.5)  # a third of two cores each until then


def test_answers_grow_together() -> None:
    clock, ends = Clock(), []
    replica = LanguageReplica(Host(clock, 1), 1, StepTimes(0.01, 0.001, 0.002), max_sequences=8, max_tokens=1000)
    for _ in range(2):
        replica.generate(100, 5, lambda number: ends.append(clock.now) if number == 5 else None)
    clock.run()
    # the first prompt alone; the second beside the first's second token; then three steps of both, and one alone
    first, second = 0.01 + 0.1 + 0.002, 0.01 + 0.1 + 0.004
    assert ends == pytest.approx([first + second + 3 * 0.014, first + second + 3 * 0.014 + 0.012])


def test_misses_use_the_encoder_as_arithmetic_says() -> None:
    """Use of a pool is work by capacity, and what goes through Redis is what was found and what was made."""
    costs = Costs(0.001, 0.0001, 1e6, 1e9, 0.0, 0.0, 0.05, StepTimes(0.0, 1e-6, 1e-4))
    traffic = Traffic(rate=20, hit_rate=0.75, answer_tokens=4)
    seen = Simulation(costs, Cluster(ingress=4, batch=1), traffic, seed=3).run(20_000)
    assert seen.use["encoder"] == pytest.approx(20 * 0.25 * 0.05, rel=0.05)
    assert seen.redis_bytes == pytest.approx(20 * 1.25 * 1e6, rel=0.05)
    assert seen.rate == pytest.approx(20, rel=0.05)


def test_a_closed_loop_is_as_fast_as_its_bottleneck() -> None:
    costs = Costs(0.0, 0.0, 1.0, 1e12, 0.0, 0.0, 0.5, StepTimes(0.0, 0.0, 0.001))
    seen = Simulation(costs, Cluster(batch=1), Traffic(clients=8, hit_rate=0.0, answer_tokens=2)).run(400)
    assert seen.rate == pytest.approx(2.0, rel=0.02)
