"""Linear layers for CPUs, whose weights oneDNN lays out once for its kernels instead of at every product.

A product with a plain weight has to read it in an order that no kernel likes. What it gains stands in
``benchmarks/RESULTS.md``.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from encoder_service.towers.base import Tower
from encoder_service.towers.layers import ACTIVATIONS, FeedForward

#: what oneDNN calls the activations that it can apply while a product is still in registers, and their algorithm
FUSED = {
    ACTIVATIONS["gelu_pytorch_tanh"]: ("gelu", "tanh"),
    ACTIVATIONS["gelu"]: ("gelu", "none"),
    ACTIVATIONS["silu"]: ("swish", ""),
}


class PackedLinear(nn.Module):
    """``activation(x @ weight.T + bias)`` on a CPU.

    Args:
        linear: the layer to take over.
        activation: of :data:`FUSED`'s values; none by default.
    """

    def __init__(self, linear: nn.Linear, activation: tuple[str, str] = ("none", "")) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.activation, self.algorithm = activation
        # no buffer: its layout is oneDNN's own, which neither a state dict nor another device can take
        self.weight: Any = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, in_features]`` → ``[…, out_features]`` in the dtype of ``x``."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.activation, [], self.algorithm
        )
        return out


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor's oneDNN multiplies in ``dtype``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def pack_weights(tower: Tower) -> None:
    """Replaces the tower's linear layers on a CPU that can, and joins those before an activation with it.

    Layers go one by one, so that memory never holds both towers. Those that are in 8 bits already are left alone.
    """
    for name in [name for name, _ in tower.named_modules()]:  # names: a list of layers would keep every plain weight
        module = tower.get_submodule(name)
        if isinstance(module, FeedForward) and module.activation in FUSED and _packable(module.up):
            module.up = PackedLinear(module.up, FUSED[module.activation])
            module.activation = nn.Identity()
        elif _packable(module):
            parent, _, child = name.rpartition(".")
            setattr(tower.get_submodule(parent), child, PackedLinear(module))


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and module.weight.device.type == "cpu" and can_pack(module.weight.dtype)
