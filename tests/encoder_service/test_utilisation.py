"""The estimate of how well the processor is used."""

from __future__ import annotations

import pytest

from encoder_service.device import Patches
from encoder_service.towers.isaac import IsaacTower
from encoder_service.utilisation import Work, measure_work
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches


def test_operations_are_those_of_the_layers(small_tower: IsaacTower) -> None:
    """Counted by hand: 48→96, three blocks of 96·(288 + 96 + 2·192), and per token 384→1536→80."""
    by_hand = 2 * (48 * 96 + 3 * 96 * (288 + 96 + 2 * 192) + (384 * 1536 + 1536 * 80) / 4)
    for grid in (Grid(8, 8), Grid(2, 2), Grid(16, 20)):
        work = measure_work(small_tower, Patches(random_patches(grid, 48), grid))
        assert work.per_patch == pytest.approx(by_hand)
        assert work.gemm_rate > 1e6


def test_share_of_the_rate() -> None:
    work = Work(per_patch=1e6, gemm_rate=1e9)
    assert work.share(500, 1.0) == 0.5
    assert work.share(0, 0.0) == 0.0
