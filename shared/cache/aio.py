"""The cache for an event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from shared.cache.breaker import Breaker
from shared.cache.buffers import Lender
from shared.cache.connections import (
    FAULTS,
    MAX_CONNECTIONS,
    MAX_WAITERS,
    MAX_WRITERS,
    AsyncConnections,
    sense,
)
from shared.cache.links_aio import AsyncLink, AsyncRedisPyLink, AsyncWireLink
from shared.cache.local import LocalTier
from shared.cache.resp import Parts
from shared.cache.sentinels import Place
from shared.cache.stats import CacheStats
from shared.cache.steps import Operations, Steps, next_pause
from shared.cache.together import Together
from shared.config import CacheSettings
from shared.keys import wake_channel
from shared.records import Buffer, RecordHeader

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass
class _Links:
    """Connections of one kind."""

    make: Callable[[Place | None], AsyncLink]
    idle: list[tuple[Place | None, AsyncLink]] = field(default_factory=list)


class AsyncEmbeddingCache:
    """The embedding cache for one event loop.

    No operation raises because of Redis or lasts longer than ``settings.timeout``. An interrupted one, be it by its
    deadline or because its caller left, closes its connection: no reply ever reaches another caller. Look-ups and
    claims that begin in one turn of the loop share a round trip.

    Args:
        settings: deadlines, lease and life of entries.
        url: as in ``cache.url``.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, settings: CacheSettings, url: str) -> None:
        self._settings = settings
        #: seconds that a lease lasts
        self.lease = settings.lease
        self._breaker = Breaker()
        self.stats = CacheStats(self._breaker)
        self.local = LocalTier(settings.local, url, self.stats)
        self._operations = Operations(settings, self.stats, self.local)
        self._connections = AsyncConnections(settings, url)
        self._small = _Links(lambda place: AsyncRedisPyLink(self._connections.make(place)))
        self._large = self._small
        if self._connections.address is not None:
            lender = Lender()
            self._large = _Links(lambda place: AsyncWireLink(self._connections.at(place), lender))
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._writers = asyncio.Semaphore(MAX_WRITERS)
        self._waiters = 0
        self._closed = False
        # what a request asks for each of its images: one round trip for all of them
        self._describe = Together(self._describe_many)
        self._resolve_alias = Together(self._resolve_aliases)
        self._counted = Together(self._counted_many)
        self._claim = Together(self._claim_many)

    async def close(self) -> None:
        """Closes all connections; operations that still run close theirs when they end."""
        self._closed = True
        self.local.close()
        for links in (self._small, self._large):
            while links.idle:
                await links.idle.pop()[1].close()

    async def describe(self, key: str) -> RecordHeader | None:
        """The header of a record, if there is a good one; the payload is not read."""
        return await self._describe(key)

    async def fetch(self, key: str) -> Buffer | None:
        """A whole record, checked; a damaged one is counted, deleted and a miss. It must not be written to."""
        return (await self.fetch_many([key]))[0]

    async def fetch_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        """Whole records in the order of ``keys``, in one round trip and within one deadline; see :meth:`fetch`."""
        if not keys:
            return []
        missing: list[Buffer | None] = [None] * len(keys)
        steps = self._operations.fetch_many(keys)
        return await self._run(
            "fetch", steps, missing, links=self._large, instead=lambda: [*map(self.local.recent, keys)]
        )

    async def put(
        self, key: str, record: Buffer | Parts, *, alias: str | None = None, digest: str | None = None
    ) -> bool:
        """Stores a record, whole or in parts, and with it that a file (``alias``) holds a picture (``digest``).

        Returns:
            Whether Redis has it now; if not, the embedding must travel another way.
        """
        steps = self._operations.put(key, record, alias, digest)
        return await self._run("put", steps, False, self._writers, self._large)

    async def add_alias(self, alias: str, digest: str) -> bool:
        """Notes that a file holds a known picture."""
        return await self._run("alias", self._operations.add_alias(alias, digest), False)

    async def resolve_alias(self, alias: str) -> str | None:
        """Digest of the picture that a file holds, if it was seen before."""
        return await self._resolve_alias(alias)

    async def delete(self, keys: Iterable[str]) -> int:
        """Deletes entries; returns how many there were."""
        return await self._run("delete", self._operations.delete(keys), 0)

    async def count_up(self, key: str, life: float) -> int | None:
        """Adds one to a counter that lives for ``life`` seconds more; None when Redis does not count."""
        return await self._run("count", self._operations.count_up(key, life), None)

    async def counted(self, key: str) -> int | None:
        """What a counter says; None when Redis does not."""
        return await self._counted(key)

    async def claim(self, key: str, owner: str) -> bool:
        """Takes the lease on making this embedding.

        Returns:
            False when somebody else holds it. True too when Redis cannot say: better made twice than never.
        """
        return await self._claim((key, owner))

    async def renew(self, key: str, owner: str) -> bool:
        """Makes a lease last anew; False when it is somebody else's by now, or Redis cannot say."""
        return await self._run("renew", self._operations.renew(key, owner), False)

    async def release(self, key: str, owner: str) -> None:
        """Gives the lease back, if it is still this owner's, and wakes those who wait for it."""
        await self._run("release", self._operations.release(key, owner), None)

    async def wait_for(self, key: str, timeout: float) -> RecordHeader | None:
        """Waits until another encoder's record is there.

        Returns:
            Its header; None when the lease ended without one, when time is up, or when Redis fails.
        """
        until = time.monotonic() + timeout
        async with self._wakeups(wake_channel(key)) as wakeup:
            while True:
                look = await self._run("wait", self._operations.look(key), None)
                pause = next_pause(look, until - time.monotonic())
                if pause is None:
                    return look.header if look else None
                await wakeup(pause)

    async def ping(self) -> bool:
        """Whether Redis answers."""
        return await self._run("ping", self._operations.ping(), False)

    async def info(self) -> dict[str, str]:
        """Redis's memory figures and policy by its own names; empty when it does not tell."""
        return await self._run("info", self._operations.info(), {})

    async def _describe_many(self, keys: Sequence[str]) -> list[RecordHeader | None]:
        missing: list[RecordHeader | None] = [None] * len(keys)
        steps = self._operations.describe_many(keys)
        return await self._run("describe", steps, missing, instead=lambda: [*map(self.local.recent_header, keys)])

    async def _resolve_aliases(self, aliases: Sequence[str]) -> list[str | None]:
        unknown: list[str | None] = [None] * len(aliases)
        return await self._run("alias", self._operations.resolve_aliases(aliases), unknown)

    async def _counted_many(self, keys: Sequence[str]) -> list[int | None]:
        unknown: list[int | None] = [None] * len(keys)
        return await self._run("count", self._operations.counted_many(keys), unknown)

    async def _claim_many(self, claims: Sequence[tuple[str, str]]) -> list[bool]:
        return await self._run("claim", self._operations.claim_many(claims), [True] * len(claims))

    async def _run(
        self,
        operation: str,
        steps: Steps[Result],
        otherwise: Result,
        limit: asyncio.Semaphore | None = None,
        links: _Links | None = None,
        instead: Callable[[], Result] | None = None,
    ) -> Result:
        """Carries one operation within its deadline; a fault is counted and gives ``otherwise``, or what ``instead``
        finds without Redis.
        """
        if not self._breaker.allows():
            self.stats.record(operation, "skipped")
            return instead() if instead else otherwise
        try:
            async with (
                asyncio.timeout(self._settings.timeout),
                limit or nullcontext(),
                self._link(links or self._small) as link,
            ):
                result = await _carry(link, steps, self._connections)
        except ResponseError as error:
            self._breaker.succeeded()
            self.stats.record(operation, "rejected")
            logger.warning("Redis rejects %s: %s", operation, str(error)[:100])
            return instead() if instead else otherwise
        except FAULTS as error:
            self._connections.doubt()
            self._breaker.failed()
            self.stats.record(operation, "error")
            logger.warning("cache %s failed: %s", operation, type(error).__name__)
            return instead() if instead else otherwise
        self._breaker.succeeded()
        return result

    @asynccontextmanager
    async def _link(self, links: _Links) -> AsyncIterator[AsyncLink]:
        """A connection that has nothing of an earlier reply on it; whatever interrupts its use closes it."""
        async with self._room:
            place = await self._connections.find()
            while links.idle:
                where, link = links.idle.pop()
                if where == place:
                    break
                await link.close()  # the master has moved
            else:
                link = links.make(place)
            try:
                await link.open()
                yield link
            except BaseException:
                await link.close()
                raise
            if self._closed:
                await link.close()
            else:
                links.idle.append((place, link))

    @asynccontextmanager
    async def _wakeups(self, channel: str) -> AsyncIterator[Callable[[float], Awaitable[None]]]:
        """Yields a sleep that a message on the channel ends early; without a subscription, a plain sleep."""
        listener: Any = None
        room = self._waiters < MAX_WAITERS
        self._waiters += 1

        async def wakeup(seconds: float) -> None:
            nonlocal listener
            until = time.monotonic() + seconds
            if listener is not None:
                try:
                    with sense():
                        await listener.read_response(timeout=seconds)
                    return
                except FAULTS:
                    self.stats.record("wait", "error")
                    await listener.disconnect(nowait=True)
                    listener = None
            await asyncio.sleep(until - time.monotonic())

        try:
            if room:
                listener = await self._subscribed(channel)
            yield wakeup
        finally:
            self._waiters -= 1
            await _closed(listener)

    async def _subscribed(self, channel: str) -> Any:
        """A connection that listens to the channel; None when there can be none."""
        if self._breaker.is_open:
            return None
        listener: Any = None
        try:
            async with asyncio.timeout(self._settings.timeout):
                listener = self._connections.make(await self._connections.find())
                with sense():
                    await listener.connect()
                    await listener.send_command("SUBSCRIBE", channel)
                    await listener.read_response()
            return listener
        except FAULTS:
            # not the breaker's business: the channel may be forbidden; the look that follows tells
            self.stats.record("wait", "error")
        except BaseException:
            await _closed(listener)
            raise
        await _closed(listener)
        return None


async def _closed(listener: Any) -> None:
    if listener is not None:
        await listener.disconnect(nowait=True)


async def _carry(link: AsyncLink, steps: Steps[Result], connections: AsyncConnections) -> Result:
    """Sends what the steps yield, gives them the replies, and returns their result."""
    try:
        commands = next(steps)
        while True:
            replies = await link.exchange(commands)
            connections.heed(replies)
            commands = steps.send(replies)
    except StopIteration as end:
        result: Result = end.value
        return result
