"""Memory for large values: aligned, and used again, because fresh pages cost as much time as the wire."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

#: a record's payload begins at a multiple of this, so the value must too
ALIGNMENT = 64
#: smaller values are not worth keeping memory for; larger ones would hold too much of it
SMALLEST, LARGEST = 64 << 10, 64 << 20
#: memory kept for later, bytes
IDLE_BYTES = 64 << 20


def _classes() -> list[int]:
    """Capacities, four to each doubling: at most a quarter of a buffer stays unused."""
    sizes, size = [], SMALLEST
    while size <= LARGEST:
        sizes += [size + quarter * size // 4 for quarter in range(4)]
        size *= 2
    return sizes


class Lender:
    """Lends buffers, and gets one back when nobody refers to it any more: no view, no tensor made of it.

    Safe for several threads and without a lock: the return happens wherever a reference is dropped, in the middle of
    anything.

    Args:
        idle_bytes: memory kept for later, at most.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self._idle_bytes = idle_bytes
        # the dictionary itself never changes after this
        self._idle: dict[int, deque[npt.NDArray[np.uint8]]] = {size: deque() for size in _classes()}

    @property
    def idle(self) -> int:
        """Bytes kept for later."""
        return sum(size * len(kept) for size, kept in self._idle.items())

    def lend(self, size: int) -> memoryview:
        """A writable buffer of ``size`` bytes, aligned to :data:`ALIGNMENT`; its contents are whatever was there."""
        capacity = next((one for one in self._idle if one >= size), 0) if size >= SMALLEST else 0
        if not capacity:
            return _aligned(np.empty(size + ALIGNMENT, np.uint8), size).data
        try:
            base = self._idle[capacity].pop()
        except IndexError:
            base = np.empty(capacity + ALIGNMENT, np.uint8)
        lent = _aligned(base, size)
        weakref.finalize(lent, self._take_back, capacity, base).atexit = False
        return lent.data

    def _take_back(self, capacity: int, base: npt.NDArray[np.uint8]) -> None:
        if capacity > self._idle_bytes:
            return
        for kept in self._idle.values():  # sizes that nobody wants now make room for those that are in use
            while kept and self.idle + capacity > self._idle_bytes:
                try:
                    kept.popleft()
                except IndexError:
                    break
        self._idle[capacity].append(base)


def _aligned(base: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    start = -base.ctypes.data % ALIGNMENT
    return base[start : start + size]
