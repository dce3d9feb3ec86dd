"""Resized position tables, kept for the grids seen lately."""

from __future__ import annotations

from collections.abc import Callable

import torch

from encoder_service.towers.grid_cache import GridCache
from shared.sizing import Grid

#: resized position tables kept per tower, in bytes; a 32×32 table of the so400m tower has 4.7 MB in float32
POSITION_CACHE_BYTES = 256 << 20


class PositionCache:
    """Resized tables of one tower on the host, in the dtype of the learned table.

    Args:
        resize: from a grid to its table, ``[grid.patches, width]`` in any dtype on any device.
    """

    def __init__(self, resize: Callable[[Grid], torch.Tensor]) -> None:
        self._resize = resize
        self._tables = GridCache(POSITION_CACHE_BYTES)
        self._source: tuple[int, int, torch.dtype] | None = None

    def get(self, grid: Grid, learned: torch.Tensor) -> torch.Tensor:
        """The table for ``grid``, ``[grid.patches, width]``, made anew once ``learned`` has changed."""
        version = -1 if learned.is_inference() else learned._version  # such tensors count no changes
        stamp = (learned.data_ptr(), version, learned.dtype)
        if stamp != self._source:  # trained on, loaded again, moved or converted
            self._tables = GridCache(POSITION_CACHE_BYTES)
            self._source = stamp

        def make(wanted: Grid) -> tuple[torch.Tensor]:
            with torch.no_grad():
                return (self._resize(wanted).to("cpu", learned.dtype).contiguous(),)

        return self._tables.get(grid, make)[0]
