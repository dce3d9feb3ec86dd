"""Counters of one cache object; the same numbers go to Prometheus."""

from __future__ import annotations

import threading
from collections import Counter

from shared import metrics
from shared.cache.breaker import Breaker

_CORRUPT = "corrupt_"


class CacheStats:
    """What became of the operations of one cache object. Safe for several threads.

    Outcomes: ``hit``, ``miss``, ``ok``; ``corrupt_<reason>``: an entry that failed a check and was deleted, and a miss
    as well; ``refused``: a record too large for this Redis; ``rejected``: Redis answered with an error; ``error``: no
    answer in time; ``skipped``: not tried, the circuit was open.

    The node's own tier is the operation ``local``: ``hit``, a copy that Redis confirmed, which is a hit of the fetch as
    well; ``gone``: a copy that Redis no longer had; ``recent``: one that was used while Redis was silent; ``stored``,
    ``evicted``, ``busy``: a record that was not stored because another process was storing.
    """

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._read = self._written = 0

    def record(self, operation: str, outcome: str, number: int = 1) -> None:
        """Counts an outcome of an operation."""
        with self._lock:
            self._counts[operation, outcome] += number
        metrics.CACHE_OPERATIONS.labels(operation, outcome).inc(number)

    def moved(self, *, read: int = 0, written: int = 0) -> None:
        """Counts bytes of records that were fetched or stored."""
        with self._lock:
            self._read += read
            self._written += written

    def count(self, operation: str, outcome: str) -> int:
        """How often an operation ended so."""
        with self._lock:
            return self._counts[operation, outcome]

    def snapshot(self) -> dict[str, int | bool | dict[str, int]]:
        """All counters at one moment.

        Returns:
            ``hits``, ``misses`` (records, not aliases), ``puts``, ``refused``, ``rejected``, ``errors``, ``skipped``,
            ``bytes_read``, ``bytes_written``; ``corrupt`` by reason; ``breaker_open``.
        """
        with self._lock:
            counts, read, written = self._counts.copy(), self._read, self._written
        corrupt: Counter[str] = Counter()
        for (_, outcome), number in counts.items():
            if outcome.startswith(_CORRUPT):
                corrupt[outcome.removeprefix(_CORRUPT)] += number
        looks = ("describe", "fetch")
        return {
            "hits": sum(counts[operation, "hit"] for operation in looks),
            "misses": sum(counts[operation, "miss"] for operation in looks),
            "puts": counts["put", "ok"],
            **{name: _total(counts, name) for name in ("refused", "rejected", "skipped")},
            "errors": _total(counts, "error"),
            "bytes_read": read,
            "bytes_written": written,
            "corrupt": dict(corrupt),
            "breaker_open": self._breaker.is_open,
        }


def _total(counts: Counter[tuple[str, str]], outcome: str) -> int:
    return sum(number for (_, name), number in counts.items() if name == outcome)
