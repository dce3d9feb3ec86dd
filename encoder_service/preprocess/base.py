"""The contract of preprocessing: pixels to patches, by a family's size rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from shared.sizing import Grid, SizeRule

Channels = tuple[float, float, float]
CLIP_MEAN: Channels = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Channels = (0.26862954, 0.26130258, 0.27577711)


def cut_planes(
    pixels: torch.Tensor,
    grid: Grid,
    side: int,
    resize: Callable[[torch.Tensor], torch.Tensor],
    mean: Channels,
    std: Channels,
) -> torch.Tensor:
    """Normalised patches, each flattened as (channel, row, column).

    One channel goes after the other: a large picture is held in floating point by a third only.

    Args:
        pixels: uint8 ``[height, width, 3]``.
        grid: of the patches.
        side: of a patch, pixels.
        resize: from one contiguous channel, uint8 ``[height, width]``, to values of 0 to 255, float32
            ``[grid.height · side, grid.width · side]``.
        mean, std: per channel, of values in [0, 1].

    Returns:
        float32 ``[grid.patches, 3 · side²]``.
    """
    patches = torch.empty(grid.height, grid.width, 3, side, side)
    for channel, (middle, spread) in enumerate(zip(mean, std, strict=True)):
        plane = resize(pixels[..., channel].contiguous())
        rows = plane.view(grid.height, side, grid.width, side).transpose(1, 2)
        patches[:, :, channel] = rows.mul(1 / (255 * spread)).sub_(middle / spread)
    return patches.view(grid.patches, -1)


class Preprocess(ABC):
    """Turns decoded pictures into patches for one tower.

    Attributes:
        rule: size arithmetic of the family.
    """

    rule: SizeRule

    @abstractmethod
    def patches(self, pixels: torch.Tensor) -> tuple[torch.Tensor, Grid]:
        """Cuts a picture into normalised patches.

        Args:
            pixels: uint8 ``[height, width, 3]``.

        Returns:
            float32 ``[grid.patches, patch_dim]`` and the grid.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Text that differs between any two settings that can give different patches for one picture."""
