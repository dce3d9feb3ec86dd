"""Pictures, files and held forwards for the tests of the engine."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_service.checkpoints import LoadedEncoder, load_encoder
from encoder_service.device import Patches, embed
from encoder_service.engine import EncoderEngine
from encoder_service.replay import runner
from encoder_service.towers.packed import pack_weights
from shared.items import VisionItem
from shared.records import decode_record

#: starts an engine on the test's Redis; keyword arguments go to the encoder's settings
Make = Callable[..., Any]
NOWHERE = "unix:///nonexistent/socket"
#: pictures differ between runs, so that no entry of a former run is found
SESSION = time.time_ns()


def pixels(seed: int, width: int = 40, height: int = 30) -> np.ndarray:
    """A picture of its own for every seed."""
    return np.random.default_rng([seed, SESSION]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file(picture: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind)
    return buffer.getvalue()


async def embedding(engine: EncoderEngine, item: VisionItem) -> torch.Tensor:
    """Of an item, from its record or from the cache."""
    record = item.record
    if record is None:
        record = await engine._cache.fetch(item.key)
    assert record is not None
    _, values = decode_record(record, item.key)
    return values


def served(checkpoint: Path) -> LoadedEncoder:
    """Loaded and laid out as an engine does it."""
    loaded = load_encoder(checkpoint, "float32")
    pack_weights(loaded.tower)
    return loaded


def expected(checkpoint: Path, picture: np.ndarray) -> torch.Tensor:
    """The same picture without engine, queue or cache."""
    loaded = served(checkpoint)
    values, grid = loaded.preprocess.patches(torch.from_numpy(picture))
    return embed(loaded.tower, [Patches(values, grid)]).embeddings[0]


class HeldForwards:
    """Stops forwards before they begin until :meth:`release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.error = error

        def held(tower: Any, images: list[Patches]) -> Any:
            self.sizes.append(len(images))
            self.gate.wait(20)
            if self.error:
                raise self.error
            return embed(tower, images)

        monkeypatch.setattr(runner, "embed", held)

    def release(self) -> None:
        self.gate.set()

    async def begun(self, count: int = 1) -> None:
        await until(lambda: len(self.sizes) >= count)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Polls; fails when it does not become true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this did not happen in time"
        await asyncio.sleep(0.003)


async def idle(engine: EncoderEngine) -> None:
    """Waits until nothing is in work; fails when something stays."""
    names = ("in_work", "waiting", "waiting_patches", "pixels_held")
    await until(lambda: not any(engine.stats()[name] for name in names))
