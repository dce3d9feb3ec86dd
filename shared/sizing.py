"""Size arithmetic: from a picture's width and height alone to its patch grid and token count.

Both sides need it: the ingress to refuse a prompt before a pixel is touched, the encoder to resize. So it stands here
and neither service imports the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, floor
from typing import Literal, NamedTuple

#: convergence width of the NaFlex scale search; part of the reference's size rule, so it must not change
SCALE_EPS = 1e-5
#: largest enlargement that the search tries; the tiniest pictures (1×1, 2×2) end below the minimum because of it
MAX_ENLARGEMENT = 100.0


class Grid(NamedTuple):
    """Patch grid of one image: ``height`` × ``width`` patches, row-major."""

    height: int
    width: int

    @property
    def patches(self) -> int:
        """Number of patches."""
        return self.height * self.width


class SizeRule(ABC):
    """How a family turns a picture's size into a patch grid.

    Attributes:
        patch_size: side of a square patch, pixels.
        merge: side of the square of patches that becomes one token.
    """

    patch_size: int
    merge: int

    @abstractmethod
    def grid(self, width: int, height: int) -> Grid:
        """Patch grid of a ``width`` × ``height`` pixel picture."""

    def tokens(self, width: int, height: int) -> int:
        """How many embedding rows a picture of this size gives the language model."""
        return self.grid(width, height).patches // self.merge**2

    def merged(self, width: int, height: int) -> Grid:
        """Those rows as a grid: height × width tokens, row-major."""
        rows, columns = self.grid(width, height)
        return Grid(rows // self.merge, columns // self.merge)


@dataclass(frozen=True)
class NaflexRule(SizeRule):
    """The NaFlex rule of Isaac: keep the ratio, keep the patch count within bounds.

    Attributes:
        patch_size: side of a patch, pixels.
        merge: pixel shuffle factor; both sides of the grid are multiples of it.
        min_patches: smaller pictures are enlarged to at least this many patches; None keeps them.
        max_patches: larger pictures are reduced to at most this many patches.
    """

    patch_size: int = 16
    merge: int = 2
    min_patches: int | None = 256
    max_patches: int = 6144

    def grid(self, width: int, height: int) -> Grid:
        """See :meth:`SizeRule.grid`. Each side is rounded up to a multiple of ``patch_size · merge``."""
        cell = self.patch_size * self.merge

        def scaled(scale: float) -> Grid:
            rows, columns = (max(ceil(scale * side / cell), 1) for side in (height, width))
            return Grid(rows * self.merge, columns * self.merge)

        grid = scaled(1.0)
        if self.min_patches is not None and grid.patches < self.min_patches:
            low, high, wanted = 1.0, MAX_ENLARGEMENT, self.min_patches
            while high - low >= SCALE_EPS:
                middle = (low + high) / 2
                low, high = (low, middle) if scaled(middle).patches >= wanted else (middle, high)
            return scaled(high)
        if grid.patches > self.max_patches:
            low, high = SCALE_EPS / 10, 1.0
            while high - low >= SCALE_EPS:
                middle = (low + high) / 2
                low, high = (middle, high) if scaled(middle).patches <= self.max_patches else (low, middle)
            return scaled(low)
        return grid


@dataclass(frozen=True)
class LongestSideRule(SizeRule):
    """The rule of Pixtral: the longer side has a limit, the ratio stays, each side grows to whole blocks of patches.

    Attributes:
        patch_size: side of a patch, pixels.
        merge: side of the block of patches that becomes one token; both sides of the grid are multiples of it.
        longest: longest side after reduction, pixels; smaller pictures are not enlarged beyond their last block.
        rounding: of a reduced side: ``nearest`` (even at a tie) in Mistral's own code, ``down`` in transformers.
    """

    patch_size: int = 16
    merge: int = 1
    longest: int = 1024
    rounding: Literal["nearest", "down"] = "nearest"

    def grid(self, width: int, height: int) -> Grid:
        """See :meth:`SizeRule.grid`. The thinnest strips keep one block, where transformers ends with none."""
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            whole = round if self.rounding == "nearest" else floor
            width, height = (max(whole(side / ratio), 1) for side in (width, height))
        cell = self.patch_size * self.merge
        return Grid(*(((side - 1) // cell + 1) * self.merge for side in (height, width)))

    @property
    def max_tokens(self) -> int:
        """Most embedding rows of one picture."""
        return ((self.longest - 1) // (self.patch_size * self.merge) + 1) ** 2
