"""The contract of preprocessing: pixels to patches, by a family's size rule."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shared.sizing import Grid, SizeRule


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
