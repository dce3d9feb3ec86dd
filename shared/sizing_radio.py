"""Size arithmetic of the RADIO towers: nearest, fixed and dynamic resolution, and tiles with a thumbnail."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, floor, sqrt
from typing import Literal

from shared.sizing import Grid, SizeRule

#: how far more pixels may count in favour of a tile arrangement, as a share of the picture's own
MOST_AREA_GAIN = 0.6


@dataclass(frozen=True)
class NearestRule(SizeRule):
    """Each side goes to the nearest multiple of the patch; what is larger than the tower's limit shrinks, ratio kept.

    Attributes:
        patch_size: side of a patch, pixels.
        merge: 1; both sides of the grid are multiples of it.
        max_side: longest side, pixels.
    """

    patch_size: int = 16
    merge: int = 1
    max_side: int = 2048

    def grid(self, width: int, height: int) -> Grid:
        """See :meth:`SizeRule.grid`."""
        cell = self.patch_size * self.merge
        scale = min(1.0, self.max_side / max(width, height))
        most = self.max_side // cell
        rows, columns = (min(max(round(side * scale / cell), 1), most) * self.merge for side in (height, width))
        return Grid(rows, columns)


@dataclass(frozen=True)
class FixedRule(SizeRule):
    """Every picture gets one size.

    Attributes:
        patch_size: side of a patch, pixels.
        merge: pixel shuffle factor.
        rows, columns: of the patch grid.
    """

    patch_size: int = 16
    merge: int = 1
    rows: int = 48
    columns: int = 48

    def grid(self, width: int, height: int) -> Grid:
        """See :meth:`SizeRule.grid`."""
        return Grid(self.rows, self.columns)


#: of encoders that give one row for every picture
ONE_ROW = FixedRule(rows=1, columns=1)


@dataclass(frozen=True)
class TileRule(SizeRule):
    """A picture becomes square tiles, and the whole picture as one more when there are several.

    The grid is the stack of the tiles, row-major over the picture, the thumbnail last:
    ``[tiles · tile, tile]`` patches.

    Attributes:
        patch_size: side of a patch, pixels.
        merge: pixel shuffle factor.
        tile: side of a tile, patches.
        max_tiles: without the thumbnail.
        thumbnail: ``last`` or ``none``.
        choice: how the arrangement is chosen: ``area`` weighs ratio and pixels (Llama-Nemotron), ``ratio`` takes the
            nearest ratio (InternVL, Nemotron Nano V2).
    """

    patch_size: int = 16
    merge: int = 2
    tile: int = 32
    max_tiles: int = 12
    thumbnail: Literal["last", "none"] = "last"
    choice: Literal["area", "ratio"] = "area"

    def arrangement(self, width: int, height: int) -> tuple[int, int]:
        """How many tiles stand side by side and on top of each other."""
        best = _by_area if self.choice == "area" else _by_ratio
        return best(width, height, self.tile * self.patch_size, _arrangements(self.max_tiles))

    def has_thumbnail(self, columns: int, rows: int) -> bool:
        """Whether the whole picture follows such an arrangement."""
        return self.thumbnail == "last" and columns * rows > 1

    def grid(self, width: int, height: int) -> Grid:
        """See :meth:`SizeRule.grid`."""
        columns, rows = self.arrangement(width, height)
        return Grid((columns * rows + self.has_thumbnail(columns, rows)) * self.tile, self.tile)

    @property
    def max_tokens(self) -> int:
        """The most embedding rows of a picture."""
        return (self.max_tiles + 1) * (self.tile // self.merge) ** 2


@cache
def _arrangements(most: int) -> list[tuple[int, int]]:
    """(columns, rows) of up to ``most`` tiles, few tiles first.

    Among arrangements of as many tiles the reference keeps the order of a Python set, which a tie then depends on; the
    set here is filled in the same way.
    """
    found = {
        (columns, rows)
        for tiles in range(1, most + 1)
        for columns in range(1, tiles + 1)
        for rows in range(1, tiles + 1)
        if columns * rows <= most
    }
    return sorted(found, key=lambda pair: pair[0] * pair[1])


def _by_area(width: int, height: int, side: int, arrangements: list[tuple[int, int]]) -> tuple[int, int]:
    ratio, area = width / height, width * height

    def worth(pair: tuple[int, int]) -> float:
        columns, rows = pair
        gain = min(columns * rows * side * side / area, MOST_AREA_GAIN)
        wanted = columns / rows
        return gain * min(wanted / ratio, ratio / wanted)

    return max(arrangements, key=worth)  # the first of equals


def _by_ratio(width: int, height: int, side: int, arrangements: list[tuple[int, int]]) -> tuple[int, int]:
    ratio, area = width / height, width * height
    best, nearest = (1, 1), float("inf")
    for columns, rows in arrangements:
        distance = abs(ratio - columns / rows)
        if distance < nearest or (distance == nearest and area > 0.5 * side * side * columns * rows):
            best, nearest = (columns, rows), distance
    return best


@dataclass(frozen=True)
class DynamicRule(SizeRule):
    """Nemotron's dynamic resolution for one picture: its own size, within bounds of patches.

    The reference shares the context between the pictures of a prompt; here a picture has ``max_patches`` to itself,
    so that its embedding does not depend on its company. Where that is less than the context, both agree.

    Attributes:
        patch_size: side of a patch, pixels.
        merge: pixel shuffle factor; both sides of the grid are multiples of it.
        min_patches: smaller pictures are enlarged to about this many patches.
        max_patches: larger pictures are reduced to about this many; a side that must grow to one block may pass it.
    """

    patch_size: int = 16
    merge: int = 2
    min_patches: int = 1024
    max_patches: int = 13312

    def grid(self, width: int, height: int) -> Grid:
        """See :meth:`SizeRule.grid`; no side is ever 0, whatever the ratio."""
        most = max(self.max_patches, self.min_patches)
        rows, columns = (round(side / self.patch_size + 0.5) for side in (height, width))
        factor = min(sqrt(most / (rows * columns)), 1.0)
        rows, columns = (min(max(floor(factor * side), 1), most) for side in (rows, columns))
        if most > self.min_patches and rows * columns < self.min_patches:
            factor = sqrt(self.min_patches / (rows * columns))
            rows, columns = ceil(factor * rows), ceil(factor * columns)
        rows = self._whole_blocks(rows, columns, most)
        return Grid(rows, self._whole_blocks(columns, rows, most))

    def _whole_blocks(self, side: int, other: int, most: int) -> int:
        """``side`` rounded up to whole blocks if ``most`` allows, else down, but not to 0."""
        rest = side % self.merge
        if not rest:
            return side
        grown = side + self.merge - rest
        return grown if grown * other <= most else max(self.merge, side - rest)

    @property
    def max_tokens(self) -> int:
        """The most embedding rows of a picture: a side of one patch may double to make a block."""
        return max(max(self.max_patches, self.min_patches) // self.merge, 1)
