"""Two tenants: how long an answer takes tells nobody what another tenant sent."""

from __future__ import annotations

import random
import time

import httpx
import numpy as np
import pytest

from shared.keys import file_hash
from tests.api.test_uploads import as_url, ask, encoded
from tests.service.conftest import random_png

PAIRS = 40
#: of a rank statistic whose spread is 0.065 when both sides are alike
BOUND = 0.24

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def share_above(one: list[float], other: list[float]) -> float:
    """How often a value of ``one`` is above one of ``other``, 0 to 1; 0.5 when they are alike (Mann and Whitney's)."""
    return float(np.mean([a > b for a in one for b in other]))


def seconds(client: httpx.Client, data: bytes) -> float:
    begin = time.perf_counter()
    assert ask(client, as_url(data)).status_code == 200
    return time.perf_counter() - begin


def test_a_picture_that_another_tenant_sent_takes_as_long_as_one_that_nobody_sent(
    alice: httpx.Client, bob: httpx.Client
) -> None:
    seed = time.time_ns()
    theirs, nobodys = ([random_png(seed + 2 * number + kind, 640, 640) for number in range(PAIRS)] for kind in (0, 1))
    for data in theirs:
        encoded(alice, data)
    order = [(data, kind) for kind, pictures in enumerate((theirs, nobodys)) for data in pictures]
    random.Random(1).shuffle(order)
    found: tuple[list[float], list[float]] = ([], [])
    for data, kind in order:
        found[kind].append(seconds(bob, data))
    assert abs(share_above(*found) - 0.5) < BOUND
    hits = [seconds(alice, data) for data in theirs]
    assert share_above(found[0], hits) > 0.5 + BOUND, "the measurement would not see a hit either"


def test_asking_for_a_name_that_another_tenant_has_takes_as_long_as_for_any(
    alice: httpx.Client, bob: httpx.Client
) -> None:
    seed = time.time_ns()
    mine = [encoded(alice, random_png(seed + number))["hash"] for number in range(10)]
    nobodys = [file_hash(str(number).encode()) for number in range(10)]
    for method in ("GET", "DELETE"):
        found: tuple[list[float], list[float]] = ([], [])
        for round_ in range(PAIRS):
            for kind, names in enumerate((mine, nobodys)):
                begin = time.perf_counter()
                answer = bob.request(method, f"/v1/images/{names[round_ % len(names)]}")
                found[kind].append(time.perf_counter() - begin)
                assert answer.status_code == 404
        assert abs(share_above(*found) - 0.5) < BOUND
