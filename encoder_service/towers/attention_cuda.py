"""Packed attention on CUDA: pure tensor programs without a look at any value, so that a forward can be captured."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend_on_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    """Block-diagonal attention, ``[P, heads, head_dim]`` in and out; see ``layers.packed_attention``.

    Half precision takes torch's variable-length kernel with one split per sequence, so that a sequence's bits do not
    depend on its company. It leaves rows of no sequence unwritten, hence the zeros afterwards. Other dtypes have no
    such kernel and take a masked product.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        return attend_masked(q, k, v, cu_seqlens)
    # brings the compiler along: seconds and 70 MB, which encoders on CPUs need not spend
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, num_splits=1)
    assert isinstance(out, torch.Tensor)
    return torch.where(_in_sequence(q, cu_seqlens), out, 0)


def attend_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The same by a ``[P, P]`` mask: needs memory and work by the square of the batch."""
    rows = torch.arange(q.shape[0], device=q.device, dtype=cu_seqlens.dtype)
    owner = torch.searchsorted(cu_seqlens, rows, right=True)  # rows after the last sequence own each other
    real = _in_sequence(q, cu_seqlens)
    k, v = torch.where(real, k, 0), torch.where(real, v, 0)  # 0 · NaN is NaN even where the mask says 0
    mask = owner[:, None] == owner[None, :]
    out = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask)
    return torch.where(real, out.transpose(0, 1), 0)


def _in_sequence(q: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Which rows belong to a sequence: bool ``[P, 1, 1]``."""
    return (torch.arange(q.shape[0], device=q.device) < cu_seqlens[-1])[:, None, None]
