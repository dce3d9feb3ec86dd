"""A set of text ids at 16 bytes each, for jobs of millions of rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from blake3 import blake3

#: ids that are kept in a plain set before they are merged into the sorted arrays
_RECENT = 1 << 16


class IdSet:
    """Knows which ids it has seen, by 128-bit digests.

    Args:
        ids: the first ones.
    """

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._high: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._low: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._recent: set[tuple[int, int]] = set()
        for name in ids:
            self.add(name)

    def add(self, name: str) -> bool:
        """Adds an id; False if it was there."""
        digest = _digest(name)
        if self._has(digest):
            return False
        self._recent.add(digest)
        if len(self._recent) >= _RECENT:
            self._merge()
        return True

    def __contains__(self, name: str) -> bool:
        return self._has(_digest(name))

    def __len__(self) -> int:
        return len(self._high) + len(self._recent)

    def _has(self, digest: tuple[int, int]) -> bool:
        if digest in self._recent:
            return True
        high, low = (np.uint64(half) for half in digest)
        begin = int(self._high.searchsorted(high))
        while begin < len(self._high) and self._high[begin] == high:
            if self._low[begin] == low:
                return True
            begin += 1
        return False

    def _merge(self) -> None:
        new = np.array(list(self._recent), np.uint64)
        high, low = np.concatenate([self._high, new[:, 0]]), np.concatenate([self._low, new[:, 1]])
        order = np.argsort(high, kind="stable")
        self._high, self._low = high[order], low[order]
        self._recent.clear()


def _digest(name: str) -> tuple[int, int]:
    digest = blake3(name.encode(errors="surrogatepass")).digest(16)
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
