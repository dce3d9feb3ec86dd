"""Muon for the matrices of the transformer blocks: momentum whose update is made (nearly) orthogonal.

With few steps to spend, it learns about twice as fast per step as AdamW, which keeps everything else (embeddings,
norms, biases, projector, heads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

#: coefficients of the odd polynomial that pushes all singular values towards 1
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """``[N, rows, columns]`` → matrices with the same singular vectors and singular values near 1.

    In bfloat16, which suffices: what it takes is a direction, and it costs a third of a small step.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(_ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = _A * x + torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum; matrices of equal shape are handled in one batched product.

    Args:
        params: two-dimensional parameters.
        lr: step size; an update's entries have about 0.2 · lr root mean square, as AdamW's have.
        momentum: of the gradient average.
        weight_decay: decoupled.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[tuple[nn.Parameter, torch.Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: dict[str, Any] = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"]
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(average, group["momentum"])
                rows, columns = parameter.shape
                parts = rows // columns if rows == 3 * columns else 1  # a fused q/k/v product is three matrices
                shapes[rows // parts, columns] += list(
                    zip(parameter.data.chunk(parts), update.chunk(parts), strict=True)
                )
            for (rows, columns), pairs in shapes.items():
                updates = orthogonalise(torch.stack([update for _, update in pairs]))
                scale = group["lr"] * 0.2 * max(rows, columns) ** 0.5
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices inside transformer blocks, and everything else."""
    inside = {
        id(p) for name, p in model.named_parameters() if p.dim() == 2 and (".blocks." in name or ".layers." in name)
    }
    parameters = list(model.parameters())
    return [p for p in parameters if id(p) in inside], [p for p in parameters if id(p) not in inside]
