"""Names of files and batches: in the order of their making, impossible to guess, harmless as folder names."""

from __future__ import annotations

import re
import secrets
import time

FILE, BATCH = "file-", "batch_"


def new_id(prefix: str) -> str:
    """``prefix`` and 32 hex digits: milliseconds since 1970, then 80 random bits."""
    return f"{prefix}{int(time.time() * 1000):012x}{secrets.token_hex(10)}"


def is_id(prefix: str, name: str) -> bool:
    """Whether :func:`new_id` could have made a name; only such a name may become part of a path."""
    return re.fullmatch(re.escape(prefix) + "[0-9a-f]{32}", name) is not None
