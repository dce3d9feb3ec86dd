"""Metrics on a full disk: a process counts for itself from then on, instead of being ended by the kernel.

prometheus_client maps files of which only the first page is on disk. A later page that finds no room is no error that
anyone could catch: the kernel sends SIGBUS. So every file gets its room when it is mapped, or is not mapped at all.
"""

from __future__ import annotations

import logging
import mmap
import os
from types import SimpleNamespace
from typing import Any

from prometheus_client import mmap_dict

logger = logging.getLogger(__name__)


def keep_counting_without_room() -> None:
    """Makes prometheus_client map files by :func:`map_with_room`; before the first metric of this process."""
    vars(mmap_dict)["mmap"] = SimpleNamespace(**vars(mmap) | {"mmap": map_with_room})


def map_with_room(descriptor: int, length: int, **options: Any) -> mmap.mmap:
    """A file's first ``length`` bytes as memory; if there is no room for them, a copy for this process alone.

    Args:
        descriptor: of a file that has this length.
        length: bytes.
        options: of :class:`mmap.mmap`.
    """
    if options.get("access") == mmap.ACCESS_READ:
        return mmap.mmap(descriptor, length, **options)
    try:
        os.posix_fallocate(descriptor, 0, length)
    except OSError as error:
        logger.warning("metrics of process %d are not seen from now on: %s", os.getpid(), error.strerror)
        own = mmap.mmap(-1, length)
        held = os.pread(descriptor, length, 0)
        own[: len(held)] = held
        return own
    return mmap.mmap(descriptor, length, **options)
