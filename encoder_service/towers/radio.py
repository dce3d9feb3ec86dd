"""RADIO: a ViT with cropped position embedding and prefix tokens, alone or as the tower of a chat model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from encoder_service.towers.base import Budget, GridError, Plan, Tower, check_grids, fitted_budget, sequence_bounds
from encoder_service.towers.layers import merge_index
from encoder_service.towers.positions import PositionCache
from encoder_service.towers.radio_blocks import RadioBlock, cropped_positions, projector, shuffled_order
from shared.sizing import Grid


@dataclass(frozen=True)
class RadioTowerConfig:
    """Sizes of a RADIO tower.

    Attributes:
        width, layers, heads, hidden: of the ViT.
        patch_size: side of a square patch, pixels.
        position_side: side of the learned square position table, patches.
        resize_first: resize the table, then crop it; false when the table has the size of the training pictures.
        class_tokens, registers: learned rows in front of every sequence, in this order.
        summary: which class tokens make the summary.
        qkv_bias: biases in the q/k/v product.
        qk_norm: RMS norm of queries and keys over the full width.
        norm_eps: epsilon of the blocks' norms.
        activation: of the feed-forward, by its name in ``config.json``.
        frames: frames per tubelet of a video; 1 for pictures only.
        merge: pixel shuffle factor.
        columns_first: tokens run down the columns first (``ps_version`` v1, which transposes).
        tile: side in patches when a picture is a stack of square tiles, each a sequence of its own.
        final_norm: LayerNorm between tower and projector.
        projector: ``none``, ``llama`` or ``nano``.
        projector_hidden: inner width of the projector.
        output_width: width of one output row.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    patch_size: int
    position_side: int
    resize_first: bool = True
    class_tokens: int = 1
    registers: int = 0
    summary: tuple[int, ...] = (0,)
    qkv_bias: bool = True
    qk_norm: bool = False
    norm_eps: float = 1e-6
    activation: str = "gelu"
    frames: int = 1
    merge: int = 1
    columns_first: bool = False
    tile: int | None = None
    final_norm: bool = False
    projector: str = "none"
    projector_hidden: int = 0
    output_width: int = 0

    @property
    def prefix(self) -> int:
        """Rows in front of every sequence."""
        return self.class_tokens + self.registers


class RadioOutput(NamedTuple):
    """What the ViT gives.

    Attributes:
        features: ``[P, width]``, one row per patch.
        summary: ``[sequences, len(summary) · width]``, the class tokens of each picture, tile or tubelet.
    """

    features: torch.Tensor
    summary: torch.Tensor


class RadioTower(Tower):
    """Patches ``[P, 3 · patch_size²]`` → embeddings ``[P / merge², output_width]``.

    A tubelet of a video is planned like a picture; its patches ``[P, frames · 3 · patch_size²]`` have their own
    projection, which their width chooses. One forward takes either pictures or tubelets.
    """

    outer_layers = frozenset({"patch_projection", "video_projection", "projector.3"})

    def __init__(self, config: RadioTowerConfig) -> None:
        super().__init__()
        self.config = config
        merged = config.width * config.merge**2
        self.width = merged if config.projector == "none" else config.output_width
        self.merge = config.merge
        self.patch_dim = 3 * config.patch_size**2
        self.patch_projection = nn.Linear(self.patch_dim, config.width, bias=False)
        if config.frames > 1:
            self.video_projection = nn.Linear(config.frames * self.patch_dim, config.width, bias=False)
        self.position_table = nn.Parameter(torch.zeros(1, config.position_side**2, config.width))
        self.prefix_tokens = nn.Parameter(torch.zeros(config.prefix, config.width))
        self.blocks = nn.ModuleList(
            RadioBlock(
                config.width,
                config.heads,
                config.hidden,
                qkv_bias=config.qkv_bias,
                qk_norm=config.qk_norm,
                norm_eps=config.norm_eps,
                activation=config.activation,
            )
            for _ in range(config.layers)
        )
        self.final_norm = nn.LayerNorm(config.width, eps=config.norm_eps) if config.final_norm else nn.Identity()
        self.projector = projector(config.projector, merged, config.projector_hidden, config.output_width)
        self._positions = PositionCache(self.resize_positions)

    def resize_positions(self, grid: Grid) -> torch.Tensor:
        """The learned position table for one sequence's grid: ``[grid.patches, width]``, in float32."""
        return cropped_positions(self.position_table, grid, resize_first=self.config.resize_first)

    def plan(self, grids: Sequence[Grid], budget: Budget | None = None) -> Plan:
        """See :meth:`Tower.plan`. With tiles, a grid is ``[tiles · tile, tile]`` and every tile a sequence.

        Inside the tower a sequence is its prefix tokens and its patches: ``R = P + sequences · prefix`` rows.

        Returns:
            extras: ``positions [P, width]``; ``rows [R]``, from (prefix tokens, patches) to the sequences;
            ``patch_rows [P]`` and ``merge_index [tokens, merge²]``, from sequences back to patches and blocks;
            ``summary_rows [sequences, len(summary)]``.
        """
        check_grids(grids, self.merge)
        size = fitted_budget(grids, self.merge, budget)
        pieces, sequences = self._pieces(grids, size)
        prefix, used = self.config.prefix, sum(piece.patches for piece in pieces)
        tables = [self._positions.get(piece, self.position_table) for piece in pieces]
        if used < size.patches or not tables:
            tables.append(torch.zeros(size.patches - used, self.config.width, dtype=self.position_table.dtype))

        lengths = torch.tensor([piece.patches for piece in pieces], dtype=torch.int64)
        cu_seqlens = sequence_bounds([piece.patches + prefix for piece in pieces], sequences)
        starts = cu_seqlens[: len(pieces)].long()
        numbers = torch.arange(used)
        patch_rows = torch.zeros(size.patches, dtype=torch.int64)
        patch_rows[:used] = numbers + prefix * (torch.repeat_interleave(lengths) + 1)
        rows = torch.zeros(size.patches + sequences * prefix, dtype=torch.int64)
        rows[starts[:, None] + torch.arange(prefix)] = torch.arange(prefix)
        rows[patch_rows[:used]] = numbers + prefix
        summary_rows = torch.zeros(sequences, len(self.config.summary), dtype=torch.int64)
        summary_rows[: len(pieces)] = starts[:, None] + torch.tensor(self.config.summary, dtype=torch.int64)
        return Plan(
            cu_seqlens=cu_seqlens,
            max_seqlen=len(rows) if budget is not None else max((p.patches + prefix for p in pieces), default=0),
            extras={
                "positions": torch.cat(tables) if len(tables) > 1 else tables[0],
                "rows": rows,
                "patch_rows": patch_rows,
                "merge_index": patch_rows[self._merge_index(grids, size)],
                "summary_rows": summary_rows,
            },
            tokens=[grid.patches // self.merge**2 for grid in grids],
        )

    def encode(self, patches: torch.Tensor, plan: Plan) -> RadioOutput:
        """The ViT without pixel shuffle and projector.

        Args:
            patches: as for :meth:`forward`.
            plan: from :meth:`plan`.
        """
        x = self._sequences(patches, plan)
        return RadioOutput(x[plan.extras["patch_rows"]], x[plan.extras["summary_rows"]].flatten(1))

    def forward(self, patches: torch.Tensor, plan: Plan) -> torch.Tensor:
        """See :meth:`Tower.forward`; tubelets as in the class's description."""
        x = self.final_norm(self._sequences(patches, plan))
        return self.projector(x[plan.extras["merge_index"]].flatten(1))

    def _sequences(self, patches: torch.Tensor, plan: Plan) -> torch.Tensor:
        """All rows after the last block, prefix tokens included: ``[R, width]``."""
        project = self.patch_projection if patches.shape[-1] == self.patch_dim else self.video_projection
        embedded = project(patches) + plan.extras["positions"]
        x = torch.cat([self.prefix_tokens, embedded])[plan.extras["rows"]]
        for block in self.blocks:
            x = block(x, plan.cu_seqlens, plan.max_seqlen)
        return x

    def _pieces(self, grids: Sequence[Grid], size: Budget) -> tuple[list[Grid], int]:
        """Grids of the sequences, and how many sequences the budget has room for.

        Raises:
            GridError: not a stack of tiles.
        """
        side = self.config.tile
        if side is None:
            return list(grids), size.images
        for grid in grids:
            if grid.width != side or grid.height % side:
                raise GridError(f"patch grid {grid.height}x{grid.width} is not a stack of tiles of {side}x{side}")
        count = sum(grid.height for grid in grids) // side
        return [Grid(side, side)] * count, size.patches // side**2

    def _merge_index(self, grids: Sequence[Grid], size: Budget) -> torch.Tensor:
        """Patches of every token, ``[tokens, merge²]``, in the order that the language model was trained with."""
        index = merge_index(grids, self.merge, size.patches // self.merge**2)
        if self.config.columns_first:
            order = shuffled_order(grids, self.merge, self.config.tile)
            index[: len(order)] = index[order]
        return index


class RadioSummaryTower(RadioTower):
    """Patches ``[P, 3 · patch_size²]`` → one summary per picture, ``[pictures, len(summary) · width]``."""

    pooled: ClassVar[bool] = True

    def __init__(self, config: RadioTowerConfig) -> None:
        super().__init__(config)
        self.width = config.width * len(config.summary)

    def plan(self, grids: Sequence[Grid], budget: Budget | None = None) -> Plan:
        """See :meth:`Tower.plan`."""
        return replace(super().plan(grids, budget), tokens=[1] * len(grids))

    def forward(self, patches: torch.Tensor, plan: Plan) -> torch.Tensor:
        """See :meth:`Tower.forward`."""
        return self.encode(patches, plan).summary
