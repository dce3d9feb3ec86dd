"""Pixtral preprocessing: resize by the longest side, normalise as CLIP does, cut into patches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F

from encoder_service.preprocess.base import CLIP_MEAN, CLIP_STD, Channels, Preprocess, cut_planes
from shared.sizing import Grid, LongestSideRule

#: raise when the arithmetic below changes in a way that changes a patch
VERSION = 1


@dataclass(frozen=True)
class PixtralPreprocess(Preprocess):
    """Two ways to resize that give visibly different patches when a picture shrinks.

    Attributes:
        rule: size arithmetic.
        resize: ``sharp`` is Mistral's own (bicubic without antialias on floating-point values, which may overshoot 0
            and 255); ``smooth-bicubic`` and ``smooth-bilinear`` are transformers' (antialias on 8-bit values).
        mean, std: per channel, of values in [0, 1].
    """

    rule: LongestSideRule = field(default_factory=LongestSideRule)
    resize: Literal["sharp", "smooth-bicubic", "smooth-bilinear"] = "sharp"
    mean: Channels = CLIP_MEAN
    std: Channels = CLIP_STD

    def patches(self, pixels: torch.Tensor) -> tuple[torch.Tensor, Grid]:
        """See :meth:`Preprocess.patches`; each patch is flattened as (channel, row, column)."""
        grid = self.rule.grid(pixels.shape[1], pixels.shape[0])
        side = self.rule.patch_size
        size = (grid.height * side, grid.width * side)
        return cut_planes(pixels, grid, side, lambda plane: self._resized(plane, size), self.mean, self.std), grid

    def _resized(self, plane: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """One channel, uint8 ``[height, width]``, in another size: float32, values of 0 to 255."""
        image = plane[None, None]
        if self.resize == "sharp":
            return F.interpolate(image.float(), size=size, mode="bicubic", align_corners=False)[0, 0]
        mode = self.resize.removeprefix("smooth-")
        return F.interpolate(image, size=size, mode=mode, align_corners=False, antialias=True)[0, 0].float()

    def fingerprint(self) -> str:
        """See :meth:`Preprocess.fingerprint`."""
        return f"pixtral-v{VERSION}:{self!r}"
