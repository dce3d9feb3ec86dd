"""Pools that start from nothing, grow by their own signal, and route by what replicas have seen."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from lookonce.service import running
from shared.config import Settings
from tests.service.conftest import MODEL, image_part, random_png, service_settings, text_part, user

pytestmark = pytest.mark.slow


def pools(encoder: dict[str, Any], language: dict[str, Any]) -> Settings:
    settings = service_settings()
    (model,) = settings.models
    changed = model.model_copy(
        update={
            "encoder": model.encoder.model_copy(update=encoder),
            "language": model.language.model_copy(update=language),
        }
    )
    return settings.model_copy(update={"models": (changed,)})


def body(seed: int, side: int = 64, **more: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(random_png(seed, side, side)).decode()
    return {
        "model": MODEL,
        "messages": user(image_part(url), text_part("Describe the picture.")),
        "temperature": 0,
    } | more


def ask(url: str, seed: int, **more: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/chat/completions", json=body(seed, **more), timeout=130)
    assert response.status_code == httpx.codes.OK, response.text
    found: dict[str, Any] = response.json()
    return found


def replicas(url: str, pool: str, state: str = "RUNNING") -> int:
    (model,) = httpx.get(f"{url}/v1/status", timeout=30).json()["models"]
    return int(model[pool]["replicas"].get(state, 0))


def within(seconds: float, condition: Any, what: str) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, what
        time.sleep(0.3)
    return time.monotonic() - begin


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


def test_requests_about_one_image_meet_in_one_language_replica() -> None:
    """The second question finds the first one's tokens in the prefix cache, whichever of two replicas took it."""
    with running(pools({}, {"min_replicas": 2, "max_replicas": 2})) as url:
        for seed in range(300, 310):
            first, second, third = (ask(url, seed, side=256, max_tokens=2)["usage"] for _ in range(3))
            assert first["prompt_tokens_details"]["cached_tokens"] == 0
            for again in (second, third):
                assert again["prompt_tokens_details"]["cached_tokens"] > 0, f"image {seed} went to a stranger"
