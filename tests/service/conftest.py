"""The whole service with the demo model, started once for all tests of this folder."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from lookonce.client import data_url
from lookonce.service import Service
from lookonce.service import service as start_service
from shared.config import Settings, load_settings

ROOT = Path(__file__).parent.parent.parent
SAMPLES = ROOT / "models" / "demo" / "samples"
MODEL = "lookonce-demo"


def service_settings(**changes: Any) -> Settings:
    """The demo configuration on a free port; ``changes`` replace fields of sections: ``http={"port": 1}``."""
    settings = load_settings(ROOT / "configs" / "demo.yaml")
    changes["http"] = {"port": 0} | changes.get("http", {})
    sections = {name: getattr(settings, name).model_copy(update=fields) for name, fields in changes.items()}
    return settings.model_copy(update=sections)


@pytest.fixture(scope="session")
def pools() -> Iterator[Service]:
    """A running service."""
    with start_service(service_settings(images={"allow_private_hosts": True})) as running:
        yield running


@pytest.fixture(scope="session")
def service(pools: Service) -> str:
    """Its base URL."""
    return pools.url


@pytest.fixture
def client(service: str) -> OpenAI:
    """The official client."""
    return OpenAI(base_url=f"{service}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="session")
def samples() -> list[tuple[Path, str]]:
    """Sample pictures with what is truly in them."""
    truths = json.loads((SAMPLES / "samples.json").read_text())["captions"]
    return [(SAMPLES / name, truth) for name, truth in truths.items()]


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def sample_url(path: Path) -> str:
    return data_url(path)


def random_png(seed: int, width: int = 64, height: int = 64) -> bytes:
    """A picture that nobody has seen."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def metric(service: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples that carry these labels."""
    text = httpx.get(f"{service}/metrics", timeout=30).text
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total
