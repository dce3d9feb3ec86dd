"""The Pixtral tower by itself: what it refuses, what it keeps, and that it is one graph."""

from __future__ import annotations

import shutil

import pytest
import torch

from encoder_service.towers.base import Budget, GridError
from encoder_service.towers.grid_cache import GridCache
from encoder_service.towers.pixtral import PixtralTower, PixtralTowerConfig
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches


@pytest.fixture(scope="module")
def tower() -> PixtralTower:
    """Random weights of a size at which every kernel is of the usual kind."""
    torch.manual_seed(0)
    config = PixtralTowerConfig(
        width=96, features=(2,), heads=3, hidden=160, patch_size=4, merge=2, output_width=80,
        projector_norm_eps=1e-5, merger=True,
    )  # fmt: skip
    built = PixtralTower(config)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return built.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("grids", "budget", "words"),
    [
        ([Grid(3, 4)], None, "3x4 .* merge factor 2"),
        ([Grid(0, 4)], None, "0x4 is empty"),
        ([Grid(4, 4)], Budget(12, 1), "1 images with 16 patches exceed .* 12 patches"),
        ([Grid(2, 2)], Budget(10, 1), "10 patches is not divisible by 4"),
    ],
)
def test_grids_that_cannot_be_are_refused(
    tower: PixtralTower, grids: list[Grid], budget: Budget | None, words: str
) -> None:
    with pytest.raises(GridError, match=words):
        tower.plan(grids, budget)


@torch.inference_mode()
def test_no_image_at_all(tower: PixtralTower) -> None:
    assert tower(torch.empty(0, 48), tower.plan([])).shape == (0, 80)
    assert tower(torch.zeros(16, 48), tower.plan([], Budget(16, 2))).shape == (4, 80)


@torch.inference_mode()
def test_an_image_has_the_same_bits_in_any_batch(tower: PixtralTower) -> None:
    """V15: alone, among others, and in a padded batch."""
    grids = [Grid(8, 12), Grid(16, 4), Grid(8, 12), Grid(20, 20)]
    patches = [random_patches(grid, 48, seed) for seed, grid in enumerate(grids)]
    together = tower(torch.cat(patches), tower.plan(grids)).split([grid.patches // 4 for grid in grids])
    for grid, values, batched in zip(grids, patches, together, strict=True):
        assert torch.equal(tower(values, tower.plan([grid])), batched)


def test_rotary_tables_are_made_once_and_bounded() -> None:
    made: list[Grid] = []

    def make(grid: Grid) -> tuple[torch.Tensor, ...]:
        made.append(grid)
        return torch.zeros(grid.patches), torch.zeros(grid.patches)

    cache = GridCache(most=2 * 4 * 40)
    first = cache.get(Grid(4, 5), make)
    assert cache.get(Grid(4, 5), make) is first
    cache.get(Grid(2, 5), make)
    cache.get(Grid(4, 5), make)  # newest again, so the other one goes first
    cache.get(Grid(3, 5), make)
    assert cache.get(Grid(4, 5), make) is first
    assert made == [Grid(4, 5), Grid(2, 5), Grid(3, 5)]
    assert cache.nbytes <= 320
    cache.get(Grid(100, 100), make)
    assert len(cache) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@torch.inference_mode()
def test_one_graph_for_the_compiler(tower: PixtralTower) -> None:
    """M8, V7: compiled and eager agree, rotation included, and nothing in forward breaks the graph."""
    compiled = torch.compile(tower, fullgraph=True, dynamic=False)
    for grids in ([Grid(8, 8)], [Grid(4, 4), Grid(8, 12)], [Grid(2, 2)] * 4):
        plan = tower.plan(grids, Budget(128, 4))
        patches = torch.zeros(128, 48)
        used = sum(grid.patches for grid in grids)
        patches[:used] = torch.cat([random_patches(grid, 48) for grid in grids])
        tokens = sum(plan.tokens)
        torch.testing.assert_close(
            compiled(patches, plan)[:tokens], tower(patches, plan)[:tokens], atol=1e-4, rtol=1e-4
        )
