"""The listening socket of a machine, kept by a process of its own and handed to every ingress replica there.

A replica accepts connections from a copy of the socket. While one is replaced, or none is alive for a moment, new
connections wait in the kernel's queue instead of being refused, and no connection that waits is lost with a replica.
The process accepts nothing itself; it ends some time after the last replica has left.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lookonce.listening import listen

NAMESPACE = "lookonce-doors"
#: an unused door ends after so long; a replica that died is back by then
PATIENCE_S = 60.0
#: what a replica says: it wants the socket, or it brings the one it has, since the process that kept it has died
WANT, BRING = b"?", b"!"
GIVEN, REFUSED = b"+", b"-"
_WORDS = 512


class Door:
    """Keeps one listening socket; a detached actor, one for each machine and port.

    Args:
        host, port: address to listen on.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._inside = 0
        self._unused = self._later()
        self._folder = Path(tempfile.mkdtemp(prefix="door-"))  # only this user reads it
        self._path = self._folder / "door"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._path))
        self._server.listen()
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def path(self) -> str:
        """Of the unix socket at which replicas of this machine ask."""
        return str(self._path)

    def _serve(self) -> None:
        while True:
            replica, _ = self._server.accept()
            threading.Thread(target=self._attend, args=(replica,), name="replica", daemon=True).start()

    def _attend(self, replica: socket.socket) -> None:
        with self._lock:
            self._inside += 1
            self._unused.cancel()
        with replica, contextlib.suppress(OSError):
            self._answer(replica)
            replica.recv(1)  # nothing, when the replica is gone
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._unused = self._later()

    def _answer(self, replica: socket.socket) -> None:
        _, files, _, _ = socket.recv_fds(replica, 1, 1)
        with self._lock:
            brought = [socket.socket(fileno=file) for file in files]
            try:
                self._listener = self._listener or (brought.pop() if brought else listen(*self._address))
            except OSError as error:
                replica.sendall(REFUSED + str(error).encode()[:_WORDS])
                return
            for spare in brought:
                spare.close()
        socket.send_fds(replica, [GIVEN], [self._listener.fileno()])

    def _later(self) -> threading.Timer:
        timer = threading.Timer(PATIENCE_S, self._end)
        timer.daemon = True
        timer.start()
        return timer

    def _end(self) -> None:
        with self._lock:
            if self._inside:
                return
            shutil.rmtree(self._folder, ignore_errors=True)
            ray.kill(ray.get_runtime_context().current_actor)


def door(host: str, port: int) -> ActorHandle[Door]:
    """The door of the machine that this process of Ray runs on, opened if need be."""
    node = ray.get_runtime_context().get_node_id()
    actor = ray.remote(Door).options(
        name=f"{node}:{port}",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return actor.remote(host, port)


def enter(path: str, own: socket.socket | None = None) -> tuple[socket.socket, socket.socket]:
    """Asks a door for its socket.

    Args:
        path: of the door.
        own: copy of the socket from an earlier door, which the new one keeps from now on.

    Returns:
        A copy of the listening socket, and a connection that says the replica is there, for as long as it is open;
        it reads as ended when the door's process dies.

    Raises:
        OSError: the address cannot be listened on, or nobody is at the door.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(5)
        connection.connect(path)
        if own:
            socket.send_fds(connection, [BRING], [own.fileno()])
        else:
            connection.sendall(WANT)
        answer, files, _, _ = socket.recv_fds(connection, 1 + _WORDS, 1)
        if not files:
            raise OSError(answer[1:].decode() or "the door has closed")
        connection.settimeout(None)
        return socket.socket(fileno=files[0]), connection
    except BaseException:
        connection.close()
        raise


def close_all() -> None:
    """Ends the doors of the cluster: nothing listens any more."""
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE:
            with contextlib.suppress(ValueError):  # it has just ended by itself
                ray.kill(ray.get_actor(named["name"], NAMESPACE))
