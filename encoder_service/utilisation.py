"""How well the processor is used: matrix products of the pictures beside what a plain matrix product reaches here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from encoder_service.device import Patches, embed
from encoder_service.towers.base import Tower
from encoder_service.towers.int8 import Int8Linear
from encoder_service.towers.packed import PackedLinear

#: rows of the plain product, and how often it runs; the best run counts
ROWS, RUNS = 1024, 3


@dataclass(frozen=True)
class Work:
    """What a tower costs on this device.

    Attributes:
        per_patch: floating point operations of the linear layers for one patch, without attention's own, which
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
    layers = [layer for layer in tower.modules() if isinstance(layer, nn.Linear | PackedLinear | Int8Linear)]
    operations = 0.0

    def count(layer: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> None:
        nonlocal operations
        operations += 2.0 * inputs[0].numel() * layer.out_features

    hooks = [layer.register_forward_hook(count) for layer in layers]  # torch's own counter imports a compiler: 80 MB
    try:
        padding = embed(tower, [picture]).padding
    finally:
        for hook in hooks:
            hook.remove()
    largest = max(layers, key=lambda layer: layer.in_features * layer.out_features)
    return Work(operations / (picture.grid.patches + padding), _gemm_rate(largest, picture.values))


def _gemm_rate(layer: nn.Linear | PackedLinear | Int8Linear, values: torch.Tensor) -> float:
    """Of a layer's product; ``values`` give the dtype."""
    product: Callable[[torch.Tensor], torch.Tensor]
    if isinstance(layer, Int8Linear):
        rows = torch.zeros(ROWS, layer.in_features, dtype=torch.int8)
        product = partial(torch._int_mm, mat2=layer.weight)
    else:
        device = layer.weight.device if isinstance(layer, nn.Linear) else None
        rows, product = torch.zeros(ROWS, layer.in_features, dtype=values.dtype, device=device), layer
    best = float("inf")
    with torch.inference_mode():
        for _ in range(RUNS):
            begin = time.perf_counter()
            product(rows)
            if rows.is_cuda:
                torch.cuda.synchronize(rows.device)
            best = min(best, time.perf_counter() - begin)
    return 2.0 * ROWS * layer.in_features * layer.out_features / best
