"""Arrays whose addresses never change: what a captured program reads and writes.

There is one array per input, as large as the largest budget needs; each budget uses its front, in its own shape. So
all budgets share memory, and a program sees the same addresses in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from encoder_service.device import Patches, pack
from encoder_service.towers.base import Budget, Plan, Tower

#: the one planned array that every tower has; the others are its extras
BOUNDS = "cu_seqlens"


@dataclass(frozen=True)
class Inputs:
    """One budget's view of a set of buffers.

    Attributes:
        patches: ``[budget.patches, patch_dim]``.
        plan: its arrays; ``max_seqlen`` is the whole budget, since it is baked into the program.
    """

    patches: torch.Tensor
    plan: Plan

    def arrays(self) -> list[torch.Tensor]:
        """All arrays, in an order that depends on the tower alone."""
        return [self.patches, *_named(self.plan).values()]

    def write(self, images: Sequence[Patches], plan: Plan) -> None:
        """Puts a batch into the buffers; rows of patches after the images keep whatever they held.

        Args:
            images: in the plan's order.
            plan: made for this budget.

        Raises:
            GridError: an image whose values are not those of its grid.
        """
        pack(images, self.patches)
        mine, theirs = _named(self.plan), _named(plan)
        if mine.keys() != theirs.keys():
            raise ValueError(f"the plan has arrays {sorted(theirs)}, the buffers {sorted(mine)}")
        for name, array in theirs.items():
            if mine[name].shape != array.shape:
                raise ValueError(f"plan array {name} has shape {list(array.shape)}, not {list(mine[name].shape)}")
            mine[name].copy_(array)

    def copy_from(self, other: Inputs, *, non_blocking: bool = False) -> None:
        """Everything from another set of buffers."""
        for mine, theirs in zip(self.arrays(), other.arrays(), strict=True):
            mine.copy_(theirs, non_blocking=non_blocking)


class StaticBuffers:
    """Input and output arrays for all budgets.

    Args:
        tower: says through its plans which arrays there are.
        budgets: every size that is needed.
        device: where the arrays stand.
        pinned: host memory that a device copies from by itself.

    Attributes:
        outputs: ``[most rows, width]``, see :meth:`Tower.rows`.
    """

    def __init__(self, tower: Tower, budgets: Sequence[Budget], device: torch.device, *, pinned: bool = False) -> None:
        dtype = next(tower.parameters()).dtype
        plans = {budget: tower.plan([], budget) for budget in budgets}
        most = max(budget.patches for budget in budgets)
        flat: dict[str, torch.Tensor] = {}
        for name, array in _named(plans[budgets[0]]).items():
            size = max(_named(plan)[name].numel() for plan in plans.values())
            flat[name] = torch.zeros(size, dtype=array.dtype, device=device, pin_memory=pinned)
        patches = torch.zeros(most, tower.patch_dim, dtype=dtype, device=device, pin_memory=pinned)
        self._rows = {budget: tower.rows(budget) for budget in budgets}
        most_rows = max(self._rows.values())
        self.outputs = torch.zeros(most_rows, tower.width, dtype=dtype, device=device, pin_memory=pinned)
        self._flat = [patches, *flat.values()]
        self._views = {budget: _view(budget, plan, patches, flat) for budget, plan in plans.items()}

    def inputs(self, budget: Budget) -> Inputs:
        """What a forward of this budget reads."""
        return self._views[budget]

    def output(self, budget: Budget) -> torch.Tensor:
        """What a forward of this budget writes: ``[budget.patches / merge², width]``, or one row an image."""
        return self.outputs[: self._rows[budget]]

    def poison(self) -> None:
        """Fills every array of floating point with NaN: what a run does not write must not matter."""
        for array in [*self._flat, self.outputs]:
            if array.is_floating_point():
                array.fill_(float("nan"))

    @property
    def nbytes(self) -> int:
        """Memory of all arrays, bytes."""
        return sum(array.nbytes for array in [*self._flat, self.outputs])


def _named(plan: Plan) -> dict[str, torch.Tensor]:
    return {BOUNDS: plan.cu_seqlens} | dict(sorted(plan.extras.items()))


def _view(budget: Budget, plan: Plan, patches: torch.Tensor, flat: dict[str, torch.Tensor]) -> Inputs:
    views = {
        name: flat[name][: prod(array.shape)].view(array.shape).copy_(array) for name, array in _named(plan).items()
    }
    bounds = views.pop(BOUNDS)
    return Inputs(patches[: budget.patches], Plan(bounds, plan.max_seqlen, views))
