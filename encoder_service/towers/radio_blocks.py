"""Parts of the RADIO towers: blocks, cropped position embedding, projectors of the chat models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from encoder_service.towers.layers import FeedForward, packed_attention
from shared.sizing import Grid


class RadioAttention(nn.Module):
    """Multi-head self-attention; queries and keys are normalised over the full width when ``qk_norm``."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool, qk_norm: bool, norm_eps: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"tower width {width} is not divisible by its {heads} attention heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.out = nn.Linear(width, width)
        self.q_norm = nn.RMSNorm(width, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, eps=norm_eps) if qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        """``[R, width]`` → ``[R, width]``."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        shape = (x.shape[0], self.heads, -1)
        q, k = self.q_norm(q), self.k_norm(k)
        mixed = packed_attention(q.reshape(shape), k.reshape(shape), v.reshape(shape), cu_seqlens, max_seqlen)
        return self.out(mixed.reshape(x.shape))


class RadioBlock(nn.Module):
    """Pre-norm transformer block with a learned scale per channel on each branch."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        qkv_bias: bool,
        qk_norm: bool,
        norm_eps: float,
        activation: str,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attention = RadioAttention(width, heads, qkv_bias=qkv_bias, qk_norm=qk_norm, norm_eps=norm_eps)
        self.scale1 = nn.Parameter(torch.ones(width))
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = FeedForward(width, hidden, activation)
        self.scale2 = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        """``[R, width]`` → ``[R, width]``."""
        x = x + self.attention(self.norm1(x), cu_seqlens, max_seqlen) * self.scale1
        return x + self.mlp(self.norm2(x)) * self.scale2


class SquaredRelu(nn.Module):
    """``relu(x)²``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return F.relu(x).square()


#: epsilon of the projectors' norms, whatever the tower's own is
PROJECTOR_EPS = 1e-5


def projector(kind: str, inner: int, hidden: int, output: int) -> nn.Module:
    """What stands between the tower and the language model: ``[T, inner]`` → ``[T, output]``.

    Args:
        kind: ``none`` (``inner`` equals ``output``), ``llama`` (LayerNorm, GELU, biases) or ``nano`` (RMSNorm,
            squared ReLU, no biases).
        inner, hidden, output: widths.
    """
    if kind == "none":
        return nn.Identity()
    if kind == "llama":
        return nn.Sequential(
            nn.LayerNorm(inner, eps=PROJECTOR_EPS), nn.Linear(inner, hidden), nn.GELU(), nn.Linear(hidden, output)
        )
    if kind == "nano":
        return nn.Sequential(
            nn.RMSNorm(inner, eps=PROJECTOR_EPS),
            nn.Linear(inner, hidden, bias=False),
            SquaredRelu(),
            nn.Linear(hidden, output, bias=False),
        )
    raise ValueError(f"no projector {kind!r}; there are none, llama, nano")


def _crop(table: torch.Tensor, grid: Grid) -> torch.Tensor:
    return table[..., : grid.height, : grid.width]


def _resize(table: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    if tuple(table.shape[-2:]) == size:
        return table
    return F.interpolate(table, size=size, mode="bilinear", align_corners=False)


def cropped_positions(learned: torch.Tensor, grid: Grid, *, resize_first: bool) -> torch.Tensor:
    """The learned square table for one grid: ``[grid.patches, width]`` in float32.

    Args:
        learned: ``[1, side², width]``.
        grid: wanted; of the learned size, the table itself comes back.
        resize_first: bring the table to a square of the grid's longer side, then crop ("cropped position
            embedding"); else crop first and resize what is still too small.
    """
    side = round(learned.shape[1] ** 0.5)
    table = learned.float().view(1, side, side, -1).permute(0, 3, 1, 2)
    if grid != (side, side):
        if resize_first:
            table = _resize(table, (max(grid), max(grid)))
        table = _resize(_crop(table, grid), (grid.height, grid.width))
    return table.flatten(2).squeeze(0).T


def shuffled_order(grids: Sequence[Grid], merge: int, tile: int | None) -> torch.Tensor:
    """Order of tokens when the blocks of every picture, or of every tile of it, run down the columns first.

    Args:
        grids: of the packed pictures; with tiles, each ``[tiles · tile, tile]`` patches.
        merge: side of a block of patches.
        tile: side of a tile in patches; None when a picture is one piece.

    Returns:
        int64 ``[tokens]``: for each output row, which row of the row-major order it is.
    """
    pieces: list[torch.Tensor] = []
    start = 0
    for height, width in grids:
        piece = height if tile is None else tile
        for _ in range(height // piece):
            rows, columns = piece // merge, width // merge
            pieces.append(torch.arange(start, start + rows * columns).view(rows, columns).T.flatten())
            start += rows * columns
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
