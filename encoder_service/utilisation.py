"""How well the processor is used: matrix products of the pictures beside what a plain matrix product reaches here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from encoder_service.device import Patches, embed
from encoder_service.towers.base import Tower
from encoder_service.towers.int8 import Int8Linear

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
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._int_mm: _product_operations}) as counter:
        padding = embed(tower, [picture]).padding
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for name, count in counts.items() if str(name).split(".")[-1] in ("mm", "addmm", "_int_mm"))
    weights = [layer.weight for layer in tower.modules() if isinstance(layer, Int8Linear)]
    weights = weights or [parameter for parameter in tower.parameters() if parameter.dim() == 2]
    return Work(products / (picture.grid.patches + padding), _gemm_rate(max(weights, key=torch.numel)))


def _product_operations(a: Sequence[int], b: Sequence[int], **_: object) -> int:
    """Of a product of these shapes; torch's counter knows floating-point ones only."""
    return 2 * a[0] * a[1] * b[1]


def _gemm_rate(weight: torch.Tensor) -> float:
    """Of a weight ``[out, in]``, or ``[in, out]`` in 8 bits."""
    eight_bit = weight.dtype == torch.int8
    rows = torch.zeros(ROWS, weight.shape[0 if eight_bit else 1], dtype=weight.dtype, device=weight.device)
    product = torch._int_mm if eight_bit else F.linear
    best = float("inf")
    with torch.inference_mode():
        for _ in range(RUNS):
            begin = time.perf_counter()
            product(rows, weight)
            if weight.is_cuda:
                torch.cuda.synchronize(weight.device)
            best = min(best, time.perf_counter() - begin)
    return 2.0 * ROWS * weight.numel() / best
