"""Connections for threads, behind one small interface: redis-py's, and our own for large values.

A link is opened before each operation, used by one caller at a time, and closed whenever an operation does not end as
it should, so that no reply ever reaches another caller.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from redis.exceptions import ResponseError

from shared.cache.address import Address
from shared.cache.buffers import Lender
from shared.cache.connections import FAULTS, sense, time_left
from shared.cache.resp import Command, Incoming, Outgoing, Pending


class Link(Protocol):
    """What the cache needs of a connection. Everything keeps to the thread's deadline."""

    def open(self) -> None:
        """Connects, unless it is connected and nothing is left on it."""

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Sends commands together; their replies, errors among them as values."""

    def close(self) -> None:
        """Closes the socket; :meth:`open` makes another."""


class RedisPyLink:
    """redis-py's connection.

    Args:
        connection: not yet connected.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def open(self) -> None:
        """See :class:`Link`."""
        with sense():
            if self._connection.is_connected:
                with suppress(*FAULTS):
                    if not self._connection.can_read():
                        return
                # closed by the server, or bytes that nobody asked for
                self._connection.disconnect()
            self._connection.connect()

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """See :class:`Link`."""
        self._connection.send_packed_command(self._connection.pack_commands(map(joined, commands)))
        return [self._reply() for _ in commands]

    def close(self) -> None:
        """See :class:`Link`."""
        self._connection.disconnect()

    def _reply(self) -> Any:
        try:
            with sense():
                return self._connection.read_response()
        except ResponseError as error:
            return error


class WireLink:
    """Our own connection: receives into lent memory, sends without joining.

    Args:
        address: of Redis.
        lender: of the memory.
    """

    def __init__(self, address: Address, lender: Lender) -> None:
        self._address = address
        self._lender = lender
        self._socket: socket.socket | None = None
        self._incoming = Incoming(lender)

    def open(self) -> None:
        """See :class:`Link`."""
        if self._socket is not None:
            if self._incoming.empty and quiet(self._socket):
                return
            self.close()
        self._socket = self._connect()
        self._incoming = Incoming(self._lender)
        if self._address.greeting:
            welcome(self.exchange(self._address.greeting))

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """See :class:`Link`."""
        connection = self._socket
        assert connection is not None, "not open"
        outgoing, done = Outgoing(commands), False
        while not done:
            connection.settimeout(time_left())
            done = outgoing.sent(connection.sendmsg(outgoing.next))
        return [self._reply(connection) for _ in commands]

    def close(self) -> None:
        """See :class:`Link`."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _reply(self, connection: socket.socket) -> Any:
        while (reply := self._incoming.reply()) is Pending.PENDING:
            connection.settimeout(time_left())
            self._incoming.received(connection.recv_into(self._incoming.target()))
        return reply

    def _connect(self) -> socket.socket:
        address = self._address
        if not address.path:
            made = socket.create_connection((address.host, address.port), time_left())
            without_delay(made)
            return made
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(time_left())
            made.connect(address.path)
        except BaseException:
            made.close()
            raise
        return made


def quiet(connection: socket.socket) -> bool:
    """Whether a socket is open and nothing waits on it."""
    connection.setblocking(False)  # with a timeout set, Python would wait for the first byte
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def welcome(replies: list[Any]) -> None:
    """Looks at what Redis says to the greeting.

    Raises:
        ResponseError: it does not like it.
    """
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply


def without_delay(connection: socket.socket) -> None:
    """Small packets go at once, and a peer that is gone is noticed some day."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def joined(command: Command) -> Command:
    """Values in several pieces as one, for redis-py."""
    return tuple(b"".join(argument) if isinstance(argument, tuple) else argument for argument in command)
