"""Pictures with a known truth: a grid of cells that hold coloured shapes and real handwritten digits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from shared.sizing import NaflexRule

Split = Literal["train", "held-out"]
Generator = np.random.Generator
Size = tuple[int, int]
Box = tuple[int, int, int, int]

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (222, 44, 40),
    "green": (40, 165, 70),
    "blue": (45, 85, 225),
    "yellow": (240, 200, 20),
    "purple": (150, 50, 190),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
DIGITS = tuple("0123456789")
KINDS = SHAPES + DIGITS

EMPTY_SHARE = 0.15
DIGIT_SHARE = 0.45
DARK_SHARE = 0.25
#: longer side over shorter side of a picture, at most
MAX_ASPECT = 2.5
#: sides of a picture, pixels
SIDES = (96, 320)
#: largest object after the model's own resize, pixels
MAX_OBJECT = 110.0
#: how the demo model resizes; fewer patches than Isaac's own 256 suffice for such pictures
RULE = NaflexRule(min_patches=144)
#: objects are drawn at this multiple of their size, then reduced
SUPERSAMPLE = 3

#: corners of the polygons in the unit circle
_ARM = 0.36
_POLYGONS: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.72, -0.72), (0.72, -0.72), (0.72, 0.72), (-0.72, 0.72)],
    "triangle": [(math.sin(a), -math.cos(a)) for a in (0, 2 * math.pi / 3, 4 * math.pi / 3)],
    "star": [(r * math.sin(math.pi * i / 5), -r * math.cos(math.pi * i / 5)) for i, r in enumerate((1.0, 0.43) * 5)],
    "cross": [
        *((-_ARM, -0.95), (_ARM, -0.95), (_ARM, -_ARM), (0.95, -_ARM), (0.95, _ARM), (_ARM, _ARM)),
        *((_ARM, 0.95), (-_ARM, 0.95), (-_ARM, _ARM), (-0.95, _ARM), (-0.95, -_ARM), (-_ARM, -_ARM)),
    ],
}


@dataclass(frozen=True)
class Thing:
    """What a cell holds: a colour and a kind, which is a shape's name or a digit."""

    colour: str
    kind: str

    def __str__(self) -> str:
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """The truth about one picture.

    Attributes:
        size: width and height, pixels.
        cells: rows of cells; None is an empty cell.
        boxes: every object with the pixel box that it was drawn in, row-major.
    """

    size: Size
    cells: tuple[tuple[Thing | None, ...], ...]
    boxes: tuple[tuple[Thing, Box], ...]

    @property
    def rows(self) -> int:
        """Rows of the grid."""
        return len(self.cells)

    @property
    def columns(self) -> int:
        """Columns of the grid."""
        return len(self.cells[0])

    def mirrored(self, down: bool, across: bool) -> Scene:
        """The scene with its cells upside down or left to right; boxes are left out, since no picture shows them."""
        rows = self.cells[::-1] if down else self.cells
        return Scene(self.size, tuple(row[::-1] if across else row for row in rows), ())

    @property
    def things(self) -> list[Thing]:
        """What the filled cells hold, row-major."""
        return [thing for row in self.cells for thing in row if thing]


@cache
def handwriting(split: Split) -> dict[str, npt.NDArray[np.uint8]]:
    """Real handwritten digits, 8 × 8, of one part of a fixed stratified split (four fifths train).

    Returns:
        digit → uint8 ``[samples, 8, 8]``, ink is bright.
    """
    data = load_digits()
    images = np.clip(data.images * (255 / 16), 0, 255).astype(np.uint8)
    train, held_out = train_test_split(np.arange(len(images)), test_size=0.2, stratify=data.target, random_state=0)
    chosen = train if split == "train" else held_out
    return {digit: images[chosen[data.target[chosen] == int(digit)]] for digit in DIGITS}


def pick_size(rng: Generator) -> Size:
    """A random picture size within :data:`SIDES` and :data:`MAX_ASPECT`."""
    side = rng.uniform(115, 275)
    root = math.exp(rng.uniform(-0.5, 0.5) * math.log(MAX_ASPECT))
    width, height = (int(np.clip(s, *SIDES)) for s in (side * root, side / root))
    return width, height


def pick_grid(rng: Generator, size: Size, limit: int, crowding: float = 0.0) -> tuple[int, int]:
    """Rows and columns, at most ``limit`` each, that leave cells of bearable proportions in a picture of this size.

    A grid's chance goes with its number of cells to the power of ``crowding``.
    """
    width, height = size
    fits = [
        (rows, columns)
        for rows in range(1, limit + 1)
        for columns in range(1, limit + 1)
        if 0.55 <= (width / columns) / (height / rows) <= 1.8
    ]
    if not fits:
        return 1, 1
    chances = np.array([float(rows * columns) for rows, columns in fits]) ** crowding
    return fits[rng.choice(len(fits), p=chances / chances.sum())]


def _shape_mask(rng: Generator, kind: str, side: int) -> Image.Image:
    """Coverage of a shape, 8-bit ``[side, side]``."""
    large = side * SUPERSAMPLE
    mask = Image.new("L", (large, large))
    pen, middle, radius = ImageDraw.Draw(mask), large / 2, large / 2 * 0.98
    if kind == "circle":
        a, b = radius * rng.uniform(0.86, 0.95, 2)
        pen.ellipse((middle - a, middle - b, middle + a, middle + b), fill=255)
    else:
        turn = math.radians(rng.uniform(-14, 14))
        sin, cos = math.sin(turn) * radius, math.cos(turn) * radius
        stretch_x, stretch_y = rng.uniform(0.88, 1, 2)
        points = [(x * stretch_x, y * stretch_y) for x, y in _POLYGONS[kind]]
        pen.polygon([(middle + x * cos - y * sin, middle + x * sin + y * cos) for x, y in points], fill=255)
    return mask.resize((side, side), Image.Resampling.BOX)


def _digit_mask(rng: Generator, digit: str, side: int, split: Split) -> Image.Image:
    """Coverage of a handwritten digit, 8-bit ``[side, side]``, with its own slant and stroke width."""
    samples = handwriting(split)[digit]
    ink = Image.fromarray(np.pad(samples[rng.integers(len(samples))], 1))
    # maps output pixels to the 10 × 10 source: scale, small turn, small slant
    scale = 9.6 / side
    turn, slant = math.radians(rng.uniform(-10, 10)), rng.uniform(-0.12, 0.12)
    stretch_x, stretch_y = rng.uniform(0.92, 1.12, 2)
    a, b = scale * stretch_x * math.cos(turn), scale * (math.sin(turn) + slant)
    d, e = -scale * math.sin(turn), scale * stretch_y * math.cos(turn)
    half = side / 2
    matrix = (a, b, 5 - a * half - b * half, d, e, 5 - d * half - e * half)
    large = ink.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    threshold, slope = rng.uniform(0.3, 0.5), rng.uniform(2, 4)
    value = np.asarray(large, np.float32) / 255
    return Image.fromarray((np.clip((value - threshold) * slope + 0.5, 0, 1) * 255).astype(np.uint8))


def random_thing(rng: Generator, digits: float = DIGIT_SHARE) -> Thing | None:
    """What a cell holds, a digit in this share of filled cells; None for an empty cell."""
    if rng.random() < EMPTY_SHARE:
        return None
    kinds = DIGITS if rng.random() < digits else SHAPES
    return Thing(list(COLOURS)[rng.integers(len(COLOURS))], kinds[rng.integers(len(kinds))])


def _tint(rng: Generator) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Colours of background and grid lines."""
    if rng.random() < DARK_SHARE:
        paper = rng.integers(12, 50, 3)
        return paper, np.minimum(paper + rng.integers(50, 110), 255)
    paper = rng.integers(222, 256, 3)
    return paper, paper - rng.integers(60, 160)


def draw(
    seed: int,
    split: Split,
    size: Size | None = None,
    limit: int = 3,
    crowding: float = 0.0,
    digits: float = DIGIT_SHARE,
) -> tuple[Image.Image, Scene]:
    """Draws a picture; equal arguments give equal pictures.

    Args:
        seed: of everything random.
        split: whose handwriting is used.
        size: width and height in pixels; random when not given.
        limit: most rows and most columns.
        crowding: above 0, grids of many cells are likelier.
        digits: share of digits among the things.

    Returns:
        The RGB picture and the truth about it.
    """
    rng = np.random.default_rng([seed, 0 if split == "train" else 1])
    width, height = size = size or pick_size(rng)
    rows, columns = pick_grid(rng, size, limit, crowding)
    paper, line = _tint(rng)
    image = Image.new("RGB", size, tuple(paper.tolist()))
    _draw_grid(rng, image, rows, columns, tuple(line.tolist()))
    grid, patch = RULE.grid(width, height), RULE.patch_size
    enlarged = max(grid.width * patch / width, grid.height * patch / height)
    cell_width, cell_height = width / columns, height / rows
    largest = min(0.84 * min(cell_width, cell_height), MAX_OBJECT / enlarged)
    cells: list[tuple[Thing | None, ...]] = []
    boxes: list[tuple[Thing, Box]] = []
    for row in range(rows):
        cells.append(tuple(random_thing(rng, digits) for _ in range(columns)))
        for column, thing in enumerate(cells[-1]):
            if thing is None:
                continue
            side = max(int(largest * rng.uniform(0.72, 1)), 12)
            x = int(cell_width * column + 1 + rng.uniform(0.12, 0.88) * max(cell_width - side - 2, 0))
            y = int(cell_height * row + 1 + rng.uniform(0.12, 0.88) * max(cell_height - side - 2, 0))
            digit = thing.kind in DIGITS
            mask = _digit_mask(rng, thing.kind, side, split) if digit else _shape_mask(rng, thing.kind, side)
            ink = np.clip(np.array(COLOURS[thing.colour]) + rng.integers(-18, 19, 3), 0, 255)
            image.paste(tuple(ink.tolist()), (x, y), mask)
            boxes.append((thing, (x, y, x + side, y + side)))
    return image, Scene(size, tuple(cells), tuple(boxes))


def _draw_grid(rng: Generator, image: Image.Image, rows: int, columns: int, colour: tuple[int, ...]) -> None:
    """Thin lines between cells, and in half of the pictures around them all."""
    pen, thick = ImageDraw.Draw(image), int(rng.integers(1, 3))
    for column in range(1, columns):
        x = round(image.width * column / columns)
        pen.line((x, 0, x, image.height), fill=colour, width=thick)
    for row in range(1, rows):
        y = round(image.height * row / rows)
        pen.line((0, y, image.width, y), fill=colour, width=thick)
    if rng.random() < 0.5:
        pen.rectangle((0, 0, image.width - 1, image.height - 1), outline=colour, width=thick)
