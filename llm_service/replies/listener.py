"""The asking side: one listening socket, and a queue for each answer that is awaited."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import cast

from llm_service.messages import Chunk
from llm_service.replies.wire import SECRET_BYTES, FrameReader, ReplyAddress, WireError
from shared.errors import ReplicaLost

logger = logging.getLogger(__name__)

#: for a connection to tell the secret
GREETING_SECONDS = 5.0
#: for the last frames of an answer whose call has ended
LAST_FRAMES_SECONDS = 10.0


class Replies:
    """The chunks of one answer as they come; of one event loop.

    Attributes:
        address: to give to the replica.
    """

    def __init__(self, address: ReplyAddress, forget: Callable[[int], None]) -> None:
        self.address = address
        self._forget = forget
        self._queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        self._overdue: asyncio.TimerHandle | None = None
        self._closed = False

    def put(self, chunk: Chunk | None) -> None:
        """A chunk, or the end."""
        self._queue.put_nowait(chunk)

    def fail(self, error: BaseException) -> None:
        """Raises this after the chunks that have come."""
        self._queue.put_nowait(error)

    def sent(self) -> None:
        """The replica has sent everything: what does not come soon was lost on the way."""
        if self._closed:
            return
        error = ReplicaLost("the connection from a language replica was cut", retry_after=1)
        self._overdue = asyncio.get_running_loop().call_later(LAST_FRAMES_SECONDS, self.fail, error)

    def close(self) -> None:
        """Ignores what still comes."""
        self._closed = True
        self._forget(self.address.stream)
        if self._overdue is not None:
            self._overdue.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while (found := await self._queue.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found


class ReplyListener:
    """Takes connections of replicas, and gives each frame to its answer.

    Args:
        host: address of this machine by which replicas reach it; nothing else is listened on.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._numbers = itertools.count(1)
        self._awaited: dict[int, Replies] = {}
        self._starting = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def open(self) -> Replies:
        """A new answer's place; :meth:`Replies.close` it.

        Raises:
            OSError: the address cannot be listened on.
        """
        async with self._starting:
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(lambda: _Connection(self), self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        address = ReplyAddress(self._host, port, self._secret, next(self._numbers))
        replies = self._awaited[address.stream] = Replies(address, self._forget)
        return replies

    async def close(self) -> None:
        """Ends the socket and its connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()

    def _forget(self, stream: int) -> None:
        self._awaited.pop(stream, None)

    def greeted(self, secret: bytes) -> bool:
        """Whether a connection may go on."""
        return hmac.compare_digest(secret, self._secret)

    def deliver(self, stream: int, chunk: Chunk | None) -> bool:
        """Gives a chunk to whom it is for; whether somebody still waits for it."""
        replies = self._awaited.get(stream)
        if replies is not None:
            replies.put(chunk)
        return replies is not None

    def lost(self, streams: set[int]) -> None:
        """A connection ended in the middle of these."""
        for stream in streams:
            if (replies := self._awaited.get(stream)) is not None:
                replies.fail(ReplicaLost("the connection from a language replica ended", retry_after=5))

    def note(self, connection: _Connection, *, here: bool) -> None:
        """A connection came or went."""
        (self._connections.add if here else self._connections.discard)(connection)


class _Connection(asyncio.Protocol):
    """One replica's."""

    def __init__(self, listener: ReplyListener) -> None:
        self._listener = listener
        self._frames = FrameReader()
        self._greeting: bytes | None = b""
        #: begun and not ended
        self._begun: set[int] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by class
        self._listener.note(self, here=True)
        self._deadline = asyncio.get_running_loop().call_later(GREETING_SECONDS, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._greeting is not None:
            self._greeting += data
            if len(self._greeting) < SECRET_BYTES:
                return
            secret, data = self._greeting[:SECRET_BYTES], self._greeting[SECRET_BYTES:]
            self._greeting = None
            self._deadline.cancel()
            if not self._listener.greeted(secret):
                logger.warning("a connection without the secret was refused")
                self.abort()
                return
        try:
            for stream, chunk in self._frames.feed(data):
                self._deliver(stream, chunk)
        except WireError as error:
            logger.error("a replica's connection is closed: it sent %s", error)
            self.abort()

    def _deliver(self, stream: int, chunk: Chunk | None) -> None:
        if self._listener.deliver(stream, chunk) and chunk is not None:
            self._begun.add(stream)
        else:
            self._begun.discard(stream)

    def connection_lost(self, _: Exception | None) -> None:
        self._deadline.cancel()
        self._listener.note(self, here=False)
        self._listener.lost(self._begun)

    def abort(self) -> None:
        """Ends it now."""
        self._transport.abort()
