"""Ends this process when its parent has died.

An engine runs in child processes. If their owner is killed outright nobody tells them, and they would keep their memory
(on a GPU, all of it) for ever.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.5
_watching = threading.Event()


def die_with_parent(owner: int | None = None) -> None:
    """Starts a daemon thread that kills this process once its parent is gone; once per process.

    Args:
        owner: the process that must be the parent; it may have died before this was called. None takes whoever it is.
    """
    if _watching.is_set():
        return
    _watching.set()
    parent = os.getppid() if owner is None else owner
    threading.Thread(target=_watch, args=(parent,), name="lookonce-parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    logger.warning("process %d, which owned this engine, is gone; ending", parent)
    # not sys.exit: this is a thread, and the main one may sit in a collective or a device call
    os.kill(os.getpid(), signal.SIGKILL)
