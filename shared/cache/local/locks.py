"""``flock``, the only lock here: the kernel drops it with its process, which may die at any moment."""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress

#: tries, and seconds between them
TRIES, PAUSE = 20, 0.005


def locked(file: int, kind: int) -> bool:
    """Takes a lock, ``fcntl.LOCK_SH`` or ``LOCK_EX``, and says whether it did.

    Not for ever, since its holder may have been stopped: 0.1 s.
    """
    for turn in range(TRIES):
        if turn:
            time.sleep(PAUSE)
        with suppress(BlockingIOError):
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
    return False
