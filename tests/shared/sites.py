"""Small HTTP servers for tests: the wire is written by hand, so that they can misbehave in any way."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

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
