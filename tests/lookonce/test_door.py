"""The socket that outlives the replicas, with real sockets; its life as an actor is in tests/service/failures."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import httpx
import pytest

from lookonce.door import Door, enter
from lookonce.listening import free_port, listen

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    return free_port()


def knock(port: int) -> socket.socket:
    client = socket.create_connection((HOST, port), timeout=10)
    client.sendall(b"hello")
    return client


def hear(listener: socket.socket) -> bytes:
    listener.settimeout(10)
    accepted, _ = listener.accept()
    with accepted:
        return accepted.recv(5)


def test_connections_wait_for_the_next_replica(port: int) -> None:
    path = Door(HOST, port).path()
    first, there = enter(path)
    with knock(port):
        assert hear(first) == b"hello"
    first.close()
    there.close()
    with knock(port):  # nobody is there
        second, there = enter(path)
        assert hear(second) == b"hello"
    second.close()
    there.close()


def test_replicas_share_one_socket(port: int) -> None:
    path = Door(HOST, port).path()
    replicas = [enter(path) for _ in range(3)]
    for listener, _ in replicas:
        with knock(port):
            assert hear(listener) == b"hello"
    for ends in replicas:
        for end in ends:
            end.close()


def test_a_new_door_takes_the_socket_of_the_old_one(port: int) -> None:
    """The address is in use as long as any replica lives; whoever has the socket brings it."""
    own, _ = enter(Door(HOST, port).path())
    lost = Door(HOST, port)  # as after the death of the first
    with pytest.raises(OSError, match="in use"):
        enter(lost.path())
    copy, _ = enter(lost.path(), own)
    with knock(port):
        assert hear(copy) == b"hello"
    another, _ = enter(lost.path())
    with knock(port):
        assert hear(another) == b"hello"


def test_a_taken_address_is_told_to_every_replica(port: int) -> None:
    with listen(HOST, port):
        path = Door(HOST, port).path()
        for _ in range(2):
            with pytest.raises(OSError, match="in use"):
                enter(path)
    listener, _ = enter(path)
    listener.close()


def test_an_address_of_no_machine_is_refused(port: int) -> None:
    with pytest.raises(OSError, match="assign"):
        enter(Door("192.0.2.1", port).path())


def test_nobody_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        enter(str(tmp_path / "door"))


def test_a_replica_that_dies_while_it_asks_costs_nothing(port: int) -> None:
    path = Door(HOST, port).path()
    for _ in range(20):
        asking = socket.socket(socket.AF_UNIX)
        asking.connect(path)
        asking.close()
    listener, _ = enter(path)
    with knock(port):
        assert hear(listener) == b"hello"


def test_ipv6(port: int) -> None:
    try:
        listen("::1", port).close()
    except OSError:
        pytest.skip("no IPv6 here")
    listener, _ = enter(Door("::1", port).path())
    with listener:
        answer = threading.Thread(target=lambda: _answer_http(listener))
        answer.start()
        assert httpx.get(f"http://[::1]:{port}/", trust_env=False).status_code == httpx.codes.OK
        answer.join()


def _answer_http(listener: socket.socket) -> None:
    accepted, _ = listener.accept()
    with accepted:
        accepted.recv(1 << 16)
        accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
