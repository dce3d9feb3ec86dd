"""A Ray cluster on one machine: nodes in namespaces with addresses and files of their own, or plain raylets."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from lookonce.listening import free_port
from shared.local_redis import find_server

ROOT = Path(__file__).parent.parent.parent.parent
RAY = Path(sys.executable).parent / "ray"
BRIDGE, PREFIX = "lookonce0", "10.213.77."
#: what makes a namespace's own folder for temporary files, with the code still in its place
OWN_FILES = """
set -e
keep=$(mktemp -d /var/lookonce-XXXXXX)
mount --bind "$1" "$keep"
mount -t tmpfs tmpfs /tmp
mkdir -p "$1"
mount --bind "$keep" "$1"
umount "$keep"
rmdir "$keep"
ip link set lo up
shift
exec "$@"
"""

#: waits for machines of a cluster
COUNT = """
import sys, time, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(0.3)
"""


@dataclass
class Machine:
    """One node of the cluster.

    Attributes:
        address: that others reach it at.
        process: of its ``ray start``.
        namespace: of its network; empty for a plain raylet.
    """

    address: str
    process: subprocess.Popen[bytes]
    namespace: str = ""

    def processes(self) -> list[psutil.Process]:
        """Everything that runs there."""
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def roles(self) -> list[str]:
        """What Serve's replicas there do."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if title.startswith("ray::ServeReplica:lookonce:"):
                    found.append(title.split(":")[4].split(".")[0].split()[0])
        return sorted(found)

    def kill(self) -> None:
        """As a power cut would."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def cut(self) -> None:
        """Takes its network away; its processes go on."""
        sh("ip", "link", "set", f"{self.namespace}-b", "down")

    def mend(self) -> None:
        """Gives it back."""
        sh("ip", "link", "set", f"{self.namespace}-b", "up")


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def own_address() -> str:
    """At which Ray makes machines known unless it is told another."""
    from ray.util import get_node_ip_address

    address: str = get_node_ip_address()
    return address


def can_isolate() -> bool:
    """Whether this user may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True).returncode == 0


class Cluster:
    """A head and other machines.

    Args:
        folder: for temporary files of the head, with a short name.
        isolated: every machine but the head in namespaces of its own.
        host: address of machines that are not.
    """

    def __init__(self, folder: Path, *, isolated: bool, host: str = "127.0.0.1") -> None:
        self._stack = ExitStack()
        self._folder = folder
        self._isolated = isolated
        self._number = 1
        self.machines: list[Machine] = []
        if isolated:
            self._bridge()
        host = f"{PREFIX}1" if isolated else host
        self.address = f"{host}:{free_port(host)}"
        self.redis = f"redis://{host}:{free_port(host)}/0"

    def _bridge(self) -> None:
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)  # of a run that was killed
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        self._stack.callback(sh, "ip", "link", "del", BRIDGE)
        sh("ip", "addr", "add", f"{PREFIX}1/24", "dev", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")

    def start_redis(self) -> None:
        """A Redis that every machine reaches."""
        host, port = self.redis.removeprefix("redis://").removesuffix("/0").split(":")
        command = [str(find_server()), "--bind", host, "--port", port, "--save", "", "--protected-mode", "no"]
        limits = ["--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]
        self._keep(subprocess.Popen([*command, *limits], cwd=self._folder, stdout=subprocess.DEVNULL))

    def start_head(self, cpus: int, launcher: Path | None = None) -> Machine:
        """The machine that the others join.

        Args:
            cpus: as Ray counts them.
            launcher: configuration of an autoscaler, which runs there.
        """
        if not (Path.home() / ".ray" / "auth_token").exists():  # ray.init would make one for itself
            sh(str(RAY), "get-auth-token", "--generate")
        host, port = self.address.split(":")
        command = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
        fake: dict[str, str] = {}
        if launcher is not None:
            command.append(f"--autoscaling-config={launcher}")
            fake = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        return self._start(command, cpus, self._folder / "head", host, environment=fake)

    def start_worker(self, cpus: int) -> Machine:
        self._number += 1
        host = f"{PREFIX}{self._number}" if self._isolated else self.address.split(":")[0]
        command = [f"--address={self.address}", f"--node-ip-address={host}"]
        if not self._isolated:
            return self._start(command, cpus, self._folder / f"w{self._number}", host)
        return self._start(command, cpus, Path("/tmp/ray"), host, self._namespace(host))

    def wait_for_machines(self, number: int) -> None:
        """Until so many are known to the head; replicas that start earlier cannot be spread over all."""
        environment = os.environ | {"RAY_AUTH_MODE": "token"}
        command = [sys.executable, "-c", COUNT, self.address, str(number)]
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=240)

    def _namespace(self, host: str) -> str:
        name = f"lkn{self._number}"
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        sh("ip", "netns", "add", name)
        self._stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
        sh("ip", "link", "add", f"{name}-b", "type", "veth", "peer", "name", "eth0", "netns", name)
        sh("ip", "link", "set", f"{name}-b", "master", BRIDGE)
        sh("ip", "link", "set", f"{name}-b", "up")
        sh("ip", "-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
        sh("ip", "-n", name, "link", "set", "eth0", "up")
        return name

    def _start(
        self,
        arguments: list[str],
        cpus: int,
        folder: Path,
        host: str,
        namespace: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Machine:
        ray = [str(RAY), "start", "--block", f"--num-cpus={cpus}", "--object-store-memory=100000000", *arguments]
        ray += [f"--temp-dir={folder}"] if "--head" in arguments or namespace == "" else []
        prefix: list[str] = []
        if namespace:
            own = ["unshare", "-m", "--propagation", "private", "sh", "-c", OWN_FILES, "own", str(ROOT)]
            prefix = ["ip", "netns", "exec", namespace, *own]
        variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "token"}
        variables |= {"TMPDIR": "/tmp"} | dict(environment or {})
        process = subprocess.Popen([*prefix, *ray], cwd=ROOT, env=os.environ | variables, stdout=subprocess.DEVNULL)
        machine = Machine(host, process, namespace)
        self._stack.callback(machine.kill)
        self.machines.append(machine)
        return machine

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.kill)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def cluster(folder: Path, *, isolated: bool, head: int, workers: tuple[int, ...]) -> Iterator[Cluster]:
    """A cluster with a Redis beside it.

    Args:
        folder: for temporary files.
        isolated: machines in namespaces of their own.
        head: CPUs of the head, as Ray counts them.
        workers: of every other machine.
    """
    made = Cluster(folder, isolated=isolated)
    try:
        made.start_redis()
        made.start_head(head)
        wait_for_port(made.address)
        for cpus in workers:
            made.start_worker(cpus)
        made.wait_for_machines(1 + len(workers))
        yield made
    finally:
        made.close()


def wait_for_port(address: str, seconds: float = 240) -> None:
    import socket

    host, port = address.split(":")
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        assert time.monotonic() < deadline, f"nobody listens on {address}"
        time.sleep(0.3)
