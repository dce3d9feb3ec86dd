"""Pixtral: a vision transformer with 2-D rotary positions, an optional patch merger and a two-layer projector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from encoder_service.towers.base import Budget, Plan, Tower, check_grids, fitted_budget, sequence_bounds
from encoder_service.towers.grid_cache import GridCache
from encoder_service.towers.layers import ACTIVATIONS, merge_index, packed_attention
from shared.sizing import Grid

#: rotary tables kept per tower, in bytes; the largest image of Mistral-Small-3.1 (110×110 patches) has 3.1 MB
ROTARY_CACHE_BYTES = 64 << 20
#: epsilon of every RMSNorm inside the tower
NORM_EPS = 1e-5


@dataclass(frozen=True)
class PixtralTowerConfig:
    """Sizes of a Pixtral tower and of what stands between it and the language model.

    Attributes:
        width: channels of the tower.
        features: after how many blocks the rows are taken that go to the projector, side by side; 0 is before the
            first block. The tower has as many blocks as the largest of them.
        heads: attention heads.
        hidden: inner width of the gated feed-forward.
        patch_size: side of a square patch, pixels.
        merge: side of the block of patches that becomes one token.
        output_width: hidden size of the language model.
        rope_theta: base of the rotary frequencies.
        activation: of the gate, by its name in ``config.json``.
        projector_norm_eps: epsilon of the RMSNorm before the projector; None without that norm.
        merger: whether each block of patches goes through a linear layer; without, ``merge`` is 1.
        projector_bias: whether the projector's two linear layers have biases.
        projector_activation: between them.
        stored_layers: blocks in the checkpoint; those that no feature needs are not read.
    """

    width: int
    features: tuple[int, ...]
    heads: int
    hidden: int
    patch_size: int
    merge: int
    output_width: int
    rope_theta: float = 10000.0
    activation: str = "silu"
    projector_norm_eps: float | None = None
    merger: bool = False
    projector_bias: bool = True
    projector_activation: str = "gelu"
    stored_layers: int = field(default=0, repr=False, compare=False)

    @property
    def layers(self) -> int:
        """Blocks that are built."""
        return max(self.features)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (i, i + head_dim / 2) of every head, in float32 whatever the dtype.

    Args:
        x: ``[P, heads, head_dim]``.
        cos, sin: float32 ``[P, head_dim / 2]``.

    Returns:
        ``[P, heads, head_dim]`` in the dtype of ``x``.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    return torch.cat(turned, dim=-1)


class RotarySelfAttention(nn.Module):
    """Multi-head self-attention over packed sequences with rotated queries and keys, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        """``[P, width]`` → ``[P, width]``."""
        heads = self.qkv(x).view(x.shape[0], 3 * self.heads, self.head_dim)
        q, k, v = heads.chunk(3, dim=1)
        q, k = (rotate(x, plan.extras["cos"], plan.extras["sin"]) for x in (q, k))  # by turns: float32 is large
        attended = packed_attention(q, k, v, plan.cu_seqlens, plan.max_seqlen)
        return self.out(attended.reshape(x.shape))


class GatedFeedForward(nn.Module):
    """``down(activation(gate(x)) · up(x))`` without biases; gate and up are one product."""

    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[P, width]`` → ``[P, width]``."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class PixtralBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: PixtralTowerConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.attention = RotarySelfAttention(config.width, config.heads)
        self.norm2 = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.mlp = GatedFeedForward(config.width, config.hidden, config.activation)

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        """``[P, width]`` → ``[P, width]``."""
        x = x + self.attention(self.norm1(x), plan)
        return x + self.mlp(self.norm2(x))


class PixtralTower(Tower):
    """Patches ``[P, 3 · patch_size²]`` as (channel, row, column) → embeddings ``[P / merge², output_width]``."""

    outer_layers = frozenset({"project_out"})

    def __init__(self, config: PixtralTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.output_width
        self.merge = config.merge
        self.patch_dim = 3 * config.patch_size**2
        selected = config.width * len(config.features)
        # as the convolution that it is in the checkpoint; its patches do not overlap, so it is one product
        self.patch_weight = nn.Parameter(torch.zeros(config.width, 3, config.patch_size, config.patch_size))
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.blocks = nn.ModuleList(PixtralBlock(config) for _ in range(config.layers))
        self.projector_norm = (
            None if config.projector_norm_eps is None else nn.RMSNorm(selected, eps=config.projector_norm_eps)
        )
        self.merger = nn.Linear(selected * config.merge**2, selected, bias=False) if config.merger else None
        self.project_in = nn.Linear(selected, config.output_width, bias=config.projector_bias)
        self.project_out = nn.Linear(config.output_width, config.output_width, bias=config.projector_bias)
        self.projector_activation = ACTIVATIONS[config.projector_activation]
        self._rotary = GridCache(ROTARY_CACHE_BYTES)

    def rotary(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of an image's patches, float32 ``[grid.patches, head_dim / 2]`` each.

        Even frequencies turn with the patch's row and stand first, odd ones with its column.
        """
        head_dim = self.config.width // self.config.heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / self.config.rope_theta**exponents
        rows = torch.arange(grid.height, device="cpu").float().outer(frequencies[0::2])
        columns = torch.arange(grid.width, device="cpu").float().outer(frequencies[1::2])
        angles = torch.cat(
            [rows[:, None].expand(-1, grid.width, -1), columns[None].expand(grid.height, -1, -1)], dim=-1
        ).flatten(0, 1)
        return angles.cos(), angles.sin()

    def plan(self, grids: Sequence[Grid], budget: Budget | None = None) -> Plan:
        """See :meth:`Tower.plan`; extras: ``cos``, ``sin [P, head_dim / 2]``, with a merger ``merge_index``."""
        check_grids(grids, self.merge)
        size = fitted_budget(grids, self.merge, budget)
        tables = [self._rotary.get(grid, self.rotary) for grid in grids]
        lengths = [grid.patches for grid in grids]
        extras = {}
        for place, name in enumerate(("cos", "sin")):
            extras[name] = torch.zeros(size.patches, self.config.width // self.config.heads // 2)
            if tables:
                torch.cat([pair[place] for pair in tables], out=extras[name][: sum(lengths)])
        if self.merger is not None:
            extras["merge_index"] = merge_index(grids, self.merge, size.patches // self.merge**2)
        return Plan(
            cu_seqlens=sequence_bounds(lengths, size.images),
            max_seqlen=max(lengths, default=0) if budget is None else size.patches,
            extras=extras,
            tokens=[grid.patches // self.merge**2 for grid in grids],
        )

    def features(self, patches: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The tower without its projector: ``[P, width · number of features]``. There is no final norm."""
        x = self.norm(F.linear(patches, self.patch_weight.flatten(1)))
        states = {0: x}
        for number, block in enumerate(self.blocks, 1):
            x = block(x, plan)
            if number in self.config.features:
                states[number] = x
        taken = [states[number] for number in self.config.features]
        return torch.cat(taken, dim=-1) if len(taken) > 1 else taken[0]

    def forward(self, patches: torch.Tensor, plan: Plan) -> torch.Tensor:
        """See :meth:`Tower.forward`."""
        x = self.features(patches, plan)
        if self.projector_norm is not None:
            x = self.projector_norm(x)
        if self.merger is not None:
            # [tokens, merge², width] → channel-major, the order in which torch's unfold puts a block
            x = self.merger(x[plan.extras["merge_index"]].transpose(1, 2).flatten(1))
        return self.project_out(self.projector_activation(self.project_in(x)))
