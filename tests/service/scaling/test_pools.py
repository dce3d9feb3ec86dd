"""Pools that start from nothing and grow by their own signal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lookonce.service import running
from tests.service.scaling.kit import ask, pools, replicas, within

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sleepy() -> Iterator[str]:
    """An encoder pool that starts with nothing and goes back to it."""
    encoder = {"min_replicas": 0, "max_replicas": 2, "downscale_delay": 3.0, "load_window": 3.0, "upscale_delay": 0.5}
    with running(pools(encoder | {"target_patches": 4096}, {})) as url:
        yield url


def test_an_idle_pool_has_no_replica_and_wakes_for_requests(sleepy: str) -> None:
    """A1, A3: zero at the start; one request and then twenty are held until an encoder is there; zero again."""
    assert replicas(sleepy, "encoder") == replicas(sleepy, "encoder", "STARTING") == 0
    assert httpx.get(f"{sleepy}/readyz", timeout=10).status_code == httpx.codes.OK, "asking wakes it"
    first = ask(sleepy, 1)["choices"][0]["message"]["content"]
    assert replicas(sleepy, "encoder") >= 1
    within(60, lambda: replicas(sleepy, "encoder") == 0, "back to none")
    answer = ask(sleepy, 1)
    assert answer["choices"][0]["message"]["content"] == first
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_image_tokens"] == details["image_tokens"] > 0
    assert replicas(sleepy, "encoder") == 0, "a known image wakes nobody"
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda seed: ask(sleepy, seed), range(100, 120)))
    assert all(answer["choices"][0]["message"]["content"] for answer in answers)


def test_images_move_the_encoder_pool_only(sleepy: str) -> None:
    """The language pool has one replica at most here; the encoder grows to its bound under large new images."""
    stop = threading.Event()
    most = 0

    def load(first: int) -> None:
        seed = first
        while not stop.is_set():
            ask(sleepy, seed, side=700, max_tokens=1)
            seed += 1

    with ThreadPoolExecutor(6) as threads:
        done = [threads.submit(load, 10_000 * (number + 1)) for number in range(6)]
        begin = time.monotonic()
        while most < 2 and time.monotonic() - begin < 90:
            most = max(most, replicas(sleepy, "encoder"))
            time.sleep(0.5)
        stop.set()
        for future in done:
            future.result()
    assert most == 2
    within(60, lambda: replicas(sleepy, "encoder") == 0, "none is left after the load")
