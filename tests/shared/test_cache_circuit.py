"""The circuit breaker and the counters."""

from __future__ import annotations

import threading
from pathlib import Path

from shared.cache import breaker as breakers
from shared.cache.breaker import Breaker
from shared.cache.stats import CacheStats


def test_the_circuit_opens_probes_and_closes() -> None:
    now = 0.0
    circuit = Breaker(lambda: now)
    for _ in range(breakers.FAILURES_TO_OPEN):
        assert circuit.allows()
        assert not circuit.is_open
        circuit.failed()
    assert circuit.is_open
    assert not circuit.allows()
    now = breakers.OPEN_SECONDS + 0.01
    assert circuit.allows()  # one probe
    assert not circuit.allows()
    circuit.failed()
    now += breakers.OPEN_SECONDS / 2
    assert not circuit.allows()
    now += breakers.OPEN_SECONDS
    assert circuit.allows()
    circuit.succeeded()
    assert circuit.allows()
    assert circuit.allows()


def test_single_failures_do_not_open_the_circuit() -> None:
    circuit = Breaker()
    for _ in range(20):
        for _ in range(breakers.FAILURES_TO_OPEN - 1):
            circuit.failed()
        circuit.succeeded()
    assert circuit.allows()


def test_stats_are_safe_for_threads(tmp_path: Path) -> None:
    stats = CacheStats(Breaker())

    def count() -> None:
        for _ in range(500):
            stats.record("fetch", "hit")
            stats.moved(read=2, written=1)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = stats.snapshot()
    assert (counts["hits"], counts["bytes_read"], counts["bytes_written"]) == (4000, 8000, 4000)
