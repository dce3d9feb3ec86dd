"""M-RoPE positions: three rows (time, height, width) for a prompt that holds images.

Text advances all three rows together; an image spreads its merged grid over them. Two conventions are in use:

* ``GridOrigin.START`` (Qwen2-VL, Qwen2.5-VL, Qwen3-VL): all three rows of an image count from the image's start, and
  text goes on after the largest of them.
* ``GridOrigin.ZERO`` (Isaac): only time stands at the image's start, height and width count from 0. Text between
  images goes on after the largest value of the image before it, but text after the *last* image goes on after that
  image's time. It is what vLLM's Isaac computes, hence what served checkpoints are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


class GridOrigin(Enum):
    """Where the height and width rows of an image begin."""

    START = "start"
    ZERO = "zero"


class ImageSpan(NamedTuple):
    """One image in a prompt: its first placeholder token and its merged grid."""

    offset: int
    t: int
    h: int
    w: int


class SpanError(ValueError):
    """Image spans that do not fit the prompt."""


def positions(length: int, spans: Sequence[ImageSpan], origin: GridOrigin = GridOrigin.START) -> tuple[Positions, int]:
    """Positions of a whole prompt, in one vectorised pass.

    Args:
        length: tokens of the prompt.
        spans: its images by ascending offset; image ``i`` holds ``t · h · w`` consecutive tokens.
        origin: the model family's convention.

    Returns:
        int64 ``[3, length]``, and the delta to add to a token's index while decoding (largest position + 1 − length).
        A prompt that is cut into chunks takes the matching columns of the whole.

    Raises:
        SpanError: spans overlap, are out of order, are empty or reach past the prompt.
    """
    if not spans:
        return np.broadcast_to(np.arange(length), (3, length)).copy(), 0
    table = np.asarray(spans, dtype=np.int64)
    offsets, grids = table[:, 0], table[:, 1:]
    sizes = grids.prod(axis=1)
    ends = offsets + sizes
    text_before = offsets - np.concatenate([[0], ends[:-1]])
    if (grids < 1).any() or (text_before < 0).any() or ends[-1] > length:
        raise SpanError(f"image spans {list(spans)} do not fit a prompt of {length} tokens")

    largest = grids.max(axis=1)
    if origin is GridOrigin.START:
        # the text base of each gap is a plain running sum
        advance = np.cumsum(text_before + largest)
        bases = np.concatenate([[0], advance[:-1]])
        starts = bases + text_before
        tail_base = advance[-1]
    else:
        # base[i + 1] = max(base[i] + text[i] + t[i], side[i]): a running maximum once the sum is taken out
        run = np.cumsum(text_before + grids[:, 0])
        side = grids[:, 1:].max(axis=1)
        bases_after = run + np.maximum(np.maximum.accumulate(side - run), 0)
        bases = np.concatenate([[0], bases_after[:-1]])
        starts = bases + text_before
        tail_base = starts[-1] + grids[-1, 0]

    # Text everywhere first: index − (where the gap starts) + (its base), as one repeat over alternating segments.
    tail = length - ends[-1]
    segment_lengths = np.concatenate([np.stack([text_before, sizes], axis=1).ravel(), [tail]])
    segment_begin = np.concatenate([[0], np.cumsum(segment_lengths)[:-1]])
    segment_shift = np.empty(len(segment_lengths), dtype=np.int64)
    segment_shift[0::2] = np.concatenate([bases, [tail_base]]) - segment_begin[0::2]
    segment_shift[1::2] = 0
    line = np.arange(length) + np.repeat(segment_shift, segment_lengths)
    out = np.empty((3, length), dtype=np.int64)
    out[:] = line

    # Then all images at once: index within the image → (t, h, w) of its merged grid.
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    columns = within + np.repeat(offsets, sizes)
    width, plane = np.repeat(grids[:, 2], sizes), np.repeat(grids[:, 1] * grids[:, 2], sizes)
    start = np.repeat(starts, sizes)
    frame, rest = np.divmod(within, plane)
    row, column = np.divmod(rest, width)
    side_start = start if origin is GridOrigin.START else 0
    out[0, columns] = frame + start
    out[1, columns] = row + side_start
    out[2, columns] = column + side_start
    return out, int(out.max()) + 1 - length
