"""A real Redis for every test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.local_redis import LocalRedis


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[LocalRedis]:
    """A server of this test alone, with 64 MiB."""
    server = LocalRedis(tmp_path / "redis", 64)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: LocalRedis) -> str:
    """Its URL."""
    return redis_server.url
