"""V15: an image's embedding has the same bits alone and in any company: the cache does not depend on who was there."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from encoder_service.device import Patches, embed
from encoder_service.towers.isaac import IsaacTower
from encoder_service.towers.packed import pack_weights
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches

GRIDS = [Grid(8, 8), Grid(2, 2), Grid(2, 34), Grid(16, 14), Grid(8, 8), Grid(4, 6), Grid(30, 22), Grid(6, 6)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_and_in_random_batches(small_tower: IsaacTower, dtype: torch.dtype, packed: bool, threads: int) -> None:
    tower = copy.deepcopy(small_tower).to(dtype)
    if packed:
        pack_weights(tower)
    images = [Patches(random_patches(grid, 48, seed).to(dtype), grid) for seed, grid in enumerate(GRIDS)]
    alone = [embed(tower, [image]).embeddings[0] for image in images]
    shuffled = random.Random(7)
    for size in (2, 3, 5, 8, 8):
        chosen = shuffled.sample(range(len(images)), size)
        for number, values in zip(chosen, embed(tower, [images[i] for i in chosen]).embeddings, strict=True):
            assert torch.equal(values, alone[number]), (chosen, number)


def test_copies_in_one_batch(small_tower: IsaacTower, threads: int) -> None:
    """Equal sizes take the batched call; alone takes the single one."""
    image = Patches(random_patches(Grid(8, 8), 48), Grid(8, 8))
    (alone,) = embed(small_tower, [image]).embeddings
    assert all(torch.equal(values, alone) for values in embed(small_tower, [image] * 8).embeddings)


def test_small_then_large_then_small(small_tower: IsaacTower) -> None:
    """V1: nothing of a former forward stays behind."""
    small, large = (Patches(random_patches(grid, 48), grid) for grid in (Grid(2, 2), Grid(30, 22)))
    first = embed(small_tower, [small]).embeddings[0].clone()
    embed(small_tower, [large])
    assert torch.equal(embed(small_tower, [small]).embeddings[0], first)
