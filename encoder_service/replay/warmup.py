"""Warm-up: every budget compiled or captured, and both paths timed, before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from encoder_service.device import Patches
from encoder_service.replay.runner import Replay
from encoder_service.towers.base import Budget, Tower
from shared.errors import ConfigError
from shared.sizing import Grid, SizeRule

#: pixels; sides of the pictures of warm-up, by preference
USUAL_SIDES = (512, 256, 128, 64, 32, 1)


@dataclass(frozen=True)
class Capture:
    """What one budget took.

    Attributes:
        budget: which.
        seconds: of compilation or capture, first run included.
        bytes: by which memory grew: of the device, or of the process on CPU.
        replay_seconds, eager_seconds: of one full batch on either path.
    """

    budget: Budget
    seconds: float
    bytes: int
    replay_seconds: float
    eager_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.budget.patches} patches, {self.budget.images} images: ready in {self.seconds:.2f} s, "
            f"{self.bytes / 1e6:+.1f} MB; replay {self.replay_seconds * 1e3:.1f} ms, "
            f"eager {self.eager_seconds * 1e3:.1f} ms"
        )


def warm_up(replay: Replay, grids: Sequence[Grid], done: Callable[[Capture], None] | None = None) -> list[Capture]:
    """Prepares all budgets, the largest first: memory that it needed serves the smaller ones.

    Args:
        replay: what to warm up.
        grids: that pictures of this family have, the preferred first.
        done: told after each budget.

    Raises:
        ConfigError: none of the grids fits a budget.
    """
    captures = []
    for budget in reversed(replay.budgets):
        images = full_batch(replay.tower, budget, grids)
        before, begin = _memory(replay), time.perf_counter()
        replay.prepare(budget, images)
        seconds, grown = time.perf_counter() - begin, _memory(replay) - before
        replayed = replay.embed(images, path=budget).seconds
        eager = replay.embed(images, path=None).seconds
        capture = Capture(budget, seconds, grown, replayed, eager)
        captures.append(capture)
        if done is not None:
            done(capture)
    return captures


def usual_grids(rule: SizeRule) -> list[Grid]:
    """Of square pictures, the most usual size first, then smaller ones for budgets that do not take it."""
    return [rule.grid(side, side) for side in USUAL_SIDES]


def full_batch(tower: Tower, budget: Budget, grids: Sequence[Grid]) -> list[Patches]:
    """Images of the first grid that fits, as many as the budget takes.

    Raises:
        ConfigError: none fits.
    """
    grid = next((grid for grid in grids if grid.patches <= budget.patches), None)
    if grid is None:
        smallest = min(grid.patches for grid in grids)
        raise ConfigError(f"a replay budget of {budget.patches} patches takes no picture: they have {smallest} or more")
    dtype = next(tower.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    values = (torch.rand(grid.patches, tower.patch_dim, generator=generator) * 2 - 1).to(dtype)
    return [Patches(values, grid)] * min(budget.patches // grid.patches, budget.images)


def _memory(replay: Replay) -> int:
    device = next(replay.tower.parameters()).device
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss)
