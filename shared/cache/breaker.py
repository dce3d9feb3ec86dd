"""When not to ask Redis at all: after a few failures in a row, everybody is spared the wait for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: consecutive failures that open the circuit, and how long it stays open, seconds
FAILURES_TO_OPEN = 3
OPEN_SECONDS = 1.0


class Breaker:
    """A circuit breaker, safe for several threads.

    Only silence counts as a failure: an error that Redis answers costs no time, and reads may still work when writes
    are refused. While the circuit is open, one caller per period is let through to see whether Redis is back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._probe_at = 0.0

    def allows(self) -> bool:
        """Whether to try."""
        with self._lock:
            if self._failures < FAILURES_TO_OPEN:
                return True
            now = self._clock()
            if now < self._probe_at:
                return False
            self._probe_at = now + OPEN_SECONDS
            return True

    def succeeded(self) -> None:
        """Redis answered."""
        with self._lock:
            self._failures = 0

    def failed(self) -> None:
        """Redis did not answer in time."""
        with self._lock:
            self._failures += 1
            if self._failures >= FAILURES_TO_OPEN:
                self._probe_at = self._clock() + OPEN_SECONDS

    @property
    def is_open(self) -> bool:
        """Whether operations are being skipped."""
        with self._lock:
            return self._failures >= FAILURES_TO_OPEN
