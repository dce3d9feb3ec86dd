"""Redis behind Sentinels: their URL, and what is known of the master that they name. No I/O."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError, ReadOnlyError, ResponseError

from shared.errors import ConfigError

logger = logging.getLogger(__name__)

#: scheme → what servers and Sentinels are reached with
SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
SENTINEL_PORT = 26379
#: while a known master is in doubt, the Sentinels are asked so often at most, seconds
ASK_SECONDS = 0.1
_SHAPE = "redis+sentinel://[user:password@]host:port,host:port/service/database"
#: options of the URL that are the Sentinels' own
_OWN = {"sentinel_username": "username", "sentinel_password": "password"}


class Place(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


@dataclass(frozen=True)
class SentinelUrl:
    """What a URL with Sentinels says.

    Attributes:
        sentinels: one at least.
        service: the Sentinels' name for the master.
        server: URL of the master with nothing but its host left to find out.
        credentials: user name and password for the Sentinels, by redis-py's names.
    """

    sentinels: tuple[Place, ...]
    service: str
    server: str
    credentials: dict[str, str]


def read_sentinel_url(url: str) -> SentinelUrl | None:
    """Reads a URL; None for one without Sentinels.

    Raises:
        ConfigError: it lacks something.
    """
    parts = urlsplit(url)
    if (scheme := SCHEMES.get(parts.scheme)) is None:
        return None
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.removeprefix("/").partition("/")
    options = parse_qsl(parts.query, keep_blank_values=True)
    try:
        sentinels = tuple(_place(host) for host in hosts.split(","))
    except ValueError as error:
        raise ConfigError(f"cache.url cannot be used: {error}; it is {_SHAPE}") from error
    if not service or (database and not database.isdigit()):
        raise ConfigError(f"cache.url cannot be used: it names no service, or a database that is no number: {_SHAPE}")
    rest = urlencode([(name, value) for name, value in options if name not in _OWN])
    server = f"{scheme}://{user}{at}master/{database or 0}" + (f"?{rest}" if rest else "")
    return SentinelUrl(
        sentinels, unquote(service), server, {_OWN[name]: value for name, value in options if name in _OWN}
    )


def _place(text: str) -> Place:
    parts = urlsplit(f"//{text}")  # knows IPv6, and which ports there are
    if not parts.hostname:
        raise ValueError("a Sentinel without a host")
    return Place(parts.hostname, parts.port or SENTINEL_PORT)


class Master:
    """What is known of the master. Safe for several threads.

    Connections that fail and answers of a replica put it in doubt; then the next operation asks. A Sentinel whose
    answer was of no use is asked last the next time: it may be cut off from the others.
    """

    def __init__(self, url: SentinelUrl) -> None:
        self._order = list(url.sentinels)
        self._service = url.service
        self._lock = threading.Lock()
        self._known: Place | None = None
        self._doubtful = False
        self._asked_at = float("-inf")

    @property
    def sentinels(self) -> Sequence[Place]:
        """In the order in which to ask them."""
        with self._lock:
            return tuple(self._order)

    def certain(self) -> Place | None:
        """The master, as far as there is no reason to ask; None tells the caller to ask."""
        with self._lock:
            now = time.monotonic()
            if self._known is not None and (not self._doubtful or now - self._asked_at < ASK_SECONDS):
                return self._known
            self._asked_at = now
            return None

    def doubt(self) -> None:
        """It did not answer, or answered as a replica."""
        with self._lock:
            if not self._doubtful and self._known is not None:
                self._doubtful = True
                self._order.append(self._order.pop(0))

    def learn(self, sentinel: Place, answer: Any) -> Place:
        """Takes what a Sentinel answered to :meth:`question`.

        Raises:
            ResponseError: it does not know the master.
        """
        if isinstance(answer, ResponseError):
            raise answer
        if not (isinstance(answer, list) and len(answer) == 2 and all(isinstance(part, bytes) for part in answer)):
            raise ResponseError(f"no master of the name {self._service}")
        host, port = (part.decode(errors="replace") for part in answer)
        if not port.isdigit():
            raise ResponseError("a master without a port")
        found = Place(host, int(port))
        with self._lock:
            changed = self._known != found
            self._known, self._doubtful = found, False
            self._order.sort(key=lambda one: one != sentinel)  # the others keep their order
        if changed:
            logger.info("the Redis master %s is %s:%d", self._service, *found)
        return found

    def untold(self, reasons: Sequence[str]) -> Place:
        """What to do when no Sentinel tells: the master that was known may still be there.

        Raises:
            redis.exceptions.ConnectionError: none was known.
        """
        logger.warning("no Sentinel tells where the Redis master %s is: %s", self._service, "; ".join(reasons))
        with self._lock:
            if self._known is not None:
                return self._known
        raise RedisConnectionError("no Sentinel tells where the master is")

    def question(self) -> tuple[str, str, str]:
        """The command to send."""
        return "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service


def of_a_replica(reply: Any) -> bool:
    """Whether a reply says that its server is not the master, or not any more."""
    if isinstance(reply, ReadOnlyError | MasterDownError):  # redis-py's parser takes the word away
        return True
    return isinstance(reply, ResponseError) and str(reply).startswith(("READONLY", "MASTERDOWN"))
