"""Tables that depend on an image's grid alone, kept for grids seen lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from shared.sizing import Grid

Tables = tuple[torch.Tensor, ...]


class GridCache:
    """Host tables by grid, bounded in bytes; the least recently used go first.

    Safe to share between threads: two that want one new grid at once only do the work twice.

    Args:
        most: bytes held at most; the newest entry always stays.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tables: OrderedDict[Grid, Tables] = OrderedDict()

    def get(self, grid: Grid, make: Callable[[Grid], Tables]) -> Tables:
        """The tables of a grid, made now if they are not held."""
        tables = self._tables.pop(grid, None)
        if tables is None:
            tables = make(grid)
        self._tables[grid] = tables
        while len(self._tables) > 1 and self.nbytes > self._most:
            self._tables.popitem(last=False)
        return tables

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(table.nbytes for tables in [*self._tables.values()] for table in tables)

    def __len__(self) -> int:
        return len(self._tables)
