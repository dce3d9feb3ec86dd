"""Clients that leave: a real server, real connections, and handlers that notice or are cancelled."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from llm_service.api.departures import CancelOnDeparture
from lookonce.listening import free_port
from tests.api.conftest import await_start

PATIENCE = 10.0


@dataclass
class Handlers:
    """What happened to the handlers."""

    begun: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)

    async def slow(self, request: Request) -> PlainTextResponse:
        """Reads everything, then works for ever."""
        await request.body()
        await self._work(1000)
        return PlainTextResponse("late")

    async def quick(self, request: Request) -> PlainTextResponse:
        """Echoes; something goes on after the answer."""
        body = await request.body()
        return PlainTextResponse(body, background=BackgroundTask(self._work, 0.5))

    async def stream(self, _: Request) -> StreamingResponse:
        """Streams for ever."""

        async def parts() -> AsyncIterator[str]:
            yield "first"
            await self._work(1000)

        return StreamingResponse(parts())

    async def _work(self, seconds: float) -> None:
        self.begun.set()
        try:
            await asyncio.sleep(seconds)
            self.finished.set()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def healthz(self, _: Request) -> PlainTextResponse:
        """For the start."""
        return PlainTextResponse("ok")


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
def port(handlers: Handlers) -> Iterator[int]:
    names = ("slow", "quick", "stream", "healthz")
    routes = [Route(f"/{name}", getattr(handlers, name), methods=["GET", "POST"]) for name in names]
    app = Starlette(routes=routes)
    app.add_middleware(CancelOnDeparture)
    number = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=number, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    await_start(f"http://127.0.0.1:{number}", thread)
    yield number
    server.should_exit = True
    thread.join(60)


def send(port: int, path: str, body: bytes = b"", declared: int | None = None) -> socket.socket:
    """A connection with a request on its way."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    length = len(body) if declared is None else declared
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("body", [b"", b"x" * 1000, b"x" * (4 << 20)], ids=["empty", "small", "large"])
def test_work_for_nobody_is_cancelled(port: int, handlers: Handlers, body: bytes) -> None:
    connection = send(port, "/slow", body)
    assert handlers.begun.wait(PATIENCE)
    connection.close()
    assert handlers.cancelled.wait(PATIENCE)


def test_a_stream_for_nobody_is_cancelled(port: int, handlers: Handlers) -> None:
    connection = send(port, "/stream")
    heard = b""
    while b"first" not in heard:
        heard += connection.recv(1 << 16)
    connection.close()
    assert handlers.cancelled.wait(PATIENCE)


def test_half_a_request_leaves_nothing(port: int, handlers: Handlers, caplog: pytest.LogCaptureFixture) -> None:
    send(port, "/slow", b"half", declared=100).close()
    assert not handlers.begun.wait(0.5)
    assert httpx.post(f"http://127.0.0.1:{port}/quick", content=b"next").text == "next"
    assert caplog.text == ""


def test_what_goes_on_after_the_answer_is_left_alone(port: int, handlers: Handlers) -> None:
    with send(port, "/quick", b"hello") as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert handlers.begun.wait(PATIENCE)
    assert handlers.finished.wait(PATIENCE)
    assert not handlers.cancelled.is_set()


def test_a_connection_serves_many_requests(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        for number in range(100):
            assert client.post("/quick", content=str(number)).text == str(number)


def test_a_server_that_stops_cancels_what_is_left(port: int, handlers: Handlers) -> None:
    connection = send(port, "/slow")
    assert handlers.begun.wait(PATIENCE)
    # the fixture's end gives it one second; what it computes must not hold the server
    connection.settimeout(0.1)
    with pytest.raises(TimeoutError):
        connection.recv(1)
