"""The demo models: what differs between their families, for training and export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from encoder_service.preprocess.base import Preprocess
from encoder_service.preprocess.isaac import IsaacPreprocess
from encoder_service.preprocess.pixtral import PixtralPreprocess
from encoder_service.towers.base import Plan, Tower
from encoder_service.towers.isaac import IsaacTower, IsaacTowerConfig
from encoder_service.towers.layers import merge_index
from encoder_service.towers.pixtral import PixtralTower, PixtralTowerConfig
from shared.sizing import Grid, LongestSideRule
from tools.demo.language_model import LanguageConfig
from tools.demo.pictures import RULE
from tools.demo.starts import start_as_convolution, start_looking_around

#: width of the towers, of the language models, side of the square of patches that becomes one token
TOWER_WIDTH, WIDTH, MERGE = 128, 192, 2

ISAAC_TOWER = IsaacTowerConfig(
    width=TOWER_WIDTH,
    layers=4,
    heads=4,
    hidden=384,
    patch_size=16,
    position_side=16,
    merge=MERGE,
    output_width=WIDTH,
)
#: a token of 28 pixels: small pictures, which Pixtral does not enlarge, still have more than one token to a cell
PIXTRAL_RULE = LongestSideRule(patch_size=14, merge=MERGE, longest=280, rounding="down")
PIXTRAL_TOWER = PixtralTowerConfig(
    width=TOWER_WIDTH,
    features=(4,),
    heads=4,
    hidden=256,
    patch_size=PIXTRAL_RULE.patch_size,
    merge=MERGE,
    output_width=WIDTH,
    rope_theta=10.0,  # the slowest wave is as long as two of the longest sides, none is wasted
    projector_norm_eps=1e-5,
    merger=True,
    projector_bias=False,
)


@dataclass(frozen=True)
class Design:
    """One demo model.

    Attributes:
        name: of the family.
        preprocess: from pixels to patches.
        make_tower: a new tower, started for training.
        plan: differentiable plan of images with these grids.
        language: sizes of the language model.
        grid_positions: M-RoPE for image tokens; else every token counts one.
        image_text: what the chat template writes for an image.
        image: the token that takes an embedding.
        row_end, image_end: tokens after each row of an image's tokens and after its last; None for none.
    """

    name: str
    preprocess: Preprocess
    make_tower: Callable[[], Tower]
    plan: Callable[[Tower, Sequence[Grid]], Plan]
    language: LanguageConfig
    grid_positions: bool
    image_text: str
    image: str
    row_end: str | None = None
    image_end: str | None = None

    def image_tokens(self, merged: Grid) -> list[str]:
        """The tokens of one image with this grid of tokens."""
        if self.row_end is None or self.image_end is None:
            return [self.image] * merged.patches
        row = [self.image] * merged.width
        return [*([*row, self.row_end] * (merged.height - 1)), *row, self.image_end]


def _isaac_tower() -> Tower:
    tower = IsaacTower(ISAAC_TOWER)
    start_as_convolution(tower)
    return tower


def _isaac_plan(tower: Tower, grids: Sequence[Grid]) -> Plan:
    """Not the tower's own plan: its resized positions are cached without gradients."""
    assert isinstance(tower, IsaacTower)
    extras = {
        "positions": torch.cat([tower.resize_positions(grid) for grid in grids]),
        "merge_index": merge_index(grids, tower.merge),
    }
    bounds = torch.tensor([0, *(grid.patches for grid in grids)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Plan(bounds, max(grid.patches for grid in grids), extras)


def _pixtral_tower() -> Tower:
    tower = PixtralTower(PIXTRAL_TOWER)
    start_looking_around(tower)
    return tower


def _pixtral_plan(tower: Tower, grids: Sequence[Grid]) -> Plan:
    return tower.plan(grids)


ISAAC = Design(
    "isaac",
    IsaacPreprocess(RULE),
    _isaac_tower,
    _isaac_plan,
    LanguageConfig(),
    grid_positions=True,
    image_text="<image>",
    image="<|image_pad|>",
)
PIXTRAL = Design(
    "pixtral",
    PixtralPreprocess(PIXTRAL_RULE, "smooth-bicubic"),
    _pixtral_tower,
    _pixtral_plan,
    LanguageConfig(normalised=False, norm_eps=1e-5),
    grid_positions=False,
    image_text="[IMG]",
    image="[IMG]",
    row_end="[IMG_BREAK]",
    image_end="[IMG_END]",
)
DESIGNS = {design.name: design for design in (ISAAC, PIXTRAL)}
