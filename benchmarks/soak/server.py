"""``lookonce serve`` as a process of its own, so that nothing of the load's memory is the service's."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from lookonce.listening import free_port

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 300.0
#: bounds that the load reaches in minutes; with the demo's own it would take hours until what is kept levels off
BOUNDS = {"cache": {"private_maxmemory_mib": 32, "local": {"mib": 32}}, "prefetch_mib": 16}


@dataclass(frozen=True)
class Server:
    """A service that runs.

    Attributes:
        url: of its endpoint.
        model: name of its only model.
        pid: of ``lookonce serve``.
        cache_url: of its private Redis.
    """

    url: str
    model: str
    pid: int
    cache_url: str


@contextmanager
def serving() -> Iterator[Server]:
    """The demo with :data:`BOUNDS`, on a free port."""
    tree = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    (model,) = tree["models"]
    model["checkpoint"] = str(ROOT / "models" / "demo")
    model["language"]["prefetch_mib"] = BOUNDS["prefetch_mib"]
    tree["cache"] = BOUNDS["cache"]
    tree["http"]["port"] = free_port()
    url = f"http://127.0.0.1:{tree['http']['port']}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "soak.yaml"
        config.write_text(yaml.safe_dump(tree))
        command = [sys.executable, "-m", "lookonce.cli", "serve", "--config", str(config)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
        try:
            _wait(process, url)
            yield Server(url, model["name"], process.pid, _redis_of(process.pid))
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit("the service did not start")
        try:
            if httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)


def _redis_of(pid: int) -> str:
    """URL of the private Redis below a process, whose title names its socket."""
    for process in psutil.Process(pid).children(recursive=True):
        if match := re.search(r"unixsocket:(\S+)", " ".join(process.cmdline())):
            return f"unix://{match[1]}"
    sys.exit("the service has no private Redis")
