"""Where Redis is, as far as our own client needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis.asyncio.connection
import redis.connection

from shared.cache.resp import Command

_PLAIN = (
    redis.connection.Connection,
    redis.connection.UnixDomainSocketConnection,
    redis.asyncio.connection.Connection,
    redis.asyncio.connection.UnixDomainSocketConnection,
)
_KNOWN = {"host", "port", "path", "db", "username", "password"}


@dataclass(frozen=True)
class Address:
    """A Redis that is reached over a plain socket.

    Attributes:
        path: of the unix socket; empty for TCP.
        host, port: for TCP.
        greeting: commands that a new connection begins with.
    """

    path: str
    host: str
    port: int
    greeting: tuple[Command, ...]


def plain_address(parsed: dict[str, Any], pinned: dict[str, Any]) -> Address | None:
    """The address in a URL; None when it wants something that redis-py must do: TLS, or options of its own.

    Args:
        parsed: what redis-py reads in the URL.
        pinned: options that the URL cannot change, and which therefore don't matter in it.
    """
    if parsed.get("connection_class", redis.connection.Connection) not in _PLAIN:
        return None
    if parsed.keys() - _KNOWN - pinned.keys() - {"connection_class"}:
        return None
    user, password, database = parsed.get("username"), parsed.get("password"), int(parsed.get("db") or 0)
    greeting: list[Command] = []
    if user or password:
        greeting.append(("AUTH", user, password or "") if user else ("AUTH", password or ""))
    if database:
        greeting.append(("SELECT", database))
    return Address(
        parsed.get("path", ""), parsed.get("host", "localhost"), int(parsed.get("port", 6379)), tuple(greeting)
    )
