"""Eight-bit linear layers: weights scaled per output channel, activations per row, as they come.

The product is exact integer arithmetic and every row has a scale of its own, so a row's bits depend on nothing but
the row. What it gains stands in ``benchmarks/RESULTS.md``.
"""

from __future__ import annotations

import torch
from torch import nn

from encoder_service.towers.base import Tower

#: raise when the arithmetic below changes the bits of an embedding
INT8_VERSION = 1
#: rows quantised, multiplied and scaled back at a time, so that what lies between stays in the processor's cache
BLOCK_ROWS = 256
#: the largest magnitude; -128 is left unused, so that signs are symmetric
LEVELS = 127
#: a row of zeros has some scale too
SMALLEST = 1e-30


class Int8Linear(nn.Module):
    """``x @ weight.T + bias`` in 8 bits.

    Args:
        linear: the layer to take over.

    Attributes:
        weight: int8 ``[in_features, out_features]``, transposed in memory.
        scale: float32 ``[out_features]``, the value of one step of ``weight``.
        bias: float32 ``[out_features]``, zeros where the layer had none.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        steps, scale = quantised(linear.weight.detach().float())
        bias = torch.zeros(self.out_features) if linear.bias is None else linear.bias.detach().float()
        self.register_buffer("weight", steps.T)
        self.register_buffer("scale", scale.flatten())
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, in_features]`` → ``[…, out_features]`` in the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        out = x.new_empty(rows.shape[0], self.out_features)
        for source, target in zip(torch.split(rows, BLOCK_ROWS), torch.split(out, BLOCK_ROWS), strict=True):
            steps, scale = quantised(source.float())
            product = torch._int_mm(steps, self.weight).float().mul_(scale)
            target.copy_(torch.addcmul(self.bias, product, self.scale))
        return out.view(*x.shape[:-1], self.out_features)


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[rows, n]`` as int8 steps ``[rows, n]`` and the value of a step, float32 ``[rows, 1]``."""
    scale = rows.abs().amax(1, keepdim=True).div_(LEVELS).clamp_(min=SMALLEST)
    return (rows / scale).round_().to(torch.int8), scale


def to_int8(tower: Tower) -> None:
    """Replaces the tower's linear layers, except the outer ones: they are cheap, and the first to lose detail.

    Layers go one by one, so that memory never holds both towers.
    """
    for name in [name for name, _ in tower.named_modules()]:  # names: a list of layers would keep every plain weight
        module = tower.get_submodule(name)
        if isinstance(module, nn.Linear) and name not in tower.outer_layers:
            parent, _, child = name.rpartition(".")
            setattr(tower.get_submodule(parent), child, Int8Linear(module))
