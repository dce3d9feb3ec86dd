"""The largest record that a Redis with a memory limit should be given."""

from __future__ import annotations

import threading
import time

#: Redis's memory limit is read again this often, seconds
LIMIT_PERIOD = 30.0
#: a record above this share of ``maxmemory`` would evict everybody else's
LARGEST_SHARE = 8


class WriteLimit:
    """Redis's ``maxmemory``, read now and then by one caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._read_at = float("-inf")

    def claim_reading(self) -> bool:
        """Whether it is time to read it again; true for one caller."""
        with self._lock:
            now = time.monotonic()
            stale = now - self._read_at > LIMIT_PERIOD
            self._read_at = now if stale else self._read_at
            return stale

    def learn(self, information: dict[str, str]) -> None:
        """Takes what ``INFO memory`` said."""
        number = information.get("maxmemory", "")
        if number.isdigit():
            self._bytes = int(number)

    def refuses(self, size: int) -> bool:
        """Whether a record of so many bytes is too large a share."""
        return bool(self._bytes) and size * LARGEST_SHARE > self._bytes
