"""Services with pools of other sizes, and questions to them."""

from __future__ import annotations

import base64
import time
from typing import Any

import httpx

from shared.config import Settings
from tests.service.conftest import MODEL, image_part, random_png, service_settings, text_part, user


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
