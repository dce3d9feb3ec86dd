"""Warm-up: every budget compiled or captured, and both paths timed, before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import psutil
import torch

from encoder_service.device import Patches
from encoder_service.replay.runner import Replay
from encoder_service.towers.base import Budget, Tower
from shared.sizing import Grid

#: patches of an image of warm-up, at most: about what one of 512×512 pixels has
USUAL_PATCHES = 1024


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


def warm_up(replay: Replay, done: Callable[[Capture], None] | None = None) -> list[Capture]:
    """Prepares all budgets, the largest first: memory that it needed serves the smaller ones.

    Args:
        replay: what to warm up.
        done: told after each budget.
    """
    captures = []
    for budget in reversed(replay.budgets):
        images = full_batch(replay.tower, budget)
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


def full_batch(tower: Tower, budget: Budget) -> list[Patches]:
    """Square images of a usual size that fill the budget as well as such can."""
    side = max(isqrt(min(budget.patches, USUAL_PATCHES)) // tower.merge, 1) * tower.merge
    grid = Grid(side, side)
    dtype = next(tower.parameters()).dtype
    count = min(budget.patches // grid.patches, budget.images)
    generator = torch.Generator().manual_seed(0)
    values = (torch.rand(grid.patches, tower.patch_dim, generator=generator) * 2 - 1).to(dtype)
    return [Patches(values, grid)] * count


def _memory(replay: Replay) -> int:
    device = next(replay.tower.parameters()).device
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss)
