"""Every family's tower through fixed sizes: its plans have shapes of the budget alone, its forward is one graph."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from encoder_service.device import Patches, embed
from encoder_service.replay import Replay, make_backend, warm_up
from encoder_service.towers.base import Budget, Tower
from encoder_service.towers.pixtral import PixtralTower, PixtralTowerConfig
from encoder_service.towers.radio import RadioTower, RadioTowerConfig
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches, relative_error
from tests.encoder_service.test_replay import CPU, SQUARES

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGETS = (Budget(64, 4), Budget(160, 10))
TILES = (Grid(8, 4), Grid(4, 4))


def tower(name: str) -> Tower:
    torch.manual_seed(2)
    made: Tower
    if name == "pixtral":
        made = PixtralTower(PixtralTowerConfig(64, (2,), 4, 96, 4, 2, 40, merger=True, projector_norm_eps=1e-5))
    elif name == "radio tiles":
        made = RadioTower(RadioTowerConfig(64, 2, 4, 96, 4, 8, merge=2, tile=4, columns_first=True))
    else:
        made = RadioTower(RadioTowerConfig(64, 2, 4, 96, 4, 8, class_tokens=2, registers=3, merge=2, qk_norm=True))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return made.eval().requires_grad_(False)


def batch(name: str, rng: random.Random, budget: Budget, patch_dim: int) -> list[Patches]:
    images, room = [], budget.patches
    for _ in range(rng.randint(1, budget.images)):
        grid = rng.choice(TILES) if name == "radio tiles" else Grid(2 * rng.randint(1, 5), 2 * rng.randint(1, 5))
        if grid.patches <= room:
            images.append(Patches(random_patches(grid, patch_dim, rng.randrange(10**6)), grid))
            room -= grid.patches
    return images or [Patches(random_patches(Grid(4, 4), patch_dim), Grid(4, 4))]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["pixtral", "radio", "radio tiles"])
def test_random_batches_equal_the_unpadded_forward(name: str, depth: int) -> None:
    """V1, V13, V15: bit for bit, with NaN in every buffer first."""
    made = tower(name)
    replay = Replay(made, BUDGETS, make_backend("eager", CPU), depth=depth)
    warm_up(replay, TILES if name == "radio tiles" else SQUARES)
    assert replay.static is not None
    replay.static.poison()
    rng = random.Random(10)
    for number in range(100):
        budget = rng.choice(BUDGETS)
        images = batch(name, rng, budget, made.patch_dim)
        for image, values in zip(images, replay.embed(images, path=budget).embeddings, strict=True):
            assert torch.equal(values, embed(made, [image]).embeddings[0]), (number, image.grid)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["pixtral", "radio"])
def test_compiled_once_for_all_grids(name: str) -> None:
    made, budget = tower(name), BUDGETS[0]
    replay = Replay(made, [budget], make_backend("compiled", CPU))
    warm_up(replay, SQUARES)
    rng = random.Random(11)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(50):
            images = batch(name, rng, budget, made.patch_dim)
            for image, values in zip(images, replay.embed(images, path=budget).embeddings, strict=True):
                assert relative_error(values, embed(made, [image]).embeddings[0]) < 1e-6
