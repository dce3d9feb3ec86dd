"""Replay over shared static buffers: nothing stale, nothing of the padding, right rows to the right image."""

from __future__ import annotations

import copy
import random
import subprocess
import sys

import pytest
import torch

from encoder_service.device import Patches, embed, smallest_batch
from encoder_service.replay import Replay, make_backend, warm_up
from encoder_service.replay.budgets import smallest_fit
from encoder_service.replay.warmup import full_batch
from encoder_service.towers.base import Budget, GridError
from encoder_service.towers.isaac import IsaacTower, IsaacTowerConfig
from shared.errors import ConfigError
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SQUARES = tuple(Grid(side, side) for side in (32, 16, 8, 4, 2))
BUDGETS = (Budget(64, 4), Budget(128, 8), Budget(320, 8))


def random_tower() -> IsaacTower:
    """Smaller than ``small_tower``, for a thousand batches."""
    torch.manual_seed(1)
    tower = IsaacTower(IsaacTowerConfig(32, 2, 2, 64, 4, 8, 2, 40))
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return tower.eval().requires_grad_(False)


def random_batch(rng: random.Random, budget: Budget) -> list[Patches]:
    """Images of any shape that fit the budget together, one at least."""
    images: list[Patches] = []
    room = budget.patches
    for _ in range(rng.randint(1, budget.images)):
        height = 2 * rng.randint(1, 6)
        width = 2 * rng.randint(1, 6)
        if height * width <= room:
            images.append(Patches(random_patches(Grid(height, width), 48, rng.randrange(10**6)), Grid(height, width)))
            room -= height * width
    return images or [Patches(random_patches(Grid(2, 2), 48), Grid(2, 2))]


def ready(tower: IsaacTower, *, depth: int = 1, budgets: tuple[Budget, ...] = BUDGETS) -> Replay:
    replay = Replay(tower, budgets, make_backend("eager", CPU), depth=depth)
    warm_up(replay, SQUARES)
    return replay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_thousand_random_batches_equal_the_unpadded_forward(dtype: torch.dtype, depth: int) -> None:
    """V1, V6, V15: the eager backend gives every image the bits that it has alone, in any batch and budget."""
    tower = random_tower().to(dtype)
    replay = ready(tower, depth=depth)
    assert replay.static is not None
    replay.static.poison()
    rng = random.Random(4)
    for number in range(250):  # × 4 parameters
        budget = rng.choice(BUDGETS)
        images = [Patches(image.values.to(dtype), image.grid) for image in random_batch(rng, budget)]
        used = sum(image.grid.patches for image in images)
        result = replay.embed(images, path=budget)
        assert (result.budget, result.padding) == (budget, budget.patches - used)
        for image, values in zip(images, result.embeddings, strict=True):
            assert torch.equal(values, embed(tower, [image]).embeddings[0]), (number, image.grid)


def test_small_large_small_and_one_above_an_edge(small_tower: IsaacTower) -> None:
    """V1: 1,196 tokens in a bucket of 2,048, between small ones, gave NaN elsewhere."""
    replay = ready(small_tower)
    small, large, edge = (Patches(random_patches(grid, 48), grid) for grid in (Grid(8, 8), Grid(16, 18), Grid(6, 22)))
    first = replay.embed([small], path=BUDGETS[0]).embeddings[0]
    middle = replay.embed([large], path=BUDGETS[2]).embeddings[0]
    above = replay.embed([edge], path=smallest_fit(BUDGETS, edge.grid.patches, 1)).embeddings[0]
    assert torch.equal(replay.embed([small], path=BUDGETS[0]).embeddings[0], first)
    assert torch.equal(replay.embed([small], path=BUDGETS[1]).embeddings[0], first)
    for image, values in ((small, first), (large, middle), (edge, above)):
        assert values.isfinite().all()
        assert torch.equal(values, embed(small_tower, [image]).embeddings[0])


def test_an_embedding_does_not_change_when_the_buffers_are_used_again(small_tower: IsaacTower) -> None:
    replay = ready(small_tower)
    image = Patches(random_patches(Grid(8, 8), 48), Grid(8, 8))
    values = replay.embed([image], path=BUDGETS[0]).embeddings[0]
    kept = values.clone()
    assert replay.static is not None
    replay.embed([Patches(random_patches(Grid(8, 8), 48, 7), Grid(8, 8))], path=BUDGETS[0])
    replay.static.poison()
    assert torch.equal(values, kept)


def test_a_batch_is_staged_while_another_waits_for_the_device(small_tower: IsaacTower) -> None:
    """Double buffering: what is staged last does not reach what was staged first."""
    replay = ready(small_tower, depth=2)
    images = [Patches(random_patches(Grid(8, 8), 48, seed), Grid(8, 8)) for seed in range(3)]
    first, second = (replay.stage([image], path=BUDGETS[0]) for image in images[:2])
    results = [replay.launch(first)]
    third = replay.stage([images[2]], path=BUDGETS[0])
    results += [replay.launch(second), replay.launch(third)]
    for image, result in zip(images, results, strict=True):
        assert torch.equal(result.embeddings[0], embed(small_tower, [image]).embeddings[0])


def test_a_batch_that_fails_gives_its_slot_back(small_tower: IsaacTower) -> None:
    replay = ready(small_tower)
    bad = Patches(torch.zeros(5, 47), Grid(2, 2))
    for _ in range(3):
        with pytest.raises(GridError, match="not 4 patches of 48 values"):
            replay.embed([bad], path=BUDGETS[0])
        with pytest.raises(GridError, match="exceed the budget"):
            replay.embed([Patches(random_patches(Grid(10, 10), 48), Grid(10, 10))], path=BUDGETS[0])
        replay.abandon(replay.stage([Patches(random_patches(Grid(2, 2), 48), Grid(2, 2))], path=BUDGETS[0]))
    image = Patches(random_patches(Grid(2, 2), 48), Grid(2, 2))
    assert torch.equal(replay.embed([image]).embeddings[0], embed(small_tower, [image]).embeddings[0])


def test_what_fits_no_budget_goes_the_eager_way(small_tower: IsaacTower) -> None:
    """V4."""
    replay = ready(small_tower)
    image = Patches(random_patches(Grid(20, 18), 48), Grid(20, 18))
    result = replay.embed([image])
    assert result.budget is None
    assert torch.equal(result.embeddings[0], embed(small_tower, [image]).embeddings[0])


def test_five_hundred_sizes_take_no_more_memory_than_one(small_tower: IsaacTower) -> None:
    """V4: programs and buffers are bounded by the budgets, whatever sizes come."""
    replay = ready(small_tower)
    assert replay.static is not None
    before, addresses = replay.static.nbytes, {a.data_ptr() for a in replay.static.inputs(BUDGETS[2]).arrays()}
    sizes = {Grid(2 * h, 2 * w) for h in range(1, 40) for w in range(1, 40) if 4 * h * w <= 320}
    for grid in sorted(sizes)[:500]:
        replay.embed([Patches(random_patches(grid, 48), grid)], path=BUDGETS[2])
    assert replay.static.nbytes == before
    assert {a.data_ptr() for a in replay.static.inputs(BUDGETS[2]).arrays()} == addresses
    assert len(replay._programs) == len(BUDGETS)


def test_all_budgets_share_their_buffers(small_tower: IsaacTower) -> None:
    replay = ready(small_tower)
    assert replay.static is not None
    of_budgets = [[a.data_ptr() for a in replay.static.inputs(budget).arrays()] for budget in BUDGETS]
    assert of_budgets[0] == of_budgets[1] == of_budgets[2]
    alone = Replay(small_tower, BUDGETS[2:], make_backend("eager", CPU)).static
    assert alone is not None
    assert replay.static.nbytes == alone.nbytes


def test_weights_and_buffers_in_half_precision_have_one_dtype(small_tower: IsaacTower) -> None:
    replay = ready(copy.deepcopy(small_tower).to(torch.float16))
    assert replay.static is not None
    assert replay.static.inputs(BUDGETS[0]).patches.dtype is replay.static.outputs.dtype is torch.float16


def test_warm_up_measures_both_ways_of_every_budget(small_tower: IsaacTower) -> None:
    replay = Replay(small_tower, BUDGETS, make_backend("eager", CPU))
    told: list[Budget] = []
    captures = warm_up(replay, SQUARES, lambda capture: told.append(capture.budget))
    assert told == [capture.budget for capture in captures] == list(reversed(BUDGETS))
    for capture in captures:
        assert min(capture.seconds, capture.replay_seconds, capture.eager_seconds) > 0
        assert "replay" in str(capture)
        assert replay.costs.of(capture.budget).replay
        assert replay.costs.of(capture.budget).eager


def test_images_of_warm_up_fit(small_tower: IsaacTower) -> None:
    for budget in (Budget(4, 1), Budget(60, 15), Budget(1024, 1), Budget(5000, 8)):
        images = full_batch(small_tower, budget, SQUARES)
        assert sum(image.grid.patches for image in images) <= budget.patches
        assert 1 <= len(images) <= budget.images


def test_a_budget_that_takes_no_picture_is_refused(small_tower: IsaacTower) -> None:
    with pytest.raises(ConfigError, match="64 patches takes no picture: they have 256 or more"):
        full_batch(small_tower, BUDGETS[0], [Grid(32, 32), Grid(16, 16)])


def test_cuda_graphs_need_cuda() -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        make_backend("cuda-graph", CPU)


def test_the_smallest_batch_is_that_of_the_eager_way(small_tower: IsaacTower) -> None:
    assert smallest_batch(small_tower) == 32
    assert embed(small_tower, [Patches(random_patches(Grid(2, 2), 48), Grid(2, 2))]).padding == 28


def test_an_encoder_process_does_not_load_the_compiler() -> None:
    """70 MB in every replica, and seconds of its start."""
    code = "import sys, encoder_service.deployment, encoder_service.engine; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
