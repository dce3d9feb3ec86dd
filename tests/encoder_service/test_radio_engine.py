"""RADIO checkpoints through the whole encoder engine: file in, record in the cache out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from shared.families import size_rule
from tests.encoder_service.kit import Make, embedding, expected, file, pixels
from tools.checkpoints.radio import Kind, Shape, write_radio

CHECKPOINTS: dict[str, tuple[Kind, Shape]] = {
    "alone": ("old", Shape()),
    "tiles": ("llama", Shape()),
    "dynamic": ("nano", Shape(bounds=(16, 200))),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_radio(tmp_path_factory.mktemp("radio"), *CHECKPOINTS[request.param], seed=12)


@pytest.mark.parametrize("replay", [{}, {"backend": "eager", "budgets": (256, 1024)}], ids=["own size", "budgets"])
async def test_records_hold_what_the_tower_gives(make: Make, checkpoint: Path, replay: dict[str, object]) -> None:
    """V15: together in any batch, the same bits as alone; as many rows as the size rule said beforehand."""
    engine = await make(name=f"radio-{len(replay)}", replay=replay, max_batch_patches=1024)
    rule = size_rule(checkpoint)
    pictures = [pixels(700 + n, 8 + 23 * (n % 5), 6 + 31 * (n % 4)) for n in range(10)]
    items = await asyncio.gather(*(engine.encode(file(picture)) for picture in pictures))
    for picture, item in zip(pictures, items, strict=True):
        height, width = picture.shape[:2]
        assert item.tokens == rule.tokens(width, height)
        assert item.merged == rule.merged(width, height)
        assert torch.equal(await embedding(engine, item), expected(checkpoint, picture))
    await engine.check_health()
