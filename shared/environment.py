"""Environment variables for the length of a ``with`` block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def temporary_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Sets variables, which processes started meanwhile inherit, and puts back what was there before."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
