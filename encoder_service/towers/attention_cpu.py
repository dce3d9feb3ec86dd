"""Packed attention on CPU: one call per run of equally long sequences.

Blocked bfloat16 products are faster than torch's fused kernel on processors without AMX, but round the scores before
the softmax. They are left out; ``python -m benchmarks.attention`` shows what they would gain and cost.
"""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
import torch.nn.functional as F


def attend_on_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Attention of every sequence with itself only; see ``layers.packed_attention``.

    Neighbours of one length share one batched call: pictures of one size are common. A sequence's bits do not depend
    on its company.
    """
    bounds: list[int] = cu_seqlens.tolist()
    rows, start = [], 0
    for length, run in groupby(end - begin for begin, end in pairwise(bounds)):
        count = len(list(run))
        end = start + count * length
        if end > start:
            shape = (count, length, *q.shape[1:])
            out = _attend(q[start:end].view(shape), k[start:end].view(shape), v[start:end].view(shape))
            rows.append(out.reshape(end - start, *q.shape[1:]))
        start = end
    if start < q.shape[0] or not rows:  # padding rows belong to no sequence: their output is zero, never garbage
        rows.append(q.new_zeros(q.shape[0] - start, *q.shape[1:]))
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Full attention within each row of the batch: ``[sequences, length, heads, head_dim]`` in and out, no copy in."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
