"""The answering side: one connection to each process that asks, shared by all answers for it."""

from __future__ import annotations

import asyncio
import logging

from llm_service.messages import Chunk
from llm_service.replies.wire import ReplyAddress, frame
from shared.errors import Unavailable

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0


class ReplyStream:
    """The way of one answer."""

    def __init__(self, writer: asyncio.StreamWriter, address: ReplyAddress) -> None:
        self._writer = writer
        self._address = address

    async def send(self, chunk: Chunk | None) -> None:
        """Sends a chunk, or the end; waits while the other side is slow, in which time the engine gathers tokens.

        Raises:
            Unavailable: whoever asked is gone.
        """
        try:
            if self._writer.is_closing():
                raise ConnectionResetError
            self._writer.write(frame(self._address.stream, chunk))
            await self._writer.drain()
        except OSError as error:
            raise Unavailable("whoever asked for this answer is gone") from error


class ReplySenders:
    """Connections of one replica; of one event loop."""

    def __init__(self) -> None:
        self._connecting = asyncio.Lock()
        self._writers: dict[tuple[str, int, bytes], asyncio.StreamWriter] = {}
        self._watches: set[asyncio.Task[None]] = set()

    async def open(self, address: ReplyAddress) -> ReplyStream:
        """The way to an address.

        Raises:
            Unavailable: it cannot be reached.
        """
        whom = (address.host, address.port, address.secret)
        async with self._connecting:
            writer = self._writers.get(whom)
            if writer is None or writer.is_closing():
                writer = self._writers[whom] = await self._connect(address)
        return ReplyStream(writer, address)

    async def _connect(self, address: ReplyAddress) -> asyncio.StreamWriter:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except OSError as error:  # TimeoutError is one
            raise Unavailable(
                f"a language replica cannot reach {address.host}:{address.port}, where its answer is awaited "
                f"({error.strerror or 'no connection in time'}); nodes of a cluster must reach each other on all ports"
            ) from error
        writer.write(address.secret)
        watch = asyncio.ensure_future(self._watch(reader, writer))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return writer

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Nothing is ever sent this way: what can be read is the end."""
        try:
            await reader.read(1)
        except OSError:
            pass
        finally:
            writer.close()
            for whom in [whom for whom, known in self._writers.items() if known is writer]:
                del self._writers[whom]
