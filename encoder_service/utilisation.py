"""How well the processor is used: matrix products of the pictures beside what a plain matrix product reaches here."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from encoder_service.device import Patches, embed
from encoder_service.towers.base import Tower

#: rows of the plain product, and how often it runs; the best run counts
ROWS, RUNS = 1024, 3


@dataclass(frozen=True)
class Work:
    """What a tower costs on this device.

    Attributes:
        per_patch: floating point operations of the matrix products for one patch, without attention's own, which
            grow with a picture's size: shares made from it are a little too low.
        gemm_rate: operations per second of a plain linear layer with the tower's largest weight.
    """

    per_patch: float
    gemm_rate: float

    def share(self, patches: float, seconds: float) -> float:
        """Share of the plain product's rate that forwards over so many patches reached."""
        return patches * self.per_patch / (seconds * self.gemm_rate) if seconds > 0 else 0.0


def measure_work(tower: Tower, picture: Patches) -> Work:
    """Counts the operations of one picture and times a plain product; call it in the device's thread.

    Args:
        tower: in evaluation mode.
        picture: any; its padding counts for what it is.
    """
    with FlopCounterMode(display=False) as counter:
        padding = embed(tower, [picture]).padding
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for name, count in counts.items() if str(name).split(".")[-1] in ("mm", "addmm"))
    weight = max((p for p in tower.parameters() if p.dim() == 2), key=torch.numel)
    return Work(products / (picture.grid.patches + padding), _gemm_rate(weight))


def _gemm_rate(weight: torch.Tensor) -> float:
    rows = torch.zeros(ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(RUNS):
            begin = time.perf_counter()
            F.linear(rows, weight)
            if weight.is_cuda:
                torch.cuda.synchronize(weight.device)
            best = min(best, time.perf_counter() - begin)
    return 2.0 * ROWS * weight.numel() / best
