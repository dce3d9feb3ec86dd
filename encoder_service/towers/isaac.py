"""Isaac: a SigLIP2 NaFlex tower with pixel shuffle and a two-layer projector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from encoder_service.towers.base import Budget, Plan, Tower, check_grids, fitted_budget, sequence_bounds
from encoder_service.towers.layers import FeedForward, PackedSelfAttention, merge_index
from encoder_service.towers.positions import PositionCache
from shared.sizing import Grid


@dataclass(frozen=True)
class IsaacTowerConfig:
    """Sizes of an Isaac tower, as the checkpoint's ``vision_config`` gives them.

    Attributes:
        width: channels of the tower.
        layers: number of blocks.
        heads: attention heads.
        hidden: inner width of the feed-forward.
        patch_size: side of a square patch, pixels.
        position_side: side of the learned square position table (``num_patches`` = side²).
        merge: pixel shuffle factor.
        output_width: hidden size of the language model.
        norm_eps: epsilon of every LayerNorm.
        activation: of the feed-forward, by its name in ``config.json``.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    patch_size: int
    position_side: int
    merge: int
    output_width: int
    norm_eps: float = 1e-6
    activation: str = "gelu_pytorch_tanh"


class IsaacBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: IsaacTowerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = PackedSelfAttention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = FeedForward(config.width, config.hidden, config.activation)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        """``[P, width]`` → ``[P, width]``."""
        x = x + self.attention(self.norm1(x), cu_seqlens, max_seqlen)
        return x + self.mlp(self.norm2(x))


class IsaacTower(Tower):
    """Patches ``[P, patch_size² · 3]`` → embeddings ``[P / merge², output_width]``."""

    outer_layers = frozenset({"patch_embedding", "project_down"})

    def __init__(self, config: IsaacTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.output_width
        self.merge = config.merge
        self.patch_dim = config.patch_size**2 * 3
        merged_width = config.width * config.merge**2
        self.patch_embedding = nn.Linear(self.patch_dim, config.width)
        self.position_table = nn.Parameter(torch.zeros(config.position_side**2, config.width))
        self.blocks = nn.ModuleList(IsaacBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.project_up = nn.Linear(merged_width, 4 * merged_width, bias=False)
        self.project_down = nn.Linear(4 * merged_width, config.output_width, bias=False)
        self._positions = PositionCache(self.resize_positions)

    def resize_positions(self, grid: Grid) -> torch.Tensor:
        """The learned position table resized to ``grid``: ``[grid.patches, width]``.

        Bilinear with antialias, corners not aligned, in float32 (antialiased resizing has no bfloat16 kernel on CPU).
        """
        side = self.config.position_side
        table = self.position_table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(table, size=tuple(grid), mode="bilinear", align_corners=False, antialias=True)
        return resized.flatten(2).squeeze(0).T

    def plan(self, grids: Sequence[Grid], budget: Budget | None = None) -> Plan:
        """See :meth:`Tower.plan`; extras: ``positions [P, width]`` and ``merge_index [tokens, merge²]``."""
        check_grids(grids, self.merge)
        size = fitted_budget(grids, self.merge, budget)
        tables = [self._positions.get(grid, self.position_table) for grid in grids]
        used = sum(grid.patches for grid in grids)
        if used < size.patches or not tables:
            padding = torch.zeros(size.patches - used, self.config.width, dtype=self.position_table.dtype)
            tables.append(padding)
        lengths = [grid.patches for grid in grids]
        return Plan(
            cu_seqlens=sequence_bounds(lengths, size.images),
            max_seqlen=max(lengths, default=0) if budget is None else size.patches,
            extras={
                "positions": torch.cat(tables) if len(tables) > 1 else tables[0],
                "merge_index": merge_index(grids, self.merge, size.patches // self.merge**2),
            },
            tokens=[grid.patches // self.merge**2 for grid in grids],
        )

    def features(self, patches: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The tower without its projector: one row per patch, ``[P, config.width]``, after the final LayerNorm."""
        x = self.patch_embedding(patches) + plan.extras["positions"]
        for block in self.blocks:
            x = block(x, plan.cu_seqlens, plan.max_seqlen)
        return self.norm(x)

    def forward(self, patches: torch.Tensor, plan: Plan) -> torch.Tensor:
        """See :meth:`Tower.forward`."""
        merged = self.features(patches, plan)[plan.extras["merge_index"]].flatten(1)
        return self.project_down(F.silu(self.project_up(merged)))
