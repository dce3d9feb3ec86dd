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

import numba
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
    """Positions of a whole prompt, in one compiled pass.

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
    table = np.array(spans, dtype=np.int64).reshape(-1, len(ImageSpan._fields))
    out = np.empty((3, length), dtype=np.int64)
    end = _fill(out, table, origin is GridOrigin.START)
    if end < 0:
        raise SpanError(f"image spans {list(spans)} do not fit a prompt of {length} tokens")
    return out, end - length


@numba.njit("int64(int64[:, ::1], int64[:, ::1], boolean)", cache=True)  # type: ignore[untyped-decorator]
def _fill(out: Positions, spans: Positions, from_start: bool) -> int:
    """Writes all three rows in one pass, compiled: loops over tokens cost what writing the result costs.

    Args:
        out: ``[3, length]``.
        spans: ``[images, 4]``: offset, t, h, w.
        from_start: the convention, :attr:`GridOrigin.START` or not.

    Returns:
        Largest position + 1; -1 when the spans do not fit.
    """
    length = out.shape[1]
    token = base = largest = 0  # the next token, the position of text there, the largest position + 1
    for index in range(spans.shape[0]):
        offset, frames, rows, columns = spans[index, 0], spans[index, 1], spans[index, 2], spans[index, 3]
        room = length - offset  # products are checked step by step, so that none overflows
        if offset < token or min(frames, rows, columns) < 1 or room < 0:
            return -1
        if frames > room or rows > room // frames or columns > room // (frames * rows):
            return -1
        start = base + offset - token
        for place in range(token, offset):
            out[0, place] = out[1, place] = out[2, place] = base + place - token
        side = start if from_start else 0
        token = offset
        for frame in range(frames):
            for row in range(rows):
                for column in range(columns):
                    out[0, token] = start + frame
                    out[1, token] = side + row
                    out[2, token] = side + column
                    token += 1
        image_end = max(start + frames, side + max(rows, columns))
        largest = max(largest, image_end)
        # text between images goes on after the image's largest value; Isaac's text after the last image after its time
        base = image_end if from_start or index < spans.shape[0] - 1 else start + frames
    for place in range(token, length):
        out[0, place] = out[1, place] = out[2, place] = base + place - token
    if length > token:
        largest = max(largest, base + length - token)
    return largest
