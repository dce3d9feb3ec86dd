"""What the C library's allocator does with the large buffers of a forward."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

#: bytes; buffers from here on go back to the system as soon as they are freed
RETURNED = 4 << 20
#: of glibc's ``malloc.h``
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def return_large_buffers() -> bool:
    """Has glibc map every large buffer by itself instead of cutting it out of the heap of the thread that asked.

    By default glibc raises the limit to 32 MiB once such a buffer was freed; from then on the largest picture's buffers
    stay with the process, in pieces, for every thread. Mapping them costs about one per cent of a forward of a large
    picture. For processes of one's own: it changes the whole process.

    Returns:
        Whether this C library can; others are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    done = bool(mallopt(M_MMAP_THRESHOLD, RETURNED) and mallopt(M_TRIM_THRESHOLD, 2 * RETURNED))
    if not done:
        logger.warning("the allocator refuses a limit of %d MiB; large buffers stay with the process", RETURNED >> 20)
    return done
