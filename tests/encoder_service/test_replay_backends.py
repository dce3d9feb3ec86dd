"""Compiled and captured forwards against the tower as it is."""

from __future__ import annotations

import copy
import random
import shutil
import time
from collections.abc import Iterator

import pytest
import torch

from encoder_service.device import Patches, embed
from encoder_service.replay import Replay, make_backend, warm_up
from encoder_service.towers.base import Budget
from encoder_service.towers.isaac import IsaacTower
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches, relative_error
from tests.encoder_service.test_replay import SQUARES, random_batch, random_tower

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BUDGETS = (Budget(64, 4), Budget(128, 8))
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def compiled() -> Iterator[Replay]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    replay = Replay(random_tower(), BUDGETS, make_backend("compiled", CPU), depth=2)
    warm_up(replay, SQUARES)
    yield replay
    torch.set_num_threads(before)


@pytest.mark.slow
@needs_compiler
def test_compiled_equals_the_unpadded_forward_over_random_batches(compiled: Replay) -> None:
    """1e-6 relative to the eager bits, and no second compilation whatever the grids: one graph per budget."""
    assert compiled.static is not None
    compiled.static.poison()
    rng = random.Random(5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(1000):
            budget = rng.choice(BUDGETS)
            images = random_batch(rng, budget)
            result = compiled.embed(images, path=budget)
            assert result.budget == budget
            for image, values in zip(images, result.embeddings, strict=True):
                assert relative_error(values, embed(compiled.tower, [image]).embeddings[0]) < 1e-6


@pytest.mark.slow
@needs_compiler
def test_compiled_bits_do_not_depend_on_batch_or_budget(compiled: Replay) -> None:
    """V15."""
    images = [Patches(random_patches(grid, 48), grid) for grid in (Grid(4, 6), Grid(2, 8), Grid(4, 4), Grid(2, 2))]
    alone = [compiled.embed([image], path=BUDGETS[0]).embeddings[0] for image in images]
    for batch in (images, images[::-1], images * 2):
        for image, values in zip(batch, compiled.embed(batch, path=BUDGETS[1]).embeddings, strict=True):
            expected = next(kept for one, kept in zip(images, alone, strict=True) if one is image)
            assert torch.equal(values, expected)


def on_cuda(tower: IsaacTower, dtype: torch.dtype, budgets: tuple[Budget, ...] = BUDGETS) -> Replay:
    replay = Replay(copy.deepcopy(tower).to(CUDA, dtype), budgets, make_backend("cuda-graph", CUDA), depth=2)
    warm_up(replay, SQUARES)
    return replay


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_equals_eager(small_tower: IsaacTower, dtype: torch.dtype) -> None:
    """V1: all budgets captured, buffers poisoned, sizes in random order."""
    replay = on_cuda(small_tower, dtype)
    assert replay.static is not None
    replay.static.poison()
    rng = random.Random(6)
    for _ in range(200):
        budget = rng.choice(BUDGETS)
        images = [Patches(image.values.to(dtype), image.grid) for image in random_batch(rng, budget)]
        result = replay.embed(images, path=budget)
        for image, values in zip(images, result.embeddings, strict=True):
            assert values.isfinite().all()
            bound = 1e-5 if dtype is torch.float32 else 2e-2
            assert relative_error(values, embed(replay.tower, [image]).embeddings[0]) < bound


@pytest.mark.gpu
@needs_cuda
def test_captured_small_large_small_has_the_same_bits(small_tower: IsaacTower) -> None:
    """V1."""
    replay = on_cuda(small_tower, torch.bfloat16)
    small, large = (Patches(random_patches(grid, 48).bfloat16(), grid) for grid in (Grid(6, 8), Grid(10, 12)))
    first = replay.embed([small], path=BUDGETS[0]).embeddings[0]
    replay.embed([large], path=BUDGETS[1])
    assert torch.equal(replay.embed([small], path=BUDGETS[0]).embeddings[0], first)


@pytest.mark.gpu
@needs_cuda
def test_memory_is_flat_after_capture_and_capture_is_quick(small_tower: IsaacTower) -> None:
    """V4: five hundred batches of any size take nothing more."""
    begin = time.perf_counter()
    replay = on_cuda(small_tower, torch.bfloat16, (Budget(64, 4), Budget(256, 16), Budget(1024, 64)))
    assert time.perf_counter() - begin < 60
    rng, before = random.Random(7), torch.cuda.memory_reserved()
    for _ in range(500):
        images = [Patches(i.values.bfloat16(), i.grid) for i in random_batch(rng, Budget(256, 16))]
        replay.embed(images, path=Budget(1024, 64))
    assert torch.cuda.memory_reserved() == before


@pytest.mark.gpu
@needs_cuda
def test_staging_during_a_replay_changes_nothing(small_tower: IsaacTower) -> None:
    replay = on_cuda(small_tower, torch.bfloat16)
    images = [Patches(random_patches(Grid(6, 8), 48, seed).bfloat16(), Grid(6, 8)) for seed in range(20)]
    expected = [replay.embed([image], path=BUDGETS[0]).embeddings[0] for image in images]
    staged = replay.stage([images[0]], path=BUDGETS[0])
    for number, image in enumerate(images[1:], 1):
        following = replay.stage([image], path=BUDGETS[0])
        assert torch.equal(replay.launch(staged).embeddings[0], expected[number - 1])
        staged = following
    assert torch.equal(replay.launch(staged).embeddings[0], expected[-1])
