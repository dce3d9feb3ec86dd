"""Isaac preprocessing: resize by the NaFlex rule, normalise, cut into patches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from encoder_service.preprocess.base import Preprocess
from shared.sizing import Grid, NaflexRule

#: raise when the arithmetic below changes in a way that changes a patch
VERSION = 1


@dataclass(frozen=True)
class IsaacPreprocess(Preprocess):
    """Bilinear resize without antialias on 8-bit values, then [-1, 1]."""

    rule: NaflexRule = field(default_factory=NaflexRule)

    def patches(self, pixels: torch.Tensor) -> tuple[torch.Tensor, Grid]:
        """See :meth:`Preprocess.patches`; each patch is flattened as (row, column, channel), values in [-1, 1]."""
        grid = self.rule.grid(pixels.shape[1], pixels.shape[0])
        side = self.rule.patch_size
        size = (grid.height * side, grid.width * side)
        # The reference resizes 8-bit values and rounds before it normalises; so do we, for equal patches.
        # Channels stay last all the way: the kernel for that layout is faster, and a row of a patch is one copy.
        channels_last = pixels.unsqueeze(0).permute(0, 3, 1, 2)
        resized = F.interpolate(channels_last, size=size, mode="bilinear", align_corners=False)
        rows = resized[0].permute(1, 2, 0).reshape(grid.height, side, grid.width, side * 3).transpose(1, 2)
        patches = torch.empty(rows.shape).copy_(rows).view(grid.patches, -1)
        return patches.mul_(2 / 255).sub_(1), grid

    def fingerprint(self) -> str:
        """See :meth:`Preprocess.fingerprint`."""
        return f"isaac-v{VERSION}:{self.rule!r}"
