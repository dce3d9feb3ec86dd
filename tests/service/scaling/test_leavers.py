"""A4: requests that are cancelled while they start leave no place taken in any replica."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from lookonce.service import running
from tests.service.conftest import MODEL
from tests.service.scaling.kit import ask, body, pools, within

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS = 1000
#: as many as one replica with one place holds, in it and in the queue before it
TOGETHER = 5
#: seconds after sending by which a client has left
PATIENCE = 0.05


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    """One place in each pool: one that is not given back stops the service."""
    one = {"max_ongoing": 1, "min_replicas": 1, "max_replicas": 1}
    with running(pools(one, one)) as url:
        yield url


async def leave(client: httpx.AsyncClient, url: str, seed: int, chance: random.Random) -> str:
    request = body(seed, max_tokens=200, ignore_eos=True, stream=seed % 2 == 0)
    if seed % 3 == 0:  # text alone goes to the language pool at once
        request = {"model": MODEL, "messages": [{"role": "user", "content": f"Number {seed}?"}], "max_tokens": 200}
    asked = asyncio.ensure_future(client.post(f"{url}/v1/chat/completions", json=request))
    await asyncio.sleep(chance.uniform(0, PATIENCE))
    if asked.done():
        return str(asked.result().status_code)
    asked.cancel()
    try:
        await asked
    except asyncio.CancelledError:
        return "left"
    return "answered all the same"


async def leave_all(url: str) -> Counter[str]:
    chance, seeds, outcomes = random.Random(4), iter(range(80_000, 80_000 + REQUESTS)), Counter[str]()

    async def client() -> None:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            for seed in seeds:
                outcomes[await leave(http, url, seed, chance)] += 1

    await asyncio.gather(*(client() for _ in range(TOGETHER)))
    return outcomes


def in_work(url: str) -> float:
    (model,) = httpx.get(f"{url}/v1/status", timeout=30).json()["models"]
    encoder, language = model["encoder"]["stats"], model["language"]["stats"]
    if not encoder or not language:  # no place in which to ask
        return 1.0
    return float(encoder["in_work"] + language["running"] + language["waiting"])


def test_a_thousand_cancelled_requests_leave_every_place_free(narrow: str) -> None:
    expected = ask(narrow, 1)["choices"][0]["message"]["content"]
    outcomes = asyncio.run(leave_all(narrow))
    print(dict(outcomes))
    assert outcomes.total() == REQUESTS
    assert outcomes["left"] > REQUESTS / 2
    seconds = within(20, lambda: in_work(narrow) == 0, "nothing is in work")
    print(f"nothing in work {seconds:.1f} s after the last")
    for _ in range(5):
        assert ask(narrow, 1)["choices"][0]["message"]["content"] == expected
    for seed in range(90_000, 90_005):
        assert ask(narrow, seed, max_tokens=2)["choices"][0]["message"]["content"], "new pictures are encoded"
