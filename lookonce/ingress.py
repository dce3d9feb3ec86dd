"""The HTTP endpoint's Ray Serve shell: a replica answers HTTP itself, without a proxy of Serve's before it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from ray.exceptions import RayActorError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookonce.door import door, enter
from lookonce.listening import BACKLOG
from shared.config import Settings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

#: a replica that goes tells clients to connect anew, for so long at most, before it closes connections that are idle
FAREWELL_S = 2.0
#: how often the server's state is looked at, seconds
LOOK_S = 0.01
#: tries to reach a door that closes at this moment, and the seconds between them
DOOR_TRIES, DOOR_PAUSE_S = 50, 0.1


class IngressReplica:
    """One process that answers HTTP; wrapped as a deployment by the application.

    Args:
        settings: the whole tree.
        cache_url: URL of the embedding cache.
        pools: what it asks, so that Serve knows they are used; it finds them by their names.
    """

    def __init__(self, settings: Settings, cache_url: str, *pools: DeploymentHandle[Any]) -> None:
        self._settings = settings
        self._cache_url = cache_url
        self._entrance = Entrance(settings.http.host, settings.http.port)
        self._server: uvicorn.Server | None = None
        self._work: asyncio.Task[None] | None = None
        self._leaving = False

    async def reconfigure(self, _: object) -> None:
        """Called by Serve once before the replica counts as ready: connects to the cache, and accepts connections."""
        if self._work is None:
            listener = await self._entrance.open()
            self._work = asyncio.create_task(self._answer(listener))
            while not (self._server and self._server.started):
                if self._work.done():
                    self._work.result()
                    raise RuntimeError("the HTTP server ended at once")
                await asyncio.sleep(LOOK_S)

    async def _answer(self, listener: socket.socket) -> None:
        from lookonce.application import build_ingress  # which names this class

        app = build_ingress(self._settings, self._cache_url)
        async with app.router.lifespan_context(app):
            http = self._settings.http
            config = uvicorn.Config(
                Farewell(app, lambda: self._leaving),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=round(http.keep_alive),
                timeout_graceful_shutdown=round(http.request_timeout),
            )
            self._server = uvicorn.Server(config)
            await self._server.serve(sockets=[listener])

    async def check_health(self) -> None:
        """Raises if nothing is answered any more, which makes Serve replace the replica."""
        if self._work is not None and self._work.done():
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Called by Serve, which waits for it: lets others accept, and what has begun come to its end."""
        self._leaving = True
        if self._server and self._work:
            for accepting in self._server.servers:
                accepting.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._deserted(), FAREWELL_S)
            self._server.should_exit = True
            await self._work
        self._entrance.close()

    async def _deserted(self) -> None:
        """Returns when no client is connected any more."""
        assert self._server
        while self._server.server_state.connections:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(LOOK_S)


class Farewell:
    """Asks clients to close their connections once the replica is leaving.

    Args:
        app: what is below.
        leaving: whether it is.
    """

    def __init__(self, app: ASGIApp, leaving: Callable[[], bool]) -> None:
        self._app = app
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._leaving():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_last)


class Entrance:
    """A replica's side of the door: it keeps the listening socket alive when the door's process dies.

    Args:
        host, port: address to listen on.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._own: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._returning: asyncio.Task[None] | None = None

    async def open(self) -> socket.socket:
        """A copy of the machine's listening socket.

        Raises:
            OSError: the address cannot be listened on.
        """
        for rest in reversed(range(DOOR_TRIES)):
            try:
                path = await door(*self._address).path.remote()
                listener, connection = await asyncio.to_thread(enter, path, self._own)
                break
            except (OSError, RayActorError):
                if not rest:
                    raise
                await asyncio.sleep(DOOR_PAUSE_S)
        self._own = self._own or listener.dup()
        self._connection = connection
        asyncio.get_running_loop().add_reader(connection.fileno(), self._door_died)
        return listener

    def _door_died(self) -> None:
        self._forget_connection()
        logger.warning("the process that keeps the listening socket has died; another one takes it")
        self._returning = asyncio.get_running_loop().create_task(self._return())

    async def _return(self) -> None:
        (await self.open()).close()

    def _forget_connection(self) -> None:
        if self._connection:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Lets the door know that this replica has gone."""
        if self._returning:
            self._returning.cancel()
        self._forget_connection()
        with contextlib.suppress(OSError):
            if self._own:
                self._own.close()
