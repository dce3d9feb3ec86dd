"""bfloat16 attention of one picture on CPU: torch's fused kernel beside blocked matrix products, time and error.

python -m benchmarks.attention --threads 1

The products round scores to bfloat16 before the softmax. The towers use the fused kernel; this shows what that costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

#: patches of a picture, heads, width of a head
SHAPES = ((196, 16, 72), (1024, 16, 72), (4096, 16, 72), (1024, 16, 64), (900, 16, 80))
#: scores held at a time, elements, and rows of them
BLOCK_SCORES, BLOCK_ROWS = 1 << 18, 256


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[heads, length, head_dim]`` in and out."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same by matrix products, some heads and rows at a time, so that the scores stay in the cache."""
    heads, length, head_dim = q.shape
    rows = min(length, BLOCK_ROWS)
    step = max(1, min(heads, BLOCK_SCORES // (rows * length)))
    buffers, out = q.new_empty(2, step * rows * length), torch.empty_like(q)
    for head in range(0, heads, step):
        group = slice(head, min(heads, head + step))
        for row in range(0, length, rows):
            block = slice(row, min(length, row + rows))
            shape = (group.stop - group.start, block.stop - block.start, length)
            scores, weights = (buffer[: shape[0] * shape[1] * length].view(shape) for buffer in buffers)
            keys = k[group].transpose(1, 2)
            torch.baddbmm(scores, q[group, block], keys, beta=0, alpha=head_dim**-0.5, out=scores)
            torch.softmax(scores, -1, out=weights)
            torch.bmm(weights, v[group], out=out[group, block])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print("| patches | heads | fused ms | products ms | fused / products | error fused | error products |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    sides: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]]
    sides = {"fused": fused, "products": products}
    for length, heads, head_dim in SHAPES:
        q, k, v = (2 * torch.randn(3, heads, length, head_dim)).bfloat16()
        exact = fused(q.float(), k.float(), v.float())
        errors = {name: float((side(q, k, v).float() - exact).norm() / exact.norm()) for name, side in sides.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.repeats):
            for name, side in sides.items():
                begin = time.perf_counter()
                side(q, k, v)
                seconds[name].append(time.perf_counter() - begin)
        one, two = (1000 * statistics.median(times) for times in seconds.values())
        print(
            f"| {length} | {heads} of {head_dim} | {one:.2f} | {two:.2f} | {one / two:.2f}× | {errors['fused']:.4f} | "
            f"{errors['products']:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
