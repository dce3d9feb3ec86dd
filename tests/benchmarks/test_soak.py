"""The soak's verdicts about memory that is made to grow or not, and its eyes upon a process that does."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from benchmarks.soak.memory import MIB, processes, use
from benchmarks.soak.verdict import judge, slope


def hour(*, growth: float = 0.0, until: float = 3600, noise: float = 2.0) -> list[tuple[float, float]]:
    """Samples of a process that grows by MiB an hour until a second."""
    draw = random.Random(3)
    at = range(0, 3600, 5)
    return [(t, (300 + growth * min(t, until) / 3600 + draw.gauss(0, noise)) * MIB) for t in at]


@pytest.mark.parametrize(
    ("samples", "word"),
    [
        (hour(), "flat"),
        (hour(growth=4), "flat"),
        (hour(growth=40), "grows"),
        (hour(growth=-40), "shrinks"),
        (hour(growth=120, until=1500), "settles"),
        (hour()[:3], "brief"),
    ],
)
def test_growth_has_its_word(samples: list[tuple[float, float]], word: str) -> None:
    assert judge(samples, limit=8).word == word


def test_a_few_pages_in_a_short_time_are_no_growth() -> None:
    """In five minutes an allocator's mood makes a slope that would be a leak over an hour."""
    assert judge(hour(growth=15, noise=0.1)[:60], limit=8).word == "flat"


def test_a_slow_leak_is_found_under_noise() -> None:
    assert slope(hour(growth=30)) * 3600 / MIB == pytest.approx(30, abs=2)


def test_a_single_peak_is_no_growth() -> None:
    samples = hour(noise=0.1)
    samples[-40:-20] = [(at, value + 200 * MIB) for at, value in samples[-40:-20]]
    assert judge(samples, limit=8).word == "flat"


def test_memory_of_a_child_is_seen() -> None:
    """Its own memory rises by what it takes, and falls when it is given back."""
    say = "print(1, flush=True); input()"
    work = f"input(); x = b'1' * (64 << 20); {say}; del x; {say}"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None

        def go_on() -> None:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.stdout.readline()

        before = use(child.pid).own
        go_on()
        assert use(child.pid).own - before == pytest.approx(64 * MIB, rel=0.1)
        assert any(name.endswith(f" {child.pid}") for name in processes(child.pid))
        go_on()
        assert use(child.pid).own - before < 16 * MIB
        child.stdin.write(b"\n")
