"""The thread of a process that stores what it fetched in the node's tier, and sweeps."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from contextlib import suppress

from shared import metrics
from shared.cache.local.folder import Folder
from shared.cache.stats import CacheStats
from shared.keys import Buffer

#: bytes of records that wait to be stored; more are left to Redis
WAITING_BYTES = 64 << 20
#: idle records are looked for so many times in the seconds that make them idle
SWEEPS = 4
#: seconds until the folder's common counts have a process's own
TALLY_SECONDS = 1.0
#: for the writer to finish what it does
CLOSE_SECONDS = 2.0


class Writer:
    """Starts the thread.

    Args:
        folder: where records go.
        idle: what Redis was not seen to have for so many seconds is removed.
        stats: where outcomes are counted.
    """

    def __init__(self, folder: Folder, idle: float, stats: CacheStats) -> None:
        self._folder = folder
        self._idle = idle
        self._stats = stats
        self._wake = threading.Condition()
        self._offers: deque[tuple[str, Buffer, float]] = deque()
        self._waiting = 0
        #: counted here and not yet added to the folder's own
        self._counted: Counter[str] = Counter()
        self._sweep_at = 0.0
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name="lookonce-local", daemon=True)
        self._thread.start()

    def offer(self, key: str, record: Buffer, when: float) -> None:
        """A record to store, unless too much waits already; see :meth:`~shared.cache.local.folder.Folder.put`."""
        with self._wake:
            if not self._closed and self._waiting + len(record) <= WAITING_BYTES:
                self._offers.append((key, record, when))
                self._waiting += len(record)
                self._wake.notify_all()

    def tally(self, outcome: str, number: int = 1) -> None:
        """Adds to what ``lookonce cache stats`` shows, within :data:`TALLY_SECONDS`."""
        with self._wake:
            self._counted[outcome] += number
            if (soon := time.monotonic() + TALLY_SECONDS) < self._sweep_at:
                self._sweep_at = soon
                self._wake.notify_all()

    def settle(self, seconds: float) -> bool:
        """Waits until nothing waits to be stored; whether that came in time."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._offers and not self._busy, seconds)

    def close(self) -> None:
        """Ends the thread; what still waits is left to Redis."""
        with self._wake:
            self._closed = True
            self._offers.clear()
            self._wake.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closed:
            with self._wake:
                left = self._sweep_at - time.monotonic()
                if left > 0 and not self._offers and not self._closed:
                    self._wake.wait(left)  # once: whoever wakes us may have brought the sweep forward
                offer = self._offers.popleft() if self._offers else None
                self._busy = True
            if offer is not None:
                self._store(*offer)
            with self._wake:
                self._waiting -= 0 if offer is None else len(offer[1])
                offer = None  # its memory is wanted elsewhere
            if self._closed or time.monotonic() >= self._sweep_at:
                self._sweep()
            with self._wake:
                self._busy = False
                self._wake.notify_all()

    def _store(self, key: str, record: Buffer, when: float) -> None:
        for outcome, number in self._folder.put(key, record, when).items():
            if number:
                self._stats.record("local", outcome, number)
                self.tally(outcome, number)

    def _sweep(self) -> None:
        with self._wake:
            counts, self._counted = self._counted, Counter()
            self._sweep_at = time.monotonic() + self._idle / SWEEPS
        self._folder.sweep(self._idle, counts)
        with self._wake:
            self._counted.update(counts)  # not taken, because another process was writing: next time
        with suppress(OSError):
            metrics.LOCAL_BYTES.set(self._folder.usage().nbytes)
