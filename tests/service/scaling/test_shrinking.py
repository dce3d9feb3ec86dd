"""A8: a pool grows from one to four replicas by its load and shrinks again while streams run, and none is cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from lookonce.service import running
from tests.service.scaling.kit import pools, replicas, within
from tests.service.scaling.load import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOUND = 4
#: two clients keep one replica busy to half, fourteen ask for more than four
FEW, MANY = 2, 12
LANGUAGE = {
    "min_replicas": 1,
    "max_replicas": BOUND,
    "target_ongoing": 2.0,
    "upscale_delay": 0.5,
    "downscale_delay": 3.0,
    "load_window": 3.0,
}


@contextmanager
def watched(url: str) -> Iterator[list[dict[str, int]]]:
    """How many language replicas there were, by state, twice a second."""
    seen: list[dict[str, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            (model,) = httpx.get(f"{url}/v1/status", timeout=60).json()["models"]
            seen.append(model["language"]["replicas"])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join(60)


def test_a_pool_shrinks_under_load_without_a_cut_stream() -> None:
    with running(pools({}, LANGUAGE)) as url, watched(url) as seen, load(url, FEW) as few:
        assert replicas(url, "language") == 1
        begin = time.monotonic()
        with load(url, MANY) as many:
            within(400, lambda: replicas(url, "language") == BOUND, "as many as allowed")
            grown, answered = time.monotonic() - begin, few.answered + many.answered
            within(120, lambda: few.answered + many.answered >= answered + 2 * MANY, "answers by all of them")
        begin, answered = time.monotonic(), few.answered
        within(240, lambda: replicas(url, "language") == 1, "one is left under the smaller load")
        within(60, lambda: few.answered > answered + FEW, "answers by the last one")
        shrunk = time.monotonic() - begin
        assert replicas(url, "language") == 1, "and it does not flap"
    print(f"1 → {BOUND} in {grown:.0f} s, → 1 in {shrunk:.0f} s; {few.answered + many.answered} answers")
    assert few.faults == many.faults == []
    assert max(states.get("RUNNING", 0) for states in seen) == BOUND
    assert any(states.get("STOPPING", 0) for states in seen), "replicas were seen to finish what they had"
