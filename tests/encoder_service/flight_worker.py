"""An encoder in a process of its own, for the tests of single flight: one JSON line in, one out.

``python -m tests.encoder_service.flight_worker CHECKPOINT URL LEASE``
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from encoder_service.engine import EncoderEngine
from shared.cache import AsyncEmbeddingCache
from shared.config import CacheSettings, EncoderSettings, ImageSettings, ModelSettings
from tests.encoder_service.kit import HeldForwards


async def work(checkpoint: Path, url: str, lease: float) -> None:
    cache = AsyncEmbeddingCache(CacheSettings(timeout=5.0, lease=lease), url)
    model = ModelSettings(name="m", checkpoint=checkpoint, encoder=EncoderSettings(threads=1))
    engine = EncoderEngine(model, ImageSettings(), cache)
    await engine.start()
    answer({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        order: dict[str, Any] = json.loads(line)
        before = engine.stats()["forwards"]
        if order.get("hold"):
            HeldForwards(pytest.MonkeyPatch())
        data = base64.b64decode(order["file"])
        items = await asyncio.gather(*(engine.encode(data) for _ in range(order["callers"])), return_exceptions=True)
        answer(
            {
                "forwards": engine.stats()["forwards"] - before,
                "keys": sorted({getattr(item, "key", repr(item)) for item in items}),
                "answers": sum(not isinstance(item, BaseException) for item in items),
            }
        )
    await engine.stop()
    await cache.close()


def answer(body: dict[str, Any]) -> None:
    print(json.dumps(body), flush=True)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
