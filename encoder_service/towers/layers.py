"""Building blocks that the towers share: packed attention, feed-forward, block merging."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from shared.sizing import Grid


def _attend_per_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Attention of every sequence with itself only: ``[P, heads, head_dim]`` in and out."""
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False) if end > start]
    if not lengths:
        return torch.zeros_like(q)
    used, (heads, head_dim) = bounds[-1], q.shape[1:]
    if all(length == lengths[0] for length in lengths):  # one batched call: pictures of one size are common
        shape = (len(lengths), lengths[0], heads, head_dim)
        rows = [F.scaled_dot_product_attention(*(x[:used].view(shape).transpose(1, 2) for x in (q, k, v)))]
        out = rows[0].transpose(1, 2).reshape(used, heads, head_dim)
    else:
        parts = zip(*(x[:used].split(lengths) for x in (q, k, v)), strict=True)
        # [1, heads, length, head_dim] views: the kernel reads strided rows, nothing is copied
        rows = [
            F.scaled_dot_product_attention(*(x.transpose(0, 1).unsqueeze(0) for x in part)).squeeze(0).transpose(0, 1)
            for part in parts
        ]
        out = torch.cat(rows)
    if used < q.shape[0]:  # padding rows belong to no sequence; their attention output is zero, never garbage
        out = torch.cat([out, out.new_zeros(q.shape[0] - used, heads, head_dim)])
    return out


@torch.library.custom_op("lookonce::packed_attention", mutates_args=())
def _packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    return _attend_per_sequence(q, k, v, cu_seqlens).contiguous()


@_packed_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    return q.new_empty(q.shape)


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    """Block-diagonal attention over packed sequences.

    An opaque operator, so that the towers stay one graph for ``torch.compile`` although the loop over sequences
    reads ``cu_seqlens``.

    Args:
        q, k, v: ``[P, heads, head_dim]``; rows past ``cu_seqlens[-1]`` are padding and come back as zeros.
        cu_seqlens: int32 ``[sequences + 1]``.
        max_seqlen: longest sequence, for kernels that size their launch by it.

    Returns:
        ``[P, heads, head_dim]``.
    """
    if torch.is_grad_enabled() and q.requires_grad:  # training: autograd sees through the loop
        return _attend_per_sequence(q, k, v, cu_seqlens)
    out: torch.Tensor = torch.ops.lookonce.packed_attention(q, k, v, cu_seqlens, max_seqlen)
    return out


class PackedSelfAttention(nn.Module):
    """Multi-head self-attention over packed sequences, with one fused q/k/v product and biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"tower width {width} is not divisible by its {heads} attention heads")
        self.heads = heads
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        """``[P, width]`` → ``[P, width]``."""
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, self.head_dim).unbind(1)
        return self.out(packed_attention(q, k, v, cu_seqlens, max_seqlen).reshape(x.shape))


class FeedForward(nn.Module):
    """Two linear layers around tanh-approximated GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[P, width]`` → ``[P, width]``."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def merge_index(grids: Sequence[Grid], merge: int) -> torch.Tensor:
    """Which patches become which token when square blocks of ``merge`` × ``merge`` patches are joined.

    Blocks run row-major over the image, patches row-major inside their block.

    Returns:
        int64 ``[tokens, merge * merge]``: row numbers in the packed sequence of patches.
    """
    chunks, offset = [], 0
    for height, width in grids:
        rows = torch.arange(height * width).view(height // merge, merge, width // merge, merge)
        chunks.append(rows.transpose(1, 2).reshape(-1, merge * merge) + offset)
        offset += height * width
    return torch.cat(chunks) if chunks else torch.empty(0, merge * merge, dtype=torch.int64)
