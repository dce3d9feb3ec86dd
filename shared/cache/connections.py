"""How we use redis-py: every option that could make it wait or repeat is pinned, and the URL cannot change them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import redis.asyncio.connection
import redis.connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, RedisError
from redis.retry import Retry

from shared.cache.address import Address, plain_address
from shared.cache.sentinels import Master, Place, of_a_replica, read_sentinel_url
from shared.config import CacheSettings
from shared.errors import ConfigError

#: what trouble with Redis looks like
FAULTS = (RedisError, OSError, TimeoutError)
#: connections of one cache object; more callers wait for one, within their deadline
MAX_CONNECTIONS = 32
#: records on their way to Redis at once; more would only crowd its memory and the wire
MAX_WRITERS = 4
#: waiters of one cache object that are woken over a connection of their own; more look by themselves
MAX_WAITERS = 64
#: redis-py's 32 KiB cost a system call and a copy each; more than this brings nothing, and each connection holds it
READ_BYTES = 1 << 20
#: large values are sent in such pieces, so that asyncio need not copy what the socket did not take
SEND_BYTES = 256 << 10

_SENTINEL = object()


def options(settings: CacheSettings) -> dict[str, Any]:
    """Options of every connection: each wait has an end, and the library repeats nothing by itself."""
    return {
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.timeout,
        "socket_read_size": READ_BYTES,
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        # RESP2: one reply a command, nothing pushed in between
        "protocol": 2,
        "decode_responses": False,
        "driver_info": None,
    }


class _Connections:
    """What both kinds share.

    Args:
        settings: deadlines.
        url: as in ``cache.url``.
        parse: redis-py's reader of URLs, for the kind of connections.
        default: redis-py's class of plain ones.
        pinned: options that no URL changes.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, settings: CacheSettings, url: str, parse: Any, default: Any, pinned: dict[str, Any]) -> None:
        sentinel = read_sentinel_url(url)
        try:
            parsed = dict(parse(url if sentinel is None else sentinel.server))
        except ValueError as error:
            raise ConfigError(f"cache.url cannot be used: {error}") from error
        #: for our own client; None when only redis-py can go there
        self.address = plain_address(parsed, pinned)
        self._master = None if sentinel is None else Master(sentinel)
        # one share of an operation's time for each Sentinel, and one for Redis
        self._share = settings.timeout / (len(sentinel.sentinels) + 1) if sentinel else 0.0
        self._class = parsed.pop("connection_class", default)
        self._options = parsed | pinned
        self._credentials = {"username": None, "password": None, **(sentinel.credentials if sentinel else {})}
        try:
            self.make()
        except (TypeError, ValueError, RedisError) as error:  # an option in the URL that redis-py does not know
            raise ConfigError(f"cache.url cannot be used: {error}") from error

    def make(self, place: Place | None = None) -> Any:
        """A new connection of redis-py, not yet connected.

        Args:
            place: of the server, as found; None for the one in the URL.
        """
        return self._made(self._moved(place))

    def at(self, place: Place | None) -> Address:
        """Of our own client, where it can go; ``place`` as for :meth:`make`."""
        assert self.address is not None, "only redis-py goes there"
        return self.address if place is None else replace(self.address, host=place.host, port=place.port)

    def doubt(self) -> None:
        """The server that was used last did not answer."""
        if self._master is not None:
            self._master.doubt()

    def heed(self, replies: Iterable[Any]) -> None:
        """Looks whether these are answers of a replica."""
        if self._master is not None and any(map(of_a_replica, replies)):
            self._master.doubt()

    def _moved(self, place: Place | None) -> dict[str, Any]:
        return self._options if place is None else self._options | place._asdict()

    def _sentinel(self, place: Place) -> Any:
        return self._made(self._moved(place) | {"db": 0} | self._credentials)

    def _made(self, options: dict[str, Any]) -> Any:
        raise NotImplementedError


class AsyncConnections(_Connections):
    """Makes connections for an event loop; whoever uses one sets the deadline.

    Args:
        settings: deadlines.
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or ``rediss+sentinel://``.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, settings: CacheSettings, url: str) -> None:
        # with a timeout of its own redis-py sends under asyncio.wait_for, which in Python 3.11 swallows a cancellation
        # that comes in the wrong moment, and with it our deadline
        pinned = options(settings) | {"socket_timeout": None}
        kind = redis.asyncio.connection
        super().__init__(settings, url, kind.parse_url, kind.Connection, pinned)

    async def find(self) -> Place | None:
        """Where the server is; None for the one in the URL. Asks the Sentinels when there is reason to.

        Raises:
            RedisError, OSError, TimeoutError: none of them tells.
        """
        if (master := self._master) is None or (place := master.certain()) is not None:
            return None if self._master is None else place
        reasons: list[str] = []
        for sentinel in master.sentinels:
            connection = self._sentinel(sentinel)
            try:
                async with asyncio.timeout(self._share):
                    with sense():
                        await connection.connect()
                        await connection.send_command(*master.question())
                        return master.learn(sentinel, await connection.read_response())
            except FAULTS as error:
                reasons.append(_reason(sentinel, error))
            finally:
                await connection.disconnect(nowait=True)
        return master.untold(reasons)

    def _made(self, options: dict[str, Any]) -> Any:
        return self._class(**options, retry=AsyncRetry(NoBackoff(), 0))


class ThreadConnections(_Connections):
    """Makes connections for threads; arguments as for :class:`AsyncConnections`."""

    def __init__(self, settings: CacheSettings, url: str) -> None:
        kind = redis.connection
        super().__init__(settings, url, kind.parse_url, kind.Connection, options(settings))

    def find(self) -> Place | None:
        """As :meth:`AsyncConnections.find`, within the thread's deadline."""
        if (master := self._master) is None or (place := master.certain()) is not None:
            return None if self._master is None else place
        reasons: list[str] = []
        for sentinel in master.sentinels:
            connection = self._sentinel(sentinel)
            try:
                with deadline(min(self._share, time_left())), sense():
                    connection.connect()
                    connection.send_command(*master.question())
                    return master.learn(sentinel, connection.read_response())
            except FAULTS as error:
                reasons.append(_reason(sentinel, error))
            finally:
                connection.disconnect()
        return master.untold(reasons)

    def _sentinel(self, place: Place) -> Any:
        connection = super()._sentinel(place)
        connection.socket_connect_timeout = connection.socket_timeout = self._share
        return connection

    def _made(self, options: dict[str, Any]) -> Any:
        return self._class(**options, parser_class=_DeadlineParser, retry=Retry(NoBackoff(), 0))


def _reason(sentinel: Place, error: BaseException) -> str:
    return f"{sentinel.host}:{sentinel.port} {type(error).__name__} {error}"[:120]


@contextmanager
def sense() -> Iterator[None]:
    """redis-py's parser stumbles over some nonsense (an ASK without an address, text that is none): make that a fault.

    Raises:
        InvalidResponse: instead of what the parser raises.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InvalidResponse(f"a reply that redis-py cannot read: {error}") from error


_deadline = threading.local()


@contextmanager
def deadline(seconds: float) -> Iterator[float]:
    """Ends every read of this thread after so many seconds in all; yields that moment of ``time.monotonic``.

    One within another must be the shorter.
    """
    before = getattr(_deadline, "at", None)
    _deadline.at = at = time.monotonic() + seconds
    try:
        yield at
    finally:
        _deadline.at = before


def time_left() -> float:
    """Seconds of this thread's :func:`deadline`.

    Raises:
        TimeoutError: it has passed.
    """
    left: float = _deadline.at - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


class _DeadlineParser(redis.connection.DefaultParser):  # type: ignore[misc, valid-type]
    """redis-py's timeout starts anew with every piece of a reply; a server that drips could hold us for ever."""

    def read_from_socket(self, timeout: Any = _SENTINEL, raise_on_timeout: bool = True) -> Any:
        """Reads a piece, within what is left of the thread's :func:`deadline`."""
        at = getattr(_deadline, "at", None)
        if at is not None:
            left = at - time.monotonic()
            if left <= 0:
                raise TimeoutError("the deadline passed in the middle of a reply")
            return super().read_from_socket(timeout=left, raise_on_timeout=raise_on_timeout)
        if timeout is _SENTINEL:
            return super().read_from_socket(raise_on_timeout=raise_on_timeout)
        return super().read_from_socket(timeout=timeout, raise_on_timeout=raise_on_timeout)


def pieces(packed: list[Any]) -> Iterator[Any]:
    """Cuts large buffers of packed commands into views of at most :data:`SEND_BYTES`."""
    for chunk in packed:
        if len(chunk) <= SEND_BYTES:
            yield chunk
            continue
        view = memoryview(chunk)
        for start in range(0, len(view), SEND_BYTES):
            yield view[start : start + SEND_BYTES]
