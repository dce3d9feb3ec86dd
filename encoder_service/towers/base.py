"""The contract of a vision tower: plan on the host, forward on the device.

Everything that depends on the pictures of a batch (grids, index maps, resized position tables, sequence
boundaries) is computed by :meth:`Tower.plan` as host arrays. :meth:`Tower.forward` is a pure tensor program over
those arrays: no ``.item()``, no branch on a tensor, no shape that depends on a value. That split is what lets any
tower be compiled or captured as a CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from shared.sizing import Grid


class Budget(NamedTuple):
    """Fixed size of a batch: rows of patches, a multiple of ``merge²``, and number of images."""

    patches: int
    images: int


@dataclass(frozen=True)
class Plan:
    """Host arrays that describe one packed batch, next to its patches.

    Attributes:
        cu_seqlens: int32 ``[images + 1]``, leading 0; attention is block-diagonal between its entries.
        max_seqlen: longest sequence in patches; a host integer, since reading it from a tensor would sync.
        extras: family-specific arrays, by the name that the tower's forward reads.
        tokens: how many embedding rows each image gets, in batch order.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    extras: dict[str, torch.Tensor]
    tokens: list[int] = field(default_factory=list)

    def to(self, device: torch.device) -> Plan:
        """The same plan with its arrays on ``device``."""
        if device.type == "cpu":
            return self
        extras = {name: array.to(device, non_blocking=True) for name, array in self.extras.items()}
        return Plan(self.cu_seqlens.to(device, non_blocking=True), self.max_seqlen, extras, self.tokens)


class Tower(nn.Module, ABC):
    """A vision network with its projector into the language model's width."""

    #: width of one output row, equal to the language model's hidden size
    width: int
    #: values of one flattened patch
    patch_dim: int
    #: side of the square of patches that becomes one token
    merge: int
    #: one row for every image, whatever its size, which goes to no language model
    pooled: ClassVar[bool] = False
    #: linear layers that take pixels or give embeddings, by name; they keep their dtype in an 8-bit tower
    outer_layers: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def plan(self, grids: Sequence[Grid], budget: Budget | None = None) -> Plan:
        """Host arrays for a packed batch of images with these patch grids.

        Args:
            grids: one per image, in packing order.
            budget: pads every array to this size, so that shapes depend on the budget alone: sequences of length 0,
                patches of no sequence, tokens of no image. No padding changes a real row.

        Raises:
            GridError: a grid is empty, not divisible by :attr:`merge`, or the images exceed the budget.
        """

    @abstractmethod
    def forward(self, patches: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Embeds packed patches.

        Args:
            patches: ``[sum of patches, patch_dim]``, images one after another in the plan's order; with a budget,
                ``[budget.patches, patch_dim]``, the rest being padding of any value.
            plan: from :meth:`plan`, on the same device.

        Returns:
            ``[sum of tokens, width]`` in the tower's dtype; split it by ``plan.tokens``. With a budget,
            ``[budget.patches / merge², width]``: the rows after the images' tokens are padding.
        """

    def rows(self, budget: Budget) -> int:
        """Rows that a forward of this budget gives, padding included."""
        return budget.images if self.pooled else budget.patches // self.merge**2


class GridError(ValueError):
    """A patch grid that this tower cannot take."""


def check_grids(grids: Sequence[Grid], merge: int) -> None:
    """Refuses grids that are empty or that ``merge`` does not divide.

    Raises:
        GridError: names the grid and the merge factor.
    """
    for grid in grids:
        if grid.height < 1 or grid.width < 1:
            raise GridError(f"patch grid {grid.height}x{grid.width} is empty")
        if grid.height % merge or grid.width % merge:
            raise GridError(f"patch grid {grid.height}x{grid.width} is not divisible by the merge factor {merge}")


def fitted_budget(grids: Sequence[Grid], merge: int, budget: Budget | None) -> Budget:
    """The budget of a plan: the given one once it is known to suffice, else exactly what the images need.

    Raises:
        GridError: too small for these images, or patches that do not form whole tokens.
    """
    used = Budget(sum(grid.patches for grid in grids), len(grids))
    if budget is None:
        return used
    if used.patches > budget.patches or used.images > budget.images:
        raise GridError(
            f"{used.images} images with {used.patches} patches exceed the budget of {budget.images} images "
            f"and {budget.patches} patches"
        )
    if budget.patches % merge**2:
        raise GridError(f"a budget of {budget.patches} patches is not divisible by {merge**2} patches per token")
    return budget


def sequence_bounds(lengths: Sequence[int], sequences: int) -> torch.Tensor:
    """``cu_seqlens``: int32 ``[sequences + 1]``, leading 0; sequences past ``lengths`` have length 0."""
    padded = [0, *lengths, *[0] * (sequences - len(lengths))]
    return torch.tensor(padded, dtype=torch.int32).cumsum(0, dtype=torch.int32)
