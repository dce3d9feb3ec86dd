"""Connections for an event loop, behind one small interface; see :mod:`shared.cache.links`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redis.exceptions import ResponseError

from shared.cache.address import Address
from shared.cache.buffers import Lender
from shared.cache.connections import pieces, sense
from shared.cache.links import joined, quiet, welcome, without_delay
from shared.cache.resp import Command, Incoming, Outgoing, Pending

#: bytes that one connection moves before the loop's other callbacks have their turn
TURN_BYTES = 1 << 20


class AsyncLink(Protocol):
    """What the cache needs of a connection; whoever uses it sets the deadline."""

    async def open(self) -> None:
        """Connects, unless it is connected and nothing is left on it."""

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Sends commands together; their replies, errors among them as values."""

    async def close(self) -> None:
        """Closes the socket at once; :meth:`open` makes another."""


class AsyncRedisPyLink:
    """redis-py's connection.

    Args:
        connection: not yet connected.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def open(self) -> None:
        """See :class:`AsyncLink`."""
        if self._connection.is_connected and await self._connection.can_read():
            # closed by the server, or bytes that nobody asked for
            await self.close()
        with sense():
            await self._connection.connect()

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """See :class:`AsyncLink`."""
        for piece in pieces(self._connection.pack_commands(map(joined, commands))):
            await self._connection.send_packed_command([piece])
        return [await self._reply() for _ in commands]

    async def close(self) -> None:
        """See :class:`AsyncLink`."""
        await self._connection.disconnect(nowait=True)

    async def _reply(self) -> Any:
        try:
            with sense():
                return await self._connection.read_response()
        except ResponseError as error:
            return error


class AsyncWireLink:
    """Our own connection. The loop tells when the socket is ready; no future is made for each piece of a value.

    Args:
        address: of Redis.
        lender: of the memory.
    """

    def __init__(self, address: Address, lender: Lender) -> None:
        self._address = address
        self._lender = lender
        self._socket: socket.socket | None = None
        self._incoming = Incoming(lender)

    async def open(self) -> None:
        """See :class:`AsyncLink`."""
        if self._socket is not None:
            if self._incoming.empty and quiet(self._socket):
                return
            await self.close()
        self._socket = await self._connect()
        self._incoming = Incoming(self._lender)
        if self._address.greeting:
            welcome(await self.exchange(self._address.greeting))

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """See :class:`AsyncLink`."""
        connection, incoming = self._socket, self._incoming
        assert connection is not None, "not open"
        loop = asyncio.get_running_loop()
        outgoing = Outgoing(commands)
        await _when(
            lambda: outgoing.sent(connection.sendmsg(outgoing.next)),
            lambda step: loop.add_writer(connection, step),
            lambda: loop.remove_writer(connection),
        )
        replies: list[Any] = []

        def receive() -> bool:
            moved = 0
            while True:
                while (reply := incoming.reply()) is not Pending.PENDING:
                    replies.append(reply)
                    if len(replies) == len(commands):
                        return True
                if moved >= TURN_BYTES:  # only now: nothing may wake us again for a reply that is all here
                    return False
                count = connection.recv_into(incoming.target())
                incoming.received(count)
                moved += count

        await _when(receive, lambda step: loop.add_reader(connection, step), lambda: loop.remove_reader(connection))
        return replies

    async def close(self) -> None:
        """See :class:`AsyncLink`."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _connect(self) -> socket.socket:
        address, loop = self._address, asyncio.get_running_loop()
        if address.path:
            return await _connected(socket.AF_UNIX, address.path)
        fault: OSError | None = None
        for family, *_, target in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
            try:
                made = await _connected(family, target)
            except OSError as error:
                fault = error
                continue
            without_delay(made)
            return made
        raise fault or OSError("the host has no address")


async def _connected(family: int, target: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, target)
    except BaseException:
        made.close()
        raise
    return made


async def _when(
    step: Callable[[], bool], watch: Callable[[Callable[[], None]], None], unwatch: Callable[[], Any]
) -> None:
    """Calls ``step`` now and whenever the socket is ready, until it says that it is done."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ready() -> None:
        if done.done():
            return
        try:
            if step():
                done.set_result(None)
        except (BlockingIOError, InterruptedError):
            pass
        except Exception as error:  # noqa: BLE001 - it goes to whoever awaits
            done.set_exception(error)

    ready()
    if done.done():
        return done.result()
    watch(ready)
    try:
        await done
    finally:
        unwatch()
    return None
