"""A proxy between the cache and Redis that delays, cuts and corrupts, for tests under load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path


class ChaosProxy:
    """Passes everything on while nothing is set.

    Attributes:
        delay: seconds that every piece of a reply is held back.
        cut: share of pieces, either way, after whose half the connection closes.
        flip: share of pieces, either way, in which one bit is turned.
        hurt: pieces so far that were delayed, cut or corrupted.
    """

    def __init__(self, upstream: Path) -> None:
        self._upstream = upstream
        self._random = random.Random(11)
        self.delay = self.cut = self.flip = 0.0
        self.hurt = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(str(self._upstream))
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer, 0.0)),
            asyncio.create_task(self._pump(up_reader, writer, 1.0)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for end in (writer, up_writer):
            end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delayed: float) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.delay * delayed:
                    self.hurt += 1
                    await asyncio.sleep(self.delay)
                if self._random.random() < self.flip:
                    self.hurt += 1
                    bad = bytearray(data)
                    bad[self._random.randrange(len(bad))] ^= 1 << self._random.randrange(8)
                    data = bytes(bad)
                if self._random.random() < self.cut:
                    self.hurt += 1
                    writer.write(data[: len(data) // 2])
                    return
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def chaos_proxy(upstream: Path, folder: Path) -> AsyncIterator[tuple[ChaosProxy, str]]:
    """A running proxy and its URL."""
    proxy = ChaosProxy(upstream)
    server = await asyncio.start_unix_server(proxy.serve, str(folder / "chaos"))
    try:
        yield proxy, f"unix://{folder / 'chaos'}"
    finally:
        server.close()
