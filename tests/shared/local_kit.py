"""Records in a node's tier, for its tests."""

from __future__ import annotations

import time

from shared.cache.local import Folder
from tests.shared.redis_kit import key, record

MIB = 1 << 20
LIMIT = 16 * MIB


def put(folder: Folder, name: object, when: float | None = None, **size: int) -> dict[str, int]:
    """Stores :func:`~tests.shared.redis_kit.record`; what happened."""
    return dict(folder.put(key(name), record(name, **size), time.time() if when is None else when))
