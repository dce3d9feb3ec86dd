"""H11: clients that leave, at every stage and in both modes, leave nothing behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import redis

from lookonce.service import running
from shared.local_redis import LocalRedis
from tests.service import processes
from tests.service.conftest import MODEL, random_png, service_settings, text_part, user
from tests.service.odd_images import part

CLIENTS, TOGETHER = 200, 40
#: places for requests in work: far fewer than clients, so that places which are not given back run out
PLACES = 60
#: seconds after the last client left
IDLE = 5.0
#: of any process between two rounds of clients that did the same, bytes
GROWTH = 48e6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass
class Watched:
    """A service and the Redis below it."""

    url: str
    redis: redis.Redis

    def work(self) -> dict[str, float]:
        """What is in work anywhere."""
        (model,) = httpx.get(f"{self.url}/v1/status", timeout=30).json()["models"]
        encoder, language = model["encoder"]["stats"], model["language"]["stats"]
        return {
            "leases": sum(1 for _ in self.redis.scan_iter("lookonce:lease:*")),
            "encoding": encoder["in_work"],
            "running": language["running"],
            "waiting": language["waiting"],
        }

    def idle_after(self) -> float:
        """Seconds until nothing is in work any more."""
        begin = time.monotonic()
        while any((work := self.work()).values()):
            assert time.monotonic() - begin < 60, work
            time.sleep(0.05)
        return time.monotonic() - begin


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    store = LocalRedis(tmp_path_factory.mktemp("redis"), maxmemory_mib=64)
    store.start()
    try:
        settings = service_settings(cache={"url": store.url}, http={"max_concurrent": PLACES})
        with running(settings) as url:
            yield Watched(url, redis.Redis.from_url(store.url))
    finally:
        store.stop()


def leave(url: str, seed: int) -> str:
    """One client: how far it gets before it leaves depends on its number."""
    stage = ("at once", "first token", "in the middle", "whole")[seed % 4]
    content = [] if seed % 3 == 0 else [part(random_png(seed))]
    content.append(text_part("Describe the picture."))
    body: dict[str, Any] = {"model": MODEL, "messages": user(*content), "max_tokens": 1500, "ignore_eos": True}
    try:
        if stage == "whole":
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=0.4))
            return "answered"
        patience = httpx.Timeout(30, read=0.05 if stage == "at once" else 30)
        body["stream"] = True
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=patience) as answer:
            if answer.status_code != httpx.codes.OK:
                return f"status {answer.status_code}"
            wanted = 1 if stage == "first token" else 20
            for number, _ in enumerate(line for line in answer.iter_lines() if line):
                if number >= wanted:
                    return f"left {stage}"
    except httpx.ReadTimeout:
        return f"left {stage}"
    return "answered"


def test_two_hundred_clients_that_leave_leave_nothing_behind(watched: Watched) -> None:
    kept: list[dict[str, int]] = []
    for round_ in range(3):
        with ThreadPoolExecutor(TOGETHER) as pool:
            numbers = range(10_000 * round_, 10_000 * round_ + CLIENTS)
            outcomes = Counter(pool.map(lambda seed: leave(watched.url, seed), numbers))
        idle = watched.idle_after()
        kept.append(processes.resident())
        print(dict(outcomes), f"idle after {idle:.2f} s")
        assert {outcome for outcome in outcomes if not outcome.startswith("left")} == set(), outcomes
        assert idle < IDLE
    grown = {name: kept[2][name] - kept[1].get(name, 0) for name in kept[2]}
    print({name: f"{growth / 1e6:+.1f} MB" for name, growth in grown.items()})
    assert kept[2].keys() == kept[1].keys(), "a process died"
    assert max(grown.values()) < GROWTH
    good = {"model": MODEL, "messages": user(part(random_png(5)), text_part("Describe.")), "max_tokens": 2}
    assert httpx.post(f"{watched.url}/v1/chat/completions", json=good, timeout=60).status_code == 200
