"""What clients see when the process that answers HTTP dies, or the one that keeps its socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.service.conftest import random_png
from tests.service.failures.conftest import Faulty
from tests.service.failures.victims import eventually, send, victims

pytestmark = pytest.mark.slow

#: seconds; a replica on a busy machine
RESTART = 60


@pytest.fixture(autouse=True)
def _all_there(faulty: Faulty) -> Iterator[None]:
    eventually(lambda: httpx.get(f"{faulty.url}/readyz", timeout=60).status_code == 200, 120, "ready before")
    yield


def test_new_connections_wait_for_the_next_ingress(faulty: Faulty) -> None:
    """Nobody is refused while no replica lives; the answer is only late."""
    (old,) = send("ingress")
    begin = time.monotonic()
    assert faulty.text(random_png(70))
    print(f"answered {time.monotonic() - begin:.1f} s after the kill")
    assert old not in victims("ingress")


def test_the_socket_outlives_its_keeper(faulty: Faulty) -> None:
    """The door's process dies, and then the replica that had a copy of the socket; nobody notices the first."""
    failures: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.05):
            try:
                httpx.get(f"{faulty.url}/healthz", timeout=60).raise_for_status()
            except httpx.HTTPError as error:
                failures.append(repr(error))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        (old,) = send("door")
        eventually(lambda: [pid for pid in victims("door") if pid != old], RESTART, "another keeper")
        time.sleep(1)
        assert faulty.text(random_png(71))
    finally:
        stop.set()
        asking.join()
    assert failures == []
    send("ingress")
    assert faulty.text(random_png(72))
