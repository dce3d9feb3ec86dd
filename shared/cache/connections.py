"""How we use redis-py: every option that could make it wait or repeat is pinned, and the URL cannot change them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis.asyncio.connection
import redis.connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, RedisError
from redis.retry import Retry

from shared.cache.address import plain_address
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


def _url_options(url: str, parse: Any) -> dict[str, Any]:
    try:
        return dict(parse(url))
    except ValueError as error:
        raise ConfigError(f"cache.url cannot be used: {error}") from error


class AsyncConnections:
    """Makes connections for an event loop; whoever uses one sets the deadline.

    Args:
        settings: deadlines.
        url: ``redis://``, ``rediss://`` or ``unix://``.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, settings: CacheSettings, url: str) -> None:
        parsed = _url_options(url, redis.asyncio.connection.parse_url)
        #: for our own client; None when only redis-py can go there
        self.address = plain_address(parsed, options(settings))
        self._class = parsed.pop("connection_class", redis.asyncio.connection.Connection)
        # with a timeout of its own redis-py sends under asyncio.wait_for, which in Python 3.11 swallows a cancellation
        # that comes in the wrong moment, and with it our deadline
        self._options = parsed | options(settings) | {"socket_timeout": None}
        _probe(self.make)

    def make(self) -> Any:
        """A new connection, not yet connected."""
        return self._class(**self._options, retry=AsyncRetry(NoBackoff(), 0))


class ThreadConnections:
    """Makes connections for threads; arguments as for :class:`AsyncConnections`."""

    def __init__(self, settings: CacheSettings, url: str) -> None:
        parsed = _url_options(url, redis.connection.parse_url)
        self.address = plain_address(parsed, options(settings))
        self._class = parsed.pop("connection_class", redis.connection.Connection)
        self._options = parsed | options(settings) | {"parser_class": _DeadlineParser}
        _probe(self.make)

    def make(self) -> Any:
        """A new connection, not yet connected."""
        return self._class(**self._options, retry=Retry(NoBackoff(), 0))


def _probe(make: Any) -> None:
    try:
        make()
    except (TypeError, ValueError, RedisError) as error:  # an option in the URL that redis-py does not know
        raise ConfigError(f"cache.url cannot be used: {error}") from error


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
    """Ends every read of this thread after so many seconds in all; yields that moment of ``time.monotonic``."""
    _deadline.at = at = time.monotonic() + seconds
    try:
        yield at
    finally:
        _deadline.at = None


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
