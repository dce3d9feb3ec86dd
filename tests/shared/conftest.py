"""A real Redis for every test that asks for one, both clients of the cache on it, and a node's tier."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.cache.local import SHARED_MEMORY, Folder, remove_unused
from shared.local_redis import LocalRedis
from tests.shared.local_kit import LIMIT
from tests.shared.redis_kit import KINDS, cache_of


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


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which of the two clients."""
    return str(request.param)


@pytest.fixture
async def cache(kind: str, redis_url: str) -> AsyncIterator[Any]:
    """That client."""
    async with cache_of(kind, redis_url) as made:
        yield made


@pytest.fixture
def raw(redis_url: str) -> Any:
    """Redis as somebody else sees it."""
    return redis.Redis.from_url(redis_url)


@pytest.fixture
def tier_path() -> Iterator[Path]:
    """A folder in shared memory of this test alone."""
    made = SHARED_MEMORY / f"lookonce-test-{os.getpid()}-{random.getrandbits(32):x}"
    yield made
    remove_unused(made)
    assert not made.exists(), "somebody still uses it"


@pytest.fixture
def folder(tier_path: Path) -> Iterator[Folder]:
    """The folder, opened."""
    made = Folder(tier_path, LIMIT)
    yield made
    made.close()
