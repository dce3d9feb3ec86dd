"""H5, H6, H7, H8: image URLs over HTTP. None leads inside, none hangs, and none costs memory."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from llm_service.api.app import create_app
from llm_service.api.chat import ImageService
from llm_service.api.endpoint import Backend
from llm_service.api.vision import ImageResolver
from lookonce.listening import free_port
from shared import addresses
from shared.cache import AsyncEmbeddingCache
from shared.config import AccessSettings, CacheSettings, HttpSettings, ImageSettings, ModelSettings
from shared.families import size_rule
from shared.fetch import ImageFetcher
from shared.local_redis import LocalRedis
from tests.api.conftest import MODEL, ROOT, EngineEncoderPool, await_start
from tests.shared import picture_files as files
from tests.shared.sites import INSIDE, PUBLIC, PUBLIC_TOO, Names, Site, response
from tests.shared.url_vectors import BAD_LOCATIONS, REFUSED

#: of all of it, seconds; one URL's deadline is DEADLINE
DEADLINE, SLACK = 1.0, 2.0
LIMIT = 200_000
#: resident memory, bytes
GROWTH = 300e6
HEAP = re.compile(r"0x[0-9a-f]{6,}|object at|Traceback|secret", re.IGNORECASE)
PICTURE = files.save(files.Image.fromarray(files.patches()), "PNG")


async def _never(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def _slow(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


async def _slow_head(writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.05)


async def _endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


async def _endless_chunks(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        await writer.drain()


async def _endless_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X: " + b"y" * 60_000 + b"\r\n")
        await writer.drain()


async def _cut(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nabc")


async def _once(writer: asyncio.StreamWriter) -> None:
    """The connection ends, so the next request looks the name up again."""
    writer.write(response(200, PICTURE))


#: pages of the public server: path, answer, and a word that the refusal must have
PAGES: dict[str, tuple[bytes | Callable[[asyncio.StreamWriter], Awaitable[None]], str]] = {
    "/404": (response(404, b"<html>"), "404"),
    "/500": (response(500), "500"),
    "/204": (response(204), "204"),
    "/html": (response(200, b"<!DOCTYPE html><html>", content_type="image/png"), "HTML"),
    "/nothing": (response(200, b""), "empty"),
    "/large": (response(200, b"", length=10**12), "bytes"),
    "/packed": (response(200, b"x", content_encoding="gzip"), "encoding"),
    "/junk": (b"hello\r\n\r\n", "could not be read"),
    "/loop": (response(302, location="/loop"), "redirects"),
    "/nowhere": (response(302), "302"),
    "/never": (_never, "longer"),
    "/slow": (_slow, "longer"),
    "/slow-head": (_slow_head, "longer"),
    "/endless": (_endless, "more than"),
    "/endless-chunks": (_endless_chunks, "more than"),
    "/endless-head": (_endless_head, "could not be read"),
    "/cut": (_cut, "could not be read"),
}


@contextmanager
def _in_thread(main: Callable[[asyncio.Event, Callable[[], None]], Awaitable[None]]) -> Iterator[None]:
    """Runs an event loop beside the test until the block ends."""
    ready, loops = threading.Event(), []
    stop = asyncio.Event()

    def run() -> None:
        async def body() -> None:
            loops.append(asyncio.get_running_loop())
            await main(stop, ready.set)

        asyncio.run(body())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    try:
        yield
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(20)


class Sites:
    """A server at an address that counts as public, and one inside, on one port."""

    def __init__(self) -> None:
        self.outside, self.inside = Site(), Site()

    async def run(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        async with self.outside.running(PUBLIC), self.inside.running(INSIDE, self.outside.port):
            ready()
            await stop.wait()


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    found = Sites()
    found.inside.answers["/a.png"] = response(200, b"secret")
    found.outside.answers |= {path: answer for path, (answer, _) in PAGES.items()}
    found.outside.answers["/a.png"] = response(200, PICTURE)
    found.outside.answers["/once"] = _once
    kind_of = addresses.kind_of
    with pytest.MonkeyPatch.context() as patch, _in_thread(found.run):
        patch.setattr(
            addresses, "kind_of", lambda address: "public" if address in (PUBLIC, PUBLIC_TOO) else kind_of(address)
        )
        for number, location in enumerate(BAD_LOCATIONS):
            there = location.replace("{port}", str(found.outside.port))
            found.outside.answers[f"/to/{number}"] = response(302, location=there)
        yield found


@pytest.fixture(scope="module")
def url(sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The application with the demo's tower and the safe defaults for URLs."""
    from encoder_service.engine import EncoderEngine

    model = ModelSettings(name=MODEL, checkpoint=ROOT / "models" / "demo")
    images, settings = ImageSettings(fetch_timeout=DEADLINE, max_bytes=LIMIT, max_redirects=3), CacheSettings()
    names = Names(
        public_test=[[PUBLIC]],
        inside_test=[[INSIDE]],
        mixed_test=[[PUBLIC, INSIDE]],
        rebinding_test=[[PUBLIC], [INSIDE]],
        dead_test=[[PUBLIC_TOO]],
    )
    redis = LocalRedis(tmp_path_factory.mktemp("redis"), maxmemory_mib=64)

    @asynccontextmanager
    async def connect() -> AsyncIterator[Backend]:
        cache, fetcher = AsyncEmbeddingCache(settings, redis.url), ImageFetcher(images, resolve=names)
        encoder = EncoderEngine(model, images, cache)
        resolver = ImageResolver(EngineEncoderPool(encoder), cache, fetcher, images, MODEL)
        try:
            await encoder.start()
            yield Backend({MODEL: ImageService(resolver, size_rule(model.checkpoint))}, cache)
        finally:
            await encoder.stop()
            await fetcher.aclose()
            await cache.close()

    redis.start()
    try:
        port = free_port()
        app = create_app(HttpSettings(port=port), AccessSettings(), connect)
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            base = f"http://127.0.0.1:{port}"
            await_start(base, thread)
            yield base
        finally:
            server.should_exit = True
            thread.join(60)
    finally:
        redis.stop()


def ask(url: str, image: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/embeddings", json={"model": MODEL, "input": [image]}, timeout=30)


def _peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def _cases(port: int) -> dict[str, str]:
    """URLs, with a word that their refusals must have."""
    there = {address.replace("{port}", str(port)): "" for address in REFUSED}
    there |= {f"http://public.test:{port}/to/{number}": "" for number in range(len(BAD_LOCATIONS))}
    there |= {f"http://public.test:{port}{path}": word for path, (_, word) in PAGES.items()}
    return there | {
        f"http://dead.test:{port}/a.png": "could not be read",
        "file:///etc/passwd": "file",
        "file:///etc/%2e%2e/etc/passwd": "file",
        "file://localhost/etc/passwd": "file",
        "/etc/passwd": "scheme",
        "data:text/html,<html>": "HTML",
    }


@pytest.mark.timeout(300)
def test_no_url_leads_inside_or_hangs_or_costs_memory(url: str, sites: Sites) -> None:
    cases = _cases(sites.outside.port)
    assert len(cases) >= 90
    good = f"http://public.test:{sites.outside.port}/a.png"
    assert ask(url, good).status_code == 200
    Path("/proc/self/clear_refs").write_text("5")
    before, faults = _peak(), []
    for address, word in cases.items():
        begin = time.monotonic()
        answer = ask(url, address)
        seconds = time.monotonic() - begin
        message = answer.json()["error"]["message"] if answer.status_code != 200 else ""
        if answer.status_code != 400 or word not in message or "image 0" not in message or HEAP.search(message):
            faults.append(f"{address[:200]!r}: {answer.status_code} {answer.text[:200]}")
        if seconds > DEADLINE + SLACK:
            faults.append(f"{address[:200]!r}: {seconds:.1f} s")
        if ask(url, good).status_code != 200:
            faults.append(f"the request after {address[:200]!r}")
    assert not faults, "\n".join(faults)
    assert sites.inside.connections == 0
    assert _peak() - before < GROWTH


def test_a_name_that_changes_its_mind_is_resolved_for_every_connection(url: str, sites: Sites) -> None:
    """H7: the address that was checked is the one that is connected to; when it turns inside, that is refused."""
    answers = [ask(url, f"http://rebinding.test:{sites.outside.port}/once") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 400, 400]
    assert sites.inside.connections == 0
