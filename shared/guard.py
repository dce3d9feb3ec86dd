"""What keeps Redis's troubles away from requests: counted outcomes and a circuit breaker. No I/O here."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from shared import metrics

#: consecutive failures that open the circuit, and how long it stays open, seconds
FAILURES_TO_OPEN = 3
OPEN_SECONDS = 1.0


class Guard:
    """Counts what happened and says whether to try Redis at all. Safe for several threads.

    After :data:`FAILURES_TO_OPEN` failures in a row, operations answer "miss" at once for :data:`OPEN_SECONDS`; then
    one of them is let through to see whether Redis is back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until = 0.0
        self._counts: Counter[tuple[str, str]] = Counter()

    def allows(self) -> bool:
        """Whether to try; an open circuit lets one caller per period through."""
        with self._lock:
            if self._failures < FAILURES_TO_OPEN:
                return True
            now = self._clock()
            if now < self._open_until:
                return False
            self._open_until = now + OPEN_SECONDS
            return True

    def answered(self) -> None:
        """Redis answered: the circuit closes."""
        with self._lock:
            self._failures = 0

    def record(self, operation: str, outcome: str) -> None:
        """Counts an outcome: ``hit``, ``miss``, ``ok``, ``corrupt_…``, ``refused``, ``skipped`` or ``error``."""
        with self._lock:
            self._counts[operation, outcome] += 1
            if outcome == "error":
                self._failures += 1
                if self._failures == FAILURES_TO_OPEN:
                    self._open_until = self._clock() + OPEN_SECONDS
        metrics.CACHE_OPERATIONS.labels(operation, outcome).inc()

    @property
    def is_open(self) -> bool:
        """Whether operations are being skipped."""
        with self._lock:
            return self._failures >= FAILURES_TO_OPEN

    def count(self, operation: str, outcome: str) -> int:
        """How often an operation of this object ended so."""
        with self._lock:
            return self._counts[operation, outcome]
