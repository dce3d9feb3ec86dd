"""Small towers and checkpoints that several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from encoder_service.towers.isaac import IsaacTower, IsaacTowerConfig
from shared.sizing import Grid
from tests.checkpoints import write_isaac


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint in the new, nested layout."""
    return write_isaac(tmp_path_factory.mktemp("isaac"), nested=True)


@pytest.fixture(scope="session")
def small_tower() -> IsaacTower:
    """Random weights of a size at which every kernel is of the usual kind."""
    torch.manual_seed(0)
    tower = IsaacTower(IsaacTowerConfig(96, 3, 3, 192, 4, 8, 2, 80))
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return tower.eval().requires_grad_(False)


def random_patches(grid: Grid, patch_dim: int, seed: int = 0) -> torch.Tensor:
    """Patches as preprocessing gives them: values in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed + 1000 * grid.height + grid.width)
    return torch.rand(grid.patches, patch_dim, generator=generator) * 2 - 1


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((ours.double() - reference.double()).norm() / reference.double().norm())
