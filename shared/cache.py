"""The embedding cache on Redis, for asyncio (:class:`AsyncEmbeddingCache`) and for threads (:class:`EmbeddingCache`).

The cache is an optimisation: whatever Redis does, no operation here raises or blocks beyond its deadline. A fault is a
miss (or a False), counted by the guard.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from shared.config import CacheSettings
from shared.guard import Guard
from shared.keys import lease_key, wake_channel
from shared.records import HEADER_BYTES, RecordError, RecordHeader, decode_record, read_header

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
FAULTS = (RedisError, OSError, TimeoutError, asyncio.TimeoutError)
#: connections of one process; more callers wait for one, within their deadline
MAX_CONNECTIONS = 64
#: redis-py's default of 32 KiB halves the speed of large reads
READ_BYTES = 4 << 20
#: a waiter looks by itself this often, seconds, in case its wake-up was lost with a connection
WAIT_POLL = 1.0
#: Redis's memory limit is read again this often, seconds
LIMIT_PERIOD = 30.0
#: an operation that did not happen, where None means "not there"
_FAULT: Any = object()
#: a record above this share of ``maxmemory`` would evict everybody else's
LARGEST_SHARE = 8


def client_options(settings: CacheSettings) -> dict[str, Any]:
    """Options of both clients: every wait has a deadline, and the library retries nothing by itself."""
    return {
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.timeout,
        "socket_read_size": READ_BYTES,
        "retry_on_timeout": False,
        "health_check_interval": 0,
        "max_connections": MAX_CONNECTIONS,
        "timeout": settings.timeout,
    }


class _Limit:
    """Redis's ``maxmemory``, read now and then."""

    def __init__(self) -> None:
        self._bytes = 0
        self._read_at = float("-inf")

    @property
    def stale(self) -> bool:
        return time.monotonic() - self._read_at > LIMIT_PERIOD

    def learn(self, info: Mapping[str, Any] | None) -> None:
        self._read_at = time.monotonic()
        if info is not None:
            self._bytes = int(info.get("maxmemory", 0))

    def refuses(self, size: int) -> bool:
        return bool(self._bytes) and size * LARGEST_SHARE > self._bytes


def _checked_header(head: bytes | None, key: str) -> RecordHeader | None:
    return read_header(head, key) if head else None


def _checked_record(record: bytes | None, key: str) -> bytes | None:
    if record:
        decode_record(record, key)
    return record or None


class AsyncEmbeddingCache:
    """For an event loop. Interrupting a call closes its connection, so no reply ever reaches another caller.

    Args:
        settings: deadlines, lease and life of entries.
        url: ``redis://``, ``rediss://`` or ``unix://``.
    """

    def __init__(self, settings: CacheSettings, url: str) -> None:
        self.guard = Guard()
        self._settings = settings
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, retry=AsyncRetry(NoBackoff(), 0), **client_options(settings)
        )
        # redis-py types replies as text or bytes; without decoding they are bytes
        self._redis: Any = redis.asyncio.Redis(connection_pool=pool)
        self._limit = _Limit()

    async def close(self) -> None:
        """Closes all connections."""
        await self._redis.aclose()
        await self._redis.connection_pool.aclose()

    async def describe(self, key: str) -> RecordHeader | None:
        """The header of a record, if there is a good one; the payload is not read."""
        read = self._read("describe", key, lambda: self._redis.getrange(key, 0, HEADER_BYTES - 1), _checked_header)
        return await read

    async def fetch(self, key: str) -> bytes | None:
        """A whole record, checked; a damaged one is deleted and a miss."""
        return await self._read("fetch", key, lambda: self._redis.get(key), _checked_record)

    async def put(self, key: str, record: bytes, *, alias: str | None = None, digest: str | None = None) -> bool:
        """Stores a record, and in the same round trip that a file (``alias``) holds this picture (``digest``).

        Returns:
            Whether Redis has it now; if not, the embedding must travel another way.
        """
        if self._limit.stale:
            self._limit.learn(await self._try("info", lambda: self._redis.info("memory"), None))
        if self._limit.refuses(len(record)):
            self.guard.record("put", "refused")
            return False
        life = self._milliseconds

        async def store() -> bool:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.set(key, record, px=life)
                if alias and digest:
                    pipe.set(alias, digest, px=life)
                pipe.publish(wake_channel(key), "put")
                await pipe.execute()
            return True

        stored = await self._try("put", store, False)
        if stored:
            self.guard.record("put", "ok")
        return stored

    async def add_alias(self, alias: str, digest: str) -> bool:
        """Notes that a file holds a known picture."""
        stored = await self._try("alias", lambda: self._redis.set(alias, digest, px=self._milliseconds), None)
        return bool(stored)

    async def resolve_alias(self, alias: str) -> str | None:
        """Digest of the picture that a file holds, if it was seen before."""
        digest = await self._try("alias", lambda: self._redis.get(alias), _FAULT)
        if digest is _FAULT:
            return None
        if digest is not None and (len(digest) != 64 or not digest.isalnum()):
            self.guard.record("alias", "corrupt_alias")
            return None
        self.guard.record("alias", "miss" if digest is None else "hit")
        return None if digest is None else digest.decode()

    async def delete(self, keys: Iterable[str]) -> int:
        """Deletes entries; returns how many there were."""
        names = list(keys)
        return int(await self._try("delete", lambda: self._redis.unlink(*names), 0)) if names else 0

    async def claim(self, key: str, owner: str) -> bool:
        """Takes the lease on making this embedding. True too when Redis cannot say: better twice than never."""
        life = round(self._settings.lease * 1000)
        # None: somebody else holds it; a fault counts as claimed
        taken = await self._try("claim", lambda: self._redis.set(lease_key(key), owner, nx=True, px=life), True)
        return bool(taken)

    async def release(self, key: str, owner: str) -> None:
        """Gives the lease back, if it is still this owner's, and wakes those who wait for it."""
        name = lease_key(key)

        async def drop() -> None:
            # WATCH instead of a script: scripting may be forbidden for our user
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(name)
                if await pipe.get(name) == owner.encode():
                    pipe.multi()
                    pipe.delete(name)
                    pipe.publish(wake_channel(key), "released")
                    await pipe.execute()

        await self._try("release", drop, None)

    async def wait_for(self, key: str, timeout: float) -> RecordHeader | None:
        """Waits until another encoder's record is there.

        Returns:
            Its header; None when the lease ended without one, when time is up, or when Redis fails.
        """
        deadline = time.monotonic() + timeout
        async with self._subscription(wake_channel(key)) as subscription:
            while subscription is not None:
                if (header := await self.describe(key)) is not None:
                    return header
                held = await self._try("lease", lambda: self._redis.exists(lease_key(key)), 0)
                left = deadline - time.monotonic()
                if not held or left <= 0:
                    return await self.describe(key)  # it may have come between the two looks
                try:
                    await subscription.get_message(ignore_subscribe_messages=True, timeout=min(left, WAIT_POLL))
                except FAULTS:
                    self.guard.record("wait", "error")
                    return None
        return None

    async def ping(self) -> bool:
        """Whether Redis answers."""
        return bool(await self._try("ping", lambda: self._redis.ping(), False))

    @property
    def _milliseconds(self) -> int | None:
        return None if self._settings.ttl is None else round(self._settings.ttl * 1000)

    @asynccontextmanager
    async def _subscription(self, channel: str) -> AsyncIterator[PubSub | None]:
        subscription = self._redis.pubsub()
        try:
            subscribed = await self._try("wait", lambda: _subscribe(subscription, channel), False)
            yield subscription if subscribed else None
        finally:
            await subscription.aclose()

    async def _try(self, operation: str, work: Callable[[], Awaitable[Result]], otherwise: Result) -> Result:
        """Runs one operation within its deadline; a fault is counted and gives ``otherwise``."""
        if not self.guard.allows():
            self.guard.record(operation, "skipped")
            return otherwise
        try:
            async with asyncio.timeout(self._settings.timeout):
                result = await work()
            self.guard.answered()
            return result
        except FAULTS as error:
            self.guard.record(operation, "error")
            logger.warning("cache %s failed: %s", operation, type(error).__name__)
            return otherwise

    async def _read(
        self,
        operation: str,
        key: str,
        work: Callable[[], Awaitable[bytes | None]],
        check: Callable[[bytes | None, str], Result | None],
    ) -> Result | None:
        found = await self._try(operation, work, _FAULT)
        if found is _FAULT:
            return None
        try:
            checked = check(found, key)
        except RecordError as error:
            self.guard.record(operation, f"corrupt_{error.reason}")
            logger.warning("a damaged record was deleted: %s", error)
            await self.delete([key])
            return None
        self.guard.record(operation, "hit" if checked is not None else "miss")
        return checked


async def _subscribe(subscription: PubSub, channel: str) -> bool:
    await subscription.subscribe(channel)
    return True


class EmbeddingCache:
    """For threads: what the engine's connector and the command line need. Safe for several threads.

    Args:
        settings: as for :class:`AsyncEmbeddingCache`.
        url: likewise.
    """

    def __init__(self, settings: CacheSettings, url: str) -> None:
        self.guard = Guard()
        pool = redis.BlockingConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **client_options(settings))
        self._redis: Any = redis.Redis(connection_pool=pool)

    def close(self) -> None:
        """Closes all connections."""
        self._redis.close()
        self._redis.connection_pool.disconnect()

    def fetch(self, key: str) -> bytes | None:
        """A whole record, checked; a damaged one is deleted and a miss."""
        record = self._try("fetch", lambda: self._redis.get(key), _FAULT)
        if record is _FAULT:
            return None
        try:
            checked = _checked_record(record, key)
        except RecordError as error:
            self.guard.record("fetch", f"corrupt_{error.reason}")
            logger.warning("a damaged record was deleted: %s", error)
            self.delete([key])
            return None
        self.guard.record("fetch", "hit" if checked is not None else "miss")
        return checked

    def delete(self, keys: Iterable[str]) -> int:
        """Deletes entries; returns how many there were."""
        names = list(keys)
        return int(self._try("delete", lambda: self._redis.unlink(*names), 0)) if names else 0

    def ping(self) -> bool:
        """Whether Redis answers."""
        return bool(self._try("ping", lambda: self._redis.ping(), False))

    def info(self) -> dict[str, Any]:
        """Memory figures and policy, as Redis gives them; empty when it does not answer."""
        return dict(self._try("info", lambda: self._redis.info("memory"), {}))

    def _try(self, operation: str, work: Callable[[], Any], otherwise: Any) -> Any:
        """Runs one operation; a fault is counted and gives ``otherwise``."""
        if not self.guard.allows():
            self.guard.record(operation, "skipped")
            return otherwise
        try:
            result = work()
            self.guard.answered()
            return result
        except FAULTS as error:
            self.guard.record(operation, "error")
            logger.warning("cache %s failed: %s", operation, type(error).__name__)
            return otherwise
