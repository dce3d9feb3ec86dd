"""Building blocks that the towers share: packed attention, feed-forward, block merging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from encoder_service.towers.attention_cpu import attend_on_cpu
from encoder_service.towers.attention_cuda import attend_on_cuda
from shared.sizing import Grid


@torch.library.custom_op("lookonce::packed_attention", mutates_args=())
def _packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    return attend_on_cpu(q, k, v, cu_seqlens).contiguous()


@_packed_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    return q.new_empty(q.shape)


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    """Block-diagonal attention over packed sequences.

    To ``torch.compile`` it is one opaque operator, so that the towers stay one graph although the loop over sequences
    reads ``cu_seqlens``; in eager mode it is the loop itself, which saves the dispatch of a Python operator per block.
    CUDA has a path of its own that reads no value on the host.

    Args:
        q, k, v: ``[P, heads, head_dim]``; rows past ``cu_seqlens[-1]`` are padding and come back as zeros.
        cu_seqlens: int32 ``[sequences + 1]``.
        max_seqlen: longest sequence, for kernels that size their launch by it.

    Returns:
        ``[P, heads, head_dim]``.
    """
    training = torch.is_grad_enabled() and q.requires_grad  # the operator has no gradient, the loop has
    if q.is_cuda and not training:
        return attend_on_cuda(q, k, v, cu_seqlens, max_seqlen)
    if training or not torch.compiler.is_compiling():
        return attend_on_cpu(q, k, v, cu_seqlens).contiguous()
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


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


#: activations by their names in ``config.json``
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "quick_gelu": _quick_gelu,
}


class FeedForward(nn.Module):
    """Two linear layers around an activation."""

    def __init__(self, width: int, hidden: int, activation: str = "gelu_pytorch_tanh") -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[P, width]`` → ``[P, width]``."""
        return self.down(self.activation(self.up(x)))


def merge_index(grids: Sequence[Grid], merge: int, tokens: int | None = None) -> torch.Tensor:
    """Which patches become which token when square blocks of ``merge`` × ``merge`` patches are joined.

    Blocks run row-major over the image, patches row-major inside their block.

    Args:
        grids: patch grids of the packed images, divisible by ``merge``.
        merge: side of a block.
        tokens: rows of the result, at least as many as the images have; the rest repeat patch 0.

    Returns:
        int64 ``[tokens, merge * merge]``: row numbers in the packed sequence of patches.
    """
    wanted = sum(grid.patches for grid in grids) // merge**2
    index = torch.zeros(wanted if tokens is None else tokens, merge * merge, dtype=torch.int64)
    row = patch = 0
    for height, width in grids:
        numbers = torch.arange(patch, patch + height * width).view(height // merge, merge, width // merge, merge)
        block = numbers.transpose(1, 2).reshape(-1, merge * merge)
        index[row : row + len(block)] = block
        row, patch = row + len(block), patch + height * width
    return index
