"""Ray's head process dies: what is said, what goes on, and what comes back. See ``docs/failures.md``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from lookonce.service import free_port
from shared.local_redis import find_server
from tests.service.conftest import ROOT
from tests.service.nodes.kit import Cluster, Machine, wait_for_port
from tests.service.scaling.kit import ask, body, within
from tests.service.scaling.load import streamed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Served:
    """``lookonce serve`` as a process, so that whatever Ray does to its driver does not end the tests."""

    url: str
    process: subprocess.Popen[bytes]

    def ready(self) -> bool:
        assert self.process.poll() is None, "the service ended"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == httpx.codes.OK
        return False


@contextmanager
def served(folder: Path, **sections: Any) -> Iterator[Served]:
    """The demo with two encoders, and other sections of the configuration."""
    tree = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    (model,) = tree["models"]
    model["checkpoint"] = str(ROOT / "models" / "demo")
    model["encoder"] |= {"min_replicas": 2, "max_replicas": 2}
    tree["http"]["port"] = free_port()
    config = folder / "head.yaml"
    config.write_text(yaml.safe_dump(tree | sections))
    command = [sys.executable, "-m", "lookonce.cli", "serve", "--config", str(config)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    made = Served(f"http://127.0.0.1:{tree['http']['port']}", process)
    try:
        within(240, made.ready, "the service runs")
        yield made
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait(10)


def below(pid: int, word: str) -> list[psutil.Process]:
    """Processes below one whose command line holds a word."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if word in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextmanager
def ray_with_its_own_redis(folder: Path) -> Iterator[tuple[Cluster, Machine]]:
    """A head that keeps its tables in a Redis, another than the cache's, and a machine beside it."""
    port = free_port()
    command = [str(find_server()), "--port", str(port), "--save", "", "--dir", str(folder)]
    store = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    patch = pytest.MonkeyPatch()
    made = Cluster(folder, isolated=False)
    try:
        wait_for_port(f"127.0.0.1:{port}")
        made.start_redis()
        patch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
        head = made.start_head(4)
        patch.undo()
        wait_for_port(made.address)
        made.start_worker(4)
        made.wait_for_machines(2)
        yield made, head
    finally:
        patch.undo()
        made.close()
        store.kill()
        store.wait(10)


def test_a_head_with_an_external_redis_goes_on_after_a_restart(tmp_path: Path) -> None:
    """While it is gone questions are answered and nothing is replaced; the same process again picks everything up."""
    with (
        tempfile.TemporaryDirectory(prefix="lkh", dir="/tmp", ignore_cleanup_errors=True) as folder,
        ray_with_its_own_redis(Path(folder)) as (made, machine),
        served(tmp_path, ray={"address": made.address}, cache={"url": made.redis}) as own,
    ):
        expected = ask(own.url, 1)["choices"][0]["message"]["content"]
        (gcs,) = below(machine.process.pid, "/gcs_server ")
        command, environment = gcs.cmdline(), gcs.environ()
        # ray start --block would end the whole head; whoever restarts the process alone, as here, stands in its place
        os.kill(machine.process.pid, signal.SIGSTOP)
        gcs.kill()
        gone = time.monotonic()
        assert ask(own.url, 1)["choices"][0]["message"]["content"] == expected
        assert ask(own.url, 2)["choices"][0]["message"]["content"], "a picture that nobody has seen"
        assert streamed(own.url, body(1)) == expected
        encoders = [process for one in made.machines for process in one.processes() if is_encoder(process)]
        assert len(encoders) == 2
        encoders[0].kill()
        assert ask(own.url, 3)["choices"][0]["message"]["content"], "the other one encodes"
        time.sleep(max(0.0, 15 - (time.monotonic() - gone)))
        assert made.machines and sum(one.roles().count("encoder") for one in made.machines) == 1
        again = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            took = within(120, lambda: sum(one.roles().count("encoder") for one in made.machines) == 2, "two encoders")
            print(f"gone for 15 s; the killed encoder was replaced {took:.0f} s after the head's return")
            within(60, own.ready, "ready")
            assert ask(own.url, 4)["choices"][0]["message"]["content"]
            assert ask(own.url, 1)["choices"][0]["message"]["content"] == expected
        finally:
            again.kill()
            again.wait(10)


def is_encoder(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()[:1] != [] and process.cmdline()[0].startswith("ray::ServeReplica:lookonce:encoder:")
    return False
