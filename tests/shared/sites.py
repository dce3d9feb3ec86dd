"""Small HTTP servers for tests, and fixtures around them.

The wire is written by hand, so that servers can misbehave in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from shared import addresses
from shared.config import ImageSettings
from shared.errors import RequestError
from shared.fetch import ImageFetcher

#: answers one request on the open connection
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def response(status: int = 200, body: bytes = b"", length: int | None = None, **headers: str) -> bytes:
    """A whole HTTP response; ``content_type`` and the like become headers."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Site:
    """One server.

    Attributes:
        answers: what each path gets: bytes for the wire, or a function that writes them.
        requests: request heads that arrived.
        connections: connections that were accepted.
    """

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Answer] = {}
        self.requests: list[str] = []
        self.connections = 0
        self.host, self.port = "", 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                self.requests.append(head)
                answer = self.answers.get(head.split()[1].partition("?")[0], response(404))
                if callable(answer):
                    await answer(writer)
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self, host: str, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
        server = await asyncio.start_server(self._serve, host, port, ssl=tls)
        self.host, self.port = server.sockets[0].getsockname()[:2]
        try:
            yield self
        finally:
            server.close()


class Names:
    """A resolver for tests: each look-up of a name takes the next of its answers, the last one again and again."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self.answers = {name.replace("_", "."): list(answer) for name, answer in answers.items()}
        self.lookups: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append(host)
        answers = self.answers.get(host.rstrip("."), [[]])
        return answers.pop(0) if len(answers) > 1 else answers[0]


PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
#: loopback addresses; the tests make the first a public one
PUBLIC, PUBLIC_TOO, INSIDE = "127.0.0.9", "127.0.0.10", "127.0.0.1"

Load = Callable[[str], Awaitable[bytes]]


@pytest.fixture
async def sites(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Site, Site]]:
    """Two servers on one port: at an address that counts as public, and at a loopback address."""
    kind_of = addresses.kind_of
    monkeypatch.setattr(
        addresses, "kind_of", lambda address: "public" if address in (PUBLIC, PUBLIC_TOO) else kind_of(address)
    )
    async with contextlib.AsyncExitStack() as stack:
        while True:
            outside = await stack.enter_async_context(Site().running(PUBLIC))
            try:
                inside = await stack.enter_async_context(Site().running(INSIDE, outside.port))
                break
            except OSError:  # somebody else has that port
                continue
        outside.answers["/a.png"] = response(200, PNG)
        inside.answers["/a.png"] = response(200, b"secret")
        yield outside, inside


@pytest.fixture
def outside(sites: tuple[Site, Site]) -> Site:
    return sites[0]


@pytest.fixture
def inside(sites: tuple[Site, Site]) -> Site:
    return sites[1]


@pytest.fixture
def names() -> Names:
    return Names(
        public_test=[[PUBLIC]],
        inside_test=[[INSIDE]],
        mixed_test=[[PUBLIC, INSIDE]],
        rebinding_test=[[PUBLIC], [INSIDE]],
        dead_test=[[PUBLIC_TOO]],
        first_dead_test=[[PUBLIC_TOO, PUBLIC]],
    )


@pytest.fixture
async def load(names: Names) -> AsyncIterator[Load]:
    fetcher = ImageFetcher(ImageSettings(fetch_timeout=1, max_bytes=100_000, max_redirects=3), resolve=names)
    yield fetcher.load
    await fetcher.aclose()


async def refusal(load: Load, url: str) -> str:
    with pytest.raises(RequestError) as caught:
        await load(url)
    assert caught.value.status == 400
    assert "Error" not in caught.value.message
    assert "object at" not in caught.value.message
    return caught.value.message
