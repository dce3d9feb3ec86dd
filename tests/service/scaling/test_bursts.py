"""A9: everybody comes at once, to one encoder and one language replica: everybody is answered, and rightly."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from lookonce.service import running
from shared.config import Settings
from tests.service.conftest import MODEL, ROOT, image_part, service_settings, text_part, user
from tests.service.scaling.kit import body

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: what a client may be told instead of an answer
TOLD = {httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE}


def one_of_each(checkpoint: Path) -> Settings:
    settings = service_settings()
    (model,) = settings.models
    encoder = model.encoder.model_copy(update={"max_replicas": 1})
    return settings.model_copy(
        update={"models": (model.model_copy(update={"checkpoint": checkpoint, "encoder": encoder}),)}
    )


def with_small_pictures(folder: Path) -> Path:
    """The demo model, whose pictures have 144 tokens at most, so that eight large ones fit into its context."""
    for path in (ROOT / "models" / "demo").iterdir():
        if path.name not in ("config.json", "samples"):
            (folder / path.name).symlink_to(path)
    config = json.loads((ROOT / "models" / "demo" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision_max_num_patches": 576}))
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(one_of_each(with_small_pictures(tmp_path_factory.mktemp("model")))) as url:
        yield url


def at_once(url: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """All of them from one client, none waiting for another."""

    async def work() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=300, trust_env=False) as client:
            asked = (client.post(f"{url}/v1/chat/completions", json=one) for one in bodies)
            return list(await asyncio.gather(*asked))

    return asyncio.run(work())


def check_against_the_cache(url: str, bodies: list[dict[str, Any]], responses: list[httpx.Response]) -> None:
    """What was answered in the crowd is what comes for the same request later, with every picture known."""
    for request, response in zip(bodies, responses, strict=True):
        again = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=120)
        assert again.status_code == httpx.codes.OK, again.text
        details = again.json()["usage"]["prompt_tokens_details"]
        if response.status_code == httpx.codes.OK:
            assert details["cached_image_tokens"] == details["image_tokens"] > 0, "its pictures were kept"
            assert text(again) == text(response) != ""


def text(response: httpx.Response) -> str:
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def test_two_hundred_requests_about_new_pictures_at_once(single: str) -> None:
    bodies = [body(30_000 + number, max_tokens=24) for number in range(200)]
    responses = at_once(single, bodies)
    assert Counter(response.status_code for response in responses) == {httpx.codes.OK: 200}
    check_against_the_cache(single, bodies[::8], responses[::8])


def large_picture(seed: int) -> str:
    """1920×1080, as a camera's JPEG."""
    colours = np.random.default_rng(seed).integers(0, 256, (9, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours).resize((1920, 1080), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_sixty_four_requests_with_one_to_eight_large_pictures_at_once(single: str) -> None:
    """Answered, or told to come again; none is missing."""
    chance = random.Random(9)
    seeds = iter(range(60_000, 70_000))
    bodies: list[dict[str, Any]] = []
    for _ in range(64):
        pictures = [image_part(large_picture(next(seeds))) for _ in range(chance.randint(1, 8))]
        messages = user(*pictures, text_part("Describe the first picture."))
        bodies.append({"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16})
    responses = at_once(single, bodies)
    outcomes = Counter(response.status_code for response in responses)
    print(dict(outcomes))
    assert outcomes.keys() <= {httpx.codes.OK} | TOLD
    assert outcomes.total() == 64
    assert all("retry-after" in response.headers for response in responses if response.status_code in TOLD)
    assert outcomes[httpx.codes.OK] >= 32, "queues hold that many"
    check_against_the_cache(single, bodies[::8], responses[::8])
