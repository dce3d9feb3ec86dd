"""The cache for threads: the engine's connector and the command line."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from shared.cache.breaker import Breaker
from shared.cache.connections import (
    FAULTS,
    MAX_CONNECTIONS,
    MAX_WAITERS,
    MAX_WRITERS,
    ThreadConnections,
    deadline,
    sense,
)
from shared.cache.stats import CacheStats
from shared.cache.steps import Command, Operations, Steps, next_pause
from shared.config import CacheSettings
from shared.keys import wake_channel
from shared.records import RecordHeader

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class EmbeddingCache:
    """:class:`~shared.cache.aio.AsyncEmbeddingCache` for threads, any number of them; the operations are the same.

    The deadline covers everything but the look-up of a host's name. Sending may take one more.

    Args:
        settings: deadlines, lease and life of entries.
        url: ``redis://``, ``rediss://`` or ``unix://``.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, settings: CacheSettings, url: str) -> None:
        self._settings = settings
        self._breaker = Breaker()
        self.stats = CacheStats(self._breaker)
        self._operations = Operations(settings, self.stats)
        self._connections = ThreadConnections(settings, url)
        self._idle: list[Any] = []
        self._process = os.getpid()
        self._room = _Places(MAX_CONNECTIONS, settings.timeout)
        self._writers = _Places(MAX_WRITERS, settings.timeout)
        self._waiters = threading.BoundedSemaphore(MAX_WAITERS)
        self._closed = False

    def close(self) -> None:
        """Closes all connections; operations that still run close theirs when they end."""
        self._closed = True
        while self._idle:
            self._idle.pop().disconnect()

    def describe(self, key: str) -> RecordHeader | None:
        """The header of a record, if there is a good one; the payload is not read."""
        return self._run("describe", self._operations.describe(key), None)

    def fetch(self, key: str) -> bytes | None:
        """A whole record, checked; a damaged one is counted, deleted and a miss."""
        return self.fetch_many([key])[0]

    def fetch_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Whole records in the order of ``keys``, in one round trip and within one deadline; see :meth:`fetch`."""
        missing: list[bytes | None] = [None] * len(keys)
        return self._run("fetch", self._operations.fetch_many(keys), missing) if keys else []

    def put(self, key: str, record: bytes, *, alias: str | None = None, digest: str | None = None) -> bool:
        """Stores a record and its alias; whether Redis has it now."""
        return self._run("put", self._operations.put(key, record, alias, digest), False, self._writers)

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
    ) -> Result:
        """Carries one operation within its deadline; a fault is counted and gives ``otherwise``."""
        if not self._breaker.allows():
            self.stats.record(operation, "skipped")
            return otherwise
        try:
            with deadline(self._settings.timeout), limit(), self._connection() as connection:
                result = _carry(connection, steps)
        except ResponseError as error:
            self._breaker.succeeded()
            self.stats.record(operation, "rejected")
            logger.warning("Redis rejects %s: %s", operation, str(error)[:100])
            return otherwise
        except FAULTS as error:
            self._breaker.failed()
            self.stats.record(operation, "error")
            logger.warning("cache %s failed: %s", operation, type(error).__name__)
            return otherwise
        self._breaker.succeeded()
        return result

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection that has nothing of an earlier reply on it; whatever interrupts its use closes it."""
        with self._room():
            if self._process != os.getpid():  # forked: the sockets are the parent's
                self._idle, self._process = [], os.getpid()
            try:
                connection = self._idle.pop()  # atomic, unlike a look at the length before it
            except IndexError:
                connection = self._connections.make()
            try:
                with sense():
                    _connect(connection)
                yield connection
            except BaseException:
                connection.disconnect()
                raise
            if self._closed:
                connection.disconnect()
            else:
                self._idle.append(connection)

    @contextmanager
    def _wakeups(self, channel: str) -> Iterator[Callable[[float], None]]:
        """Yields a sleep that a message on the channel ends early; without a subscription, a plain sleep."""
        listener = self._connections.make() if self._waiters.acquire(blocking=False) else None
        held = listener is not None

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
            if listener is not None and not self._subscribe(listener, channel):
                listener = None
            yield wakeup
        finally:
            if held:
                self._waiters.release()
            if listener is not None:
                listener.disconnect()

    def _subscribe(self, listener: Any, channel: str) -> bool:
        if self._breaker.is_open:
            return False
        try:
            with deadline(self._settings.timeout), sense():
                listener.connect()
                listener.send_command("SUBSCRIBE", channel)
                listener.read_response()
            return True
        except FAULTS:
            # not the breaker's business: the channel may be forbidden; the look that follows tells
            self.stats.record("wait", "error")
            listener.disconnect()
            return False


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


def _connect(connection: Any) -> None:
    if connection.is_connected:
        try:
            if not connection.can_read():
                return
        except FAULTS:
            pass
        # closed by the server, or bytes that nobody asked for
        connection.disconnect()
    connection.connect()


def _carry(connection: Any, steps: Steps[Result]) -> Result:
    """Sends what the steps yield, gives them the replies, and returns their result."""
    try:
        commands = next(steps)
        while True:
            commands = steps.send(_exchange(connection, commands))
    except StopIteration as end:
        result: Result = end.value
        return result


def _exchange(connection: Any, commands: Sequence[Command]) -> list[Any]:
    connection.send_packed_command(connection.pack_commands(commands))
    return [_reply(connection) for _ in commands]


def _reply(connection: Any) -> Any:
    try:
        with sense():
            return connection.read_response()
    except ResponseError as error:
        return error
