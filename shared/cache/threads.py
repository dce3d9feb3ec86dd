"""The cache for threads: the engine's connector and the command line."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    ThreadConnections,
    deadline,
    sense,
)
from shared.cache.links import Link, RedisPyLink, WireLink
from shared.cache.local import LocalTier
from shared.cache.resp import Parts
from shared.cache.sentinels import Place
from shared.cache.stats import CacheStats
from shared.cache.steps import Operations, Steps, next_pause
from shared.config import CacheSettings
from shared.keys import wake_channel
from shared.records import Buffer, RecordHeader

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass
class _Links:
    """Connections of one kind."""

    make: Callable[[Place | None], Link]
    idle: list[tuple[Place | None, Link]] = field(default_factory=list)


class EmbeddingCache:
    """:class:`~shared.cache.aio.AsyncEmbeddingCache` for threads, any number of them; the operations are the same.

    The deadline covers everything but the look-up of a host's name. Where redis-py must be used, sending a
    record may take one more.

    Args:
        settings: deadlines, lease and life of entries.
        url: as in ``cache.url``.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, settings: CacheSettings, url: str) -> None:
        self._settings = settings
        self._breaker = Breaker()
        self.stats = CacheStats(self._breaker)
        self.local = LocalTier(settings.local, url, self.stats)
        self._operations = Operations(settings, self.stats, self.local)
        self._connections = ThreadConnections(settings, url)
        self._small = _Links(lambda place: RedisPyLink(self._connections.make(place)))
        self._large = self._small
        if self._connections.address is not None:
            lender = Lender()
            self._large = _Links(lambda place: WireLink(self._connections.at(place), lender))
        self._process = os.getpid()
        self._room = _Places(MAX_CONNECTIONS, settings.timeout)
        self._writers = _Places(MAX_WRITERS, settings.timeout)
        self._waiters = threading.BoundedSemaphore(MAX_WAITERS)
        self._closed = False

    def close(self) -> None:
        """Closes all connections; operations that still run close theirs when they end."""
        self._closed = True
        self.local.close()
        for links in (self._small, self._large):
            while links.idle:
                links.idle.pop()[1].close()

    def describe(self, key: str) -> RecordHeader | None:
        """The header of a record, if there is a good one; the payload is not read."""
        steps = self._operations.describe(key)
        return self._run("describe", steps, None, instead=lambda: self.local.recent_header(key))

    def fetch(self, key: str) -> Buffer | None:
        """A whole record, checked; a damaged one is counted, deleted and a miss. It must not be written to."""
        return self.fetch_many([key])[0]

    def fetch_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        """Whole records in the order of ``keys``, in one round trip and within one deadline; see :meth:`fetch`."""
        if not keys:
            return []
        missing: list[Buffer | None] = [None] * len(keys)
        steps = self._operations.fetch_many(keys)
        return self._run("fetch", steps, missing, links=self._large, instead=lambda: [*map(self.local.recent, keys)])

    def put(self, key: str, record: Buffer | Parts, *, alias: str | None = None, digest: str | None = None) -> bool:
        """Stores a record, whole or in parts, and its alias; whether Redis has it now."""
        return self._run("put", self._operations.put(key, record, alias, digest), False, self._writers, self._large)

    def add_alias(self, alias: str, digest: str) -> bool:
        """Notes that a file holds a known picture."""
        return self._run("alias", self._operations.add_alias(alias, digest), False)

    def resolve_alias(self, alias: str) -> str | None:
        """Digest of the picture that a file holds, if it was seen before."""
        return self._run("alias", self._operations.resolve_alias(alias), None)

    def delete(self, keys: Iterable[str]) -> int:
        """Deletes entries; returns how many there were."""
        return self._run("delete", self._operations.delete(keys), 0)

    def claim(self, key: str, owner: str) -> bool:
        """Takes the lease; False when somebody else holds it, True too when Redis cannot say."""
        return self._run("claim", self._operations.claim(key, owner), True)

    def renew(self, key: str, owner: str) -> bool:
        """Makes a lease last anew; False when it is somebody else's by now, or Redis cannot say."""
        return self._run("renew", self._operations.renew(key, owner), False)

    def release(self, key: str, owner: str) -> None:
        """Gives the lease back, if it is still this owner's, and wakes those who wait for it."""
        self._run("release", self._operations.release(key, owner), None)

    def wait_for(self, key: str, timeout: float) -> RecordHeader | None:
        """Waits for another encoder's record; None when the lease ended, time is up, or Redis fails."""
        until = time.monotonic() + timeout
        with self._wakeups(wake_channel(key)) as wakeup:
            while True:
                look = self._run("wait", self._operations.look(key), None)
                pause = next_pause(look, until - time.monotonic())
                if pause is None:
                    return look.header if look else None
                wakeup(pause)

    def ping(self) -> bool:
        """Whether Redis answers."""
        return self._run("ping", self._operations.ping(), False)

    def info(self) -> dict[str, str]:
        """Redis's memory figures and policy by its own names; empty when it does not tell."""
        return self._run("info", self._operations.info(), {})

    def _run(
        self,
        operation: str,
        steps: Steps[Result],
        otherwise: Result,
        limit: Callable[[], AbstractContextManager[None]] = nullcontext,
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
            with deadline(self._settings.timeout), limit(), self._link(links or self._small) as link:
                result = _carry(link, steps, self._connections)
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

    @contextmanager
    def _link(self, links: _Links) -> Iterator[Link]:
        """A connection that has nothing of an earlier reply on it; whatever interrupts its use closes it."""
        with self._room():
            if self._process != os.getpid():  # forked: the sockets are the parent's
                self._small.idle, self._large.idle, self._process = [], [], os.getpid()
            place = self._connections.find()
            while True:
                try:
                    where, link = links.idle.pop()  # atomic, unlike a look at the length before it
                except IndexError:
                    link = links.make(place)
                    break
                if where == place:
                    break
                link.close()  # the master has moved
            try:
                link.open()
                yield link
            except BaseException:
                link.close()
                raise
            if self._closed:
                link.close()
            else:
                links.idle.append((place, link))

    @contextmanager
    def _wakeups(self, channel: str) -> Iterator[Callable[[float], None]]:
        """Yields a sleep that a message on the channel ends early; without a subscription, a plain sleep."""
        listener: Any = None
        held = self._waiters.acquire(blocking=False)

        def wakeup(seconds: float) -> None:
            nonlocal listener
            until = time.monotonic() + seconds
            if listener is not None:
                try:
                    if listener.can_read(seconds):
                        with deadline(self._settings.timeout), sense():
                            listener.read_response()
                    return
                except FAULTS:
                    self.stats.record("wait", "error")
                    listener.disconnect()
                    listener = None
            time.sleep(max(0.0, until - time.monotonic()))

        try:
            if held:
                listener = self._subscribed(channel)
            yield wakeup
        finally:
            if held:
                self._waiters.release()
            if listener is not None:
                listener.disconnect()

    def _subscribed(self, channel: str) -> Any:
        """A connection that listens to the channel; None when there can be none."""
        if self._breaker.is_open:
            return None
        listener: Any = None
        try:
            with deadline(self._settings.timeout), sense():
                listener = self._connections.make(self._connections.find())
                listener.connect()
                listener.send_command("SUBSCRIBE", channel)
                listener.read_response()
            return listener
        except FAULTS:
            # not the breaker's business: the channel may be forbidden; the look that follows tells
            self.stats.record("wait", "error")
            if listener is not None:
                listener.disconnect()
            return None


class _Places:
    """A bounded number of places; waiting for one ends in a fault."""

    def __init__(self, number: int, timeout: float) -> None:
        self._free = threading.BoundedSemaphore(number)
        self._timeout = timeout

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self._free.acquire(timeout=self._timeout):
            raise TimeoutError("too many operations at once")
        try:
            yield
        finally:
            self._free.release()


def _carry(link: Link, steps: Steps[Result], connections: ThreadConnections) -> Result:
    """Sends what the steps yield, gives them the replies, and returns their result."""
    try:
        commands = next(steps)
        while True:
            replies = link.exchange(commands)
            connections.heed(replies)
            commands = steps.send(replies)
    except StopIteration as end:
        result: Result = end.value
        return result
