"""Records, keys, both kinds of caches behind one interface, and a proxy that interrupts, for the tests of the cache."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from shared.cache import AsyncEmbeddingCache, EmbeddingCache
from shared.config import CacheSettings
from shared.keys import Namespace, alias_key
from shared.record_values import Encoding
from shared.records import encode_record
from shared.sizing import Grid

NAMESPACE = Namespace("model", "0" * 64, "1" * 64)
KINDS = ("loop", "threads")
ALIAS, DIGEST = alias_key("a" * 64), "b" * 64
#: of a record that takes more than one packet, page or system call
LARGE = {"tokens": 256, "width": 1152}


def key(name: object) -> str:
    """A key like those of the service, one for every name."""
    return NAMESPACE.embedding_key(blake3(str(name).encode()).hexdigest())


def embedding(name: object, tokens: int = 4, width: int = 8) -> torch.Tensor:
    """float32 ``[tokens, width]``, others for every name."""
    generator = torch.Generator().manual_seed(int(blake3(str(name).encode()).hexdigest(6), 16))
    return torch.rand(tokens, width, generator=generator)


def record(name: object, tokens: int = 4, width: int = 8, encoding: Encoding = Encoding.RAW) -> bytes:
    """The record of :func:`embedding` under :func:`key`."""
    return encode_record(key(name), embedding(name, tokens, width), Grid(2, 2 * tokens), 2, encoding)


class Threaded:
    """:class:`EmbeddingCache` with awaitable operations, each in a thread; asyncio's own pool has too few."""

    def __init__(self, cache: EmbeddingCache) -> None:
        self.inner = cache
        self._threads = ThreadPoolExecutor(600)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return partial(self._call, found) if inspect.ismethod(found) else found

    async def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(method, *args, **options))


def open_cache(kind: str, url: str, **settings: Any) -> Any:
    """A cache of the kind; all operations are awaitable."""
    values = CacheSettings(**{"timeout": 2.0, **settings})
    return AsyncEmbeddingCache(values, url) if kind == "loop" else Threaded(EmbeddingCache(values, url))


@asynccontextmanager
async def cache_of(kind: str, url: str, **settings: Any) -> AsyncIterator[Any]:
    """Like :func:`open_cache`, closed at the end."""
    cache = open_cache(kind, url, **settings)
    try:
        yield cache
    finally:
        await cache.close()


class Proxy:
    """Stands between a client and Redis and lets only so many bytes pass.

    Attributes:
        replies: bytes of replies that may still pass; None for any number. ``requests`` likewise.
        accepted: connections so far.
        held: whether bytes are being held back now.
    """

    def __init__(self, upstream: Path) -> None:
        self._upstream = upstream
        self.replies: int | None = None
        self.requests: int | None = None
        self.accepted = 0
        self.held = False
        self._go = asyncio.Event()

    def release(self) -> None:
        """Lets everything pass from now on, what is held first."""
        self.replies = self.requests = None
        self.held = False
        self._go.set()
        self._go = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        up_reader, up_writer = await asyncio.open_unix_connection(str(self._upstream))
        down = asyncio.create_task(self._pump(up_reader, writer, "replies"))
        with suppress(OSError, asyncio.CancelledError):
            await self._pump(reader, up_writer, "requests")
        down.cancel()
        up_writer.close()
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        while data := await reader.read(1 << 16):
            while data:
                room = getattr(self, name)
                part = data if room is None else data[:room]
                if part:
                    writer.write(part)
                    await writer.drain()
                    data = data[len(part) :]
                    if getattr(self, name) is not None:
                        setattr(self, name, getattr(self, name) - len(part))
                elif data:
                    self.held = True
                    await self._go.wait()


@asynccontextmanager
async def proxy(upstream: Path, tcp: bool, folder: Path) -> AsyncIterator[tuple[Proxy, str]]:
    """A running proxy and its URL."""
    made = Proxy(upstream)
    if tcp:
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(made.serve, str(folder / "proxy"))
        url = f"unix://{folder / 'proxy'}"
    try:
        yield made, url
    finally:
        made.release()
        server.close()


@asynccontextmanager
async def answering(answer: Callable[[bytes], AsyncIterator[bytes]], folder: Path) -> AsyncIterator[str]:
    """A server that answers every request with what ``answer`` yields; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while request := await reader.read(1 << 16):
                async for part in answer(request):
                    writer.write(part)
                    await writer.drain()
        writer.close()

    path = folder / "liar"
    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield f"unix://{path}"
    finally:
        server.close()


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Polls; fails when it does not become true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not happen in time"
        await asyncio.sleep(0.001)
