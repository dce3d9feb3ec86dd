"""A master, a replica of it and three Sentinels: real processes, for the tests of failover."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from shared.local_redis import find_server

SERVICE = "embeddings"
SENTINELS, QUORUM = 3, 2
#: silence after which a Sentinel takes the master for dead, milliseconds
DOWN_AFTER = 500
START_SECONDS = 20.0


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now."""
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Group:
    """Two servers and their Sentinels.

    Args:
        folder: for their files.
        password: of the servers, and the Sentinels' own with an ``s`` before it.
    """

    def __init__(self, folder: Path, password: str = "") -> None:
        self._folder, self.password = folder, password
        ports = free_ports(2 + SENTINELS)
        self.servers, self.sentinels = ports[:2], ports[2:]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """For clients."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        if not self.password:
            return f"redis+sentinel://{hosts}/{SERVICE}/0"
        return f"redis+sentinel://:{self.password}@{hosts}/{SERVICE}/0?sentinel_password=s{self.password}"

    def start_server(self, port: int, master: int | None = None) -> None:
        """Starts one of the servers; with ``master`` as a replica of it."""
        words = [
            "--port",
            port,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            self._folder,
            "--repl-diskless-sync-delay",
            0,
        ]
        if self.password:
            words += ["--requirepass", self.password, "--masterauth", self.password]
        if master is not None:
            words += ["--replicaof", "127.0.0.1", master]
        self._start(port, words)

    def start_sentinel(self, port: int) -> None:
        """Starts one of the Sentinels."""
        watch = f"sentinel monitor {SERVICE} 127.0.0.1 {self.servers[0]} {QUORUM}"
        lines = [f"port {port}", "bind 127.0.0.1", f"dir {self._folder}", watch]
        lines += [
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER}",
            f"sentinel failover-timeout {SERVICE} 3000",
        ]
        if self.password:
            lines += [f"sentinel auth-pass {SERVICE} {self.password}", f"requirepass s{self.password}"]
            lines += [f"sentinel sentinel-pass s{self.password}"]
        path = self._folder / f"sentinel-{port}.conf"
        path.write_text("\n".join(lines) + "\n")
        self._start(port, [path, "--sentinel"])

    def client(self, port: int) -> redis.Redis:
        """A client of one process."""
        password = f"s{self.password}" if self.password and port in self.sentinels else self.password
        return redis.Redis(port=port, password=password or None, socket_timeout=5)

    def kill(self, port: int) -> None:
        """SIGKILL."""
        process = self.processes.pop(port)
        process.kill()
        process.wait()

    def ready(self) -> None:
        """Waits until a failover would work: the replica is in step, and the Sentinels know it and each other."""
        end = time.monotonic() + START_SECONDS
        while not (self._in_step() and all(map(self._knows_all, self.sentinels))):
            assert time.monotonic() < end, "the Sentinels do not come together"
            time.sleep(0.1)

    def master(self) -> int:
        """Port of the master, as most Sentinels see it."""
        told = [self._told(port) for port in self.sentinels if port in self.processes]
        return max(told, key=told.count)

    def until_moved(self, before: int, seconds: float = 30) -> None:
        """Waits until another server is the master."""
        end = time.monotonic() + seconds
        while self.master() == before:
            assert time.monotonic() < end, "no failover"
            time.sleep(0.05)

    def _told(self, port: int) -> int:
        with self.client(port) as client:
            return int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def _in_step(self) -> bool:
        (replica,) = (port for port in self.servers if port != self.master())
        with self.client(replica) as client:
            return client.info("replication").get("master_link_status") == "up"

    def _knows_all(self, port: int) -> bool:
        with self.client(port) as client:
            told = client.info("sentinel")["master0"]
        return told["status"] == "ok" and told["slaves"] == 1 and told["sentinels"] == SENTINELS

    def _start(self, port: int, words: Sequence[object]) -> None:
        self.processes[port] = subprocess.Popen([str(find_server()), *map(str, words)], stdout=subprocess.DEVNULL)
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                with self.client(port) as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < end, "a server does not start"
                time.sleep(0.02)


@contextmanager
def group(folder: Path, password: str = "") -> Iterator[Group]:
    """A group that is ready; ended at the end."""
    made = Group(folder, password)
    try:
        made.start_server(made.servers[0])
        made.start_server(made.servers[1], made.servers[0])
        for port in made.sentinels:
            made.start_sentinel(port)
        made.ready()
        yield made
    finally:
        for port in list(made.processes):
            made.kill(port)
