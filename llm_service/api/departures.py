"""Clients that leave before they have their answer: what was done for them stops at once."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CancelOnDeparture:
    """Cancels the work on a request whose client has closed the connection.

    Once the whole request is read, the server is asked all the time whether the client is still there; a handler that
    computes an answer does not ask by itself. What goes on after the answer is given is left alone.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        read, gone = asyncio.Event(), asyncio.Event()
        answered = False

        async def receive_once() -> Message:
            if read.is_set():  # the watch below hears of the end, since only one may listen
                await gone.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.disconnect":
                gone.set()
                read.set()
            elif not message.get("more_body"):
                read.set()
            return message

        async def send_noted(message: Message) -> None:
            nonlocal answered
            await send(message)
            answered = message["type"] == "http.response.body" and not message.get("more_body")

        async def watch() -> None:
            await read.wait()
            while not gone.is_set():
                if (await receive())["type"] == "http.disconnect":
                    gone.set()
            if not answered:
                work.cancel()

        async def answer() -> None:
            await self._app(scope, receive_once, send_noted)

        work = asyncio.create_task(answer())
        watching = asyncio.create_task(watch())
        try:
            await work
        except asyncio.CancelledError:
            work.cancel()  # if it was this task that was cancelled
            if not gone.is_set():
                raise
        except ClientDisconnect:  # in the middle of its request; nobody is to be told
            pass
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
