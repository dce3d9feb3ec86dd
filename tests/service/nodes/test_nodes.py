"""A cluster of several machines: pools are spread, and the service outlives the loss of one."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lookonce.listening import free_port
from lookonce.service import running
from shared.config import Settings
from shared.errors import ConfigError
from tests.service.nodes.kit import Cluster, Machine, can_isolate, cluster
from tests.service.scaling.kit import ask, body, pools, within
from tests.service.scaling.load import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: tries of one request, as the official client makes them when a connection breaks or a 5xx or 429 comes
TRIES = 6
KNOWN = range(900, 906)


def settings_on(made: Cluster) -> Settings:
    two = {"min_replicas": 2, "max_replicas": 2}
    settings = pools(two, two)
    return settings.model_copy(
        update={
            "ray": settings.ray.model_copy(update={"address": made.address}),
            "cache": settings.cache.model_copy(update={"url": made.redis}),
            "http": settings.http.model_copy(update={"port": free_port(), "replicas": 2}),
        }
    )


@pytest.fixture(scope="module", params=[True, False], ids=["namespaces", "raylets"])
def spread(request: pytest.FixtureRequest) -> Iterator[tuple[str, Cluster]]:
    """A service on a head and two other machines, with room for all replicas on any two of them."""
    if request.param and not can_isolate():
        pytest.skip("only root can make network namespaces, with ip and unshare")
    with (
        tempfile.TemporaryDirectory(prefix="lkn", dir="/tmp", ignore_cleanup_errors=True) as folder,
        cluster(Path(folder), isolated=request.param, head=2, workers=(4, 4)) as made,
        running(settings_on(made), print) as url,
    ):
        yield url, made


def where(made: Cluster) -> dict[str, list[str]]:
    return {f"{number} {machine.address}": machine.roles() for number, machine in enumerate(made.machines)}


@contextmanager
def asking(url: str, outcome: Outcome, clients: int = 4) -> Iterator[None]:
    """Known and new pictures without a pause, each request tried as the official client would."""
    expected = {seed: ask(url, seed)["choices"][0]["message"]["content"] for seed in KNOWN}
    fresh, stop = itertools.count(200_000), threading.Event()

    def one(seed: int) -> str | None:
        fault = ""
        for attempt in range(TRIES):
            try:
                response = httpx.post(f"{url}/v1/chat/completions", json=body(seed), timeout=130)
            except httpx.TransportError as error:
                fault = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == httpx.codes.OK:
                    text = response.json()["choices"][0]["message"]["content"]
                    return None if text == expected.get(seed, text) and text else f"a wrong answer about {seed}"
                fault = f"{response.status_code}: {response.text[:200]}"
            time.sleep(0.5 * 2**attempt)
        return f"lost: {fault}"

    def client(number: int) -> None:
        for seed in itertools.cycle(KNOWN):
            if stop.is_set():
                return
            outcome.note(one(next(fresh) if number % 2 else seed))

    with ThreadPoolExecutor(clients) as threads:
        done = [threads.submit(client, number) for number in range(clients)]
        try:
            yield
        finally:
            stop.set()
            for future in done:
                future.result()


def busiest(made: Cluster) -> Machine:
    """The machine, other than the head, with most replicas."""
    return max(made.machines[1:], key=lambda machine: len(machine.roles()))


def survive(url: str, made: Cluster, lose: Any) -> Outcome:
    """Loses the busiest machine under load, and waits until all replicas run elsewhere."""
    outcome, lost = Outcome(), busiest(made)
    assert lost.roles(), where(made)
    with asking(url, outcome):
        within(60, lambda: outcome.answered >= 8, "answers before the loss")
        lose(lost)
        begin = time.monotonic()
        others = [machine for machine in made.machines if machine is not lost]

        def whole() -> bool:
            roles = sorted(role for machine in others for role in machine.roles())
            return roles.count("encoder") == roles.count("language") == 2 and "ingress" in roles

        within(240, whole, "every replica runs elsewhere")
        print(f"replicas ran elsewhere after {time.monotonic() - begin:.0f} s; {where(made)}")
        after = outcome.answered
        within(120, lambda: outcome.answered >= after + 12, "answers after the loss")
    assert outcome.faults == []
    return outcome


def test_pools_are_spread_over_machines(spread: tuple[str, Cluster]) -> None:
    url, made = spread
    assert ask(url, 1)["choices"][0]["message"]["content"]
    # Ray spreads as well as it can: two replicas of one pool may meet when another pool's came between them
    for pool in ("encoder", "language"):
        assert sum(machine.roles().count(pool) for machine in made.machines) == 2, where(made)
    assert sum(bool(machine.roles()) for machine in made.machines) >= 2, where(made)


def test_a_machine_is_lost_under_load(spread: tuple[str, Cluster]) -> None:
    """Its requests are answered elsewhere; no answer is wrong, none is lost to a client that tries again."""
    url, made = spread
    survive(url, made, Machine.kill)


def test_a_machines_network_is_cut_under_load(spread: tuple[str, Cluster]) -> None:
    """Its processes go on, and nobody reaches them: the pools of the others answer."""
    url, made = spread
    if not made.machines[0].address.startswith("10."):
        pytest.skip("plain raylets share one network")
    made.machines = [machine for machine in made.machines if machine.process.poll() is None]
    made.start_worker(4)
    within(60, lambda: len(made.machines[-1].processes()) > 2, "a new machine")
    survive(url, made, Machine.cut)


def test_a_cluster_needs_a_redis_that_all_reach() -> None:
    settings = pools({}, {})
    settings = settings.model_copy(update={"ray": settings.ray.model_copy(update={"address": "10.0.0.1:6379"})})
    with pytest.raises(ConfigError, match=r"cache\.url"), running(settings):
        pass
