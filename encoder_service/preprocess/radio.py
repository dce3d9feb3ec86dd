"""RADIO preprocessing: one picture, or tiles with a thumbnail; normalised patches; tubelets of a video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from encoder_service.preprocess.base import CLIP_MEAN, CLIP_STD, Channels, Preprocess, cut_planes
from shared.sizing import Grid, SizeRule
from shared.sizing_radio import TileRule

#: raise when the arithmetic below changes in a way that changes a patch
VERSION = 1


@dataclass(frozen=True)
class RadioPreprocess(Preprocess):
    """Resize, normalise, cut into patches.

    Attributes:
        rule: size arithmetic.
        resize: ``bilinear`` (no antialias, as RADIO's own recipe), ``bicubic`` (antialias, on floating-point values,
            which may overshoot 0 and 255), ``bicubic-8bit`` (the same rounded to 8-bit values) or ``pillow`` (Pillow's
            bicubic, which rounds after each direction: up to 13 grey levels away where a side grows).
        mean, std: per channel, of values in [0, 1].
    """

    rule: SizeRule
    resize: Literal["bilinear", "bicubic", "bicubic-8bit", "pillow"] = "bilinear"
    mean: Channels = CLIP_MEAN
    std: Channels = CLIP_STD

    def patches(self, pixels: torch.Tensor) -> tuple[torch.Tensor, Grid]:
        """See :meth:`Preprocess.patches`; each patch is flattened as (channel, row, column)."""
        grid = self.rule.grid(pixels.shape[1], pixels.shape[0])
        side = self.rule.patch_size
        return cut_planes(pixels, grid, side, lambda plane: self._plane(plane, grid), self.mean, self.std), grid

    def _plane(self, plane: torch.Tensor, grid: Grid) -> torch.Tensor:
        """One channel, uint8 ``[height, width]``, in the size of the grid; tiles stand below each other."""
        side = self.rule.patch_size
        if not isinstance(self.rule, TileRule):
            return self._resized(plane, grid.height * side, grid.width * side)
        side *= self.rule.tile
        columns, rows = self.rule.arrangement(plane.shape[1], plane.shape[0])
        whole = self._resized(plane, rows * side, columns * side)
        tiles = whole.view(rows, side, columns, side).transpose(1, 2).reshape(-1, side)
        if self.rule.has_thumbnail(columns, rows):
            tiles = torch.cat([tiles, self._resized(plane, side, side)])
        return tiles

    def _resized(self, plane: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """float32 ``[height, width]``, values of 0 to 255."""
        if plane.shape == (height, width):
            return plane.float()
        image = plane[None, None]
        if self.resize == "pillow":
            resized = Image.fromarray(plane.numpy()).resize((width, height), Image.Resampling.BICUBIC)
            return torch.from_numpy(np.array(resized)).float()
        if self.resize == "bilinear":
            return F.interpolate(image.float(), size=(height, width), mode="bilinear", align_corners=False)[0, 0]
        if self.resize == "bicubic":
            image = image.float()
        smooth = F.interpolate(image, size=(height, width), mode="bicubic", align_corners=False, antialias=True)
        return smooth[0, 0].float()

    def fingerprint(self) -> str:
        """See :meth:`Preprocess.fingerprint`."""
        return f"radio-v{VERSION}:{self!r}"


def tubelets(frames: torch.Tensor, length: int) -> torch.Tensor:
    """Joins the frames of a video, ``length`` at a time; the last frame is repeated until they come out even.

    Args:
        frames: ``[frames, P, patch_dim]``, patches of equal grids.
        length: frames per tubelet.

    Returns:
        ``[ceil(frames / length), P, length · patch_dim]``: each patch of a tubelet is its frames' patches, in order.
    """
    missing = -len(frames) % length
    if missing:
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1)])
    count, patches, size = frames.shape
    return frames.view(count // length, length, patches, size).transpose(1, 2).reshape(count // length, patches, -1)
