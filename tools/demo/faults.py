"""Faults that a server of Pixtral models can have, to see whether the demo's answers show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from encoder_service.towers.pixtral import PixtralTower
from shared.sizing import Grid
from tools.demo.design import Design

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class WithoutBreaks(Design):
    """An image whose rows of tokens follow one another without a break; its end stays."""

    def image_tokens(self, merged: Grid) -> list[str]:
        return [self.image] * merged.patches + [str(self.image_end)]


def without_breaks(design: Design, _: PixtralTower) -> Design:
    """Row breaks are left out of the prompt."""
    return WithoutBreaks(**vars(design))


def one_dimension(design: Design, tower: PixtralTower) -> Design:
    """Patches are turned by their running number in every frequency, as tokens of a text are."""
    config = tower.config

    def rotary(grid: Grid) -> Tables:
        head = config.width // config.heads
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, head, 2) / head)
        angles = torch.arange(grid.patches).float().outer(frequencies)
        return angles.cos(), angles.sin()

    tower.rotary = rotary  # type: ignore[method-assign]
    return design


def swapped(design: Design, tower: PixtralTower) -> Design:
    """Rows turn with the frequencies of columns, and columns with those of rows."""
    right = tower.rotary

    def rotary(grid: Grid) -> Tables:
        turned = right(Grid(grid.width, grid.height))
        order = torch.arange(grid.patches).view(grid.width, grid.height).T.flatten()
        return turned[0][order], turned[1][order]

    tower.rotary = rotary  # type: ignore[method-assign]
    return design


#: by the name that the command line takes: what becomes of the design, and of the tower in place
FAULTS: dict[str, Callable[[Design, PixtralTower], Design]] = {
    "no-breaks": without_breaks,
    "1d-rotary": one_dimension,
    "swapped-rotary": swapped,
}
