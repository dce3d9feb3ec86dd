"""The two sides as processes: started on the same cores, found again by a mark, ended without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import yaml

from lookonce.listening import free_port
from shared.local_redis import LocalRedis

#: in the environment of every process of one side
MARKER = "LOOKONCE_BENCH_SIDE"
START_SECONDS = 900.0
STOP_SECONDS = 20.0
CACHE_MIB = 2048
#: the monolithic engine as its manual starts it, but for what the machine lacks
MONOLITHIC_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its own binding would leave one of two cores idle
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # nothing of ours in the stock engine
}


@dataclass(frozen=True)
class Machine:
    """What both sides get.

    Attributes:
        cores: CPU numbers.
        threads: of the monolithic engine, and of each of our two pools: they share the cores by the kernel's scheduler.
        compiled: whether language models are compiled, as ``vllm serve`` does unless told otherwise.
        context: tokens of prompt and answer.
    """

    cores: tuple[int, ...]
    threads: int
    compiled: bool
    context: int = 4096


@dataclass
class Server:
    """One side.

    Attributes:
        name: for tables.
        model: name that it gives its model.
        command: without the pinning.
        environment: beside the inherited one.
        cores: where it runs.
        port: of its HTTP endpoint.
        log: file with its output.
        more: pids that count as its own though it did not start them.
    """

    name: str
    model: str
    command: list[str]
    environment: dict[str, str]
    cores: tuple[int, ...]
    port: int
    log: Path
    more: list[int] = field(default_factory=list)
    started: float = 0.0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def _mark(self) -> str:
        return f"{self.name}-{os.getpid()}-{self.port}"

    def start(self) -> float:
        """Starts it and waits until it has answered a text; returns the seconds that took.

        Raises:
            RuntimeError: it ended, or took too long; names the log.
        """
        self.started = time.perf_counter()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, self.cores)), *self.command],
                env=os.environ | self.environment | {MARKER: self._mark},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while time.perf_counter() - self.started < START_SECONDS:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}; see {self.log}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/v1/models", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                    self._greet()
                    return time.perf_counter() - self.started
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} was not ready after {START_SECONDS:.0f} s; see {self.log}")

    def _greet(self) -> None:
        """One token about a text; a server may list its model before its engine runs."""
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        url = f"{self.url}/v1/chat/completions"
        httpx.post(url, json=body, timeout=START_SECONDS, trust_env=False).raise_for_status()

    def stop(self) -> None:
        """Ends it and everything it started."""
        if self._process is None:
            return
        before = self.processes()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        left = [process for process in {*before, *self.processes()} if process.pid not in self.more]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        self._process.wait(5)
        self._process = None

    def processes(self) -> list[psutil.Process]:
        """All its processes: by descent, since vLLM's rename themselves over their environment, and by mark."""
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.Error):
            if self._process is not None:
                root = psutil.Process(self._process.pid)
                found = {process.pid: process for process in [root, *root.children(recursive=True)]}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid in self.more or process.environ().get(MARKER) == self._mark:
                    found[process.pid] = process
        return list(found.values())

    def memory(self) -> int:
        """Bytes in memory; pages that several of its processes share count once."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def cpu_seconds(self) -> dict[int, float]:
        """Processor time by process so far."""
        spent = {}
        for process in self.processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                spent[process.pid] = times.user + times.system
        return spent


def spent_between(before: dict[int, float], after: dict[int, float]) -> float:
    """Processor seconds between two calls of :meth:`Server.cpu_seconds`."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def monolithic(checkpoint: Path, dtype: str, machine: Machine, folder: Path) -> Server:
    """``vllm serve`` with its defaults: its processor cache, encoder cache and prefix cache are on."""
    port = free_port()
    # what `vllm serve` runs; its own script wants a distribution named vllm, which the CPU build is not
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", str(machine.context)]
    command += [] if machine.compiled else ["--enforce-eager"]
    environment = MONOLITHIC_ENVIRONMENT | {"OMP_NUM_THREADS": str(machine.threads)}
    return Server("vllm serve", "bench", command, environment, machine.cores, port, folder / "monolithic.log")


def ours(
    name: str, checkpoint: Path, tower_dtype: str, dtype: str, machine: Machine, folder: Path, redis: LocalRedis
) -> Server:
    """Our service on this machine; Redis is not part of it, so that it outlives a restart."""
    port = free_port()
    encoder = {"dtype": tower_dtype, "threads": machine.threads, "num_cpus": 1, "max_batch_patches": 4096}
    language = {
        "dtype": dtype,
        "max_model_len": machine.context,
        "num_cpus": machine.threads,
        "kv_cache_gib": 1,
        "enforce_eager": not machine.compiled,
        "max_ongoing": 256,
    }
    tree = {
        "models": [
            {
                "name": "bench",
                "checkpoint": str(checkpoint),
                "encoder": encoder | {"max_ongoing": 256},
                "language": language,
            }
        ],
        "http": {"port": port, "request_timeout": 600},
        "cache": {"url": redis.url},
        "images": {"max_per_request": 16},
    }
    path = folder / f"{name}.yaml".replace(" ", "-")
    path.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "lookonce.cli", "serve", "--config", str(path)]
    log = folder / f"{name}.log".replace(" ", "-")
    return Server(name, "bench", command, {}, machine.cores, port, log, more=[redis.pid])


@contextmanager
def started(*servers: Server) -> Iterator[None]:
    """Starts servers one after another and ends them with the block."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            seconds = server.start()
            print(f"{server.name} is ready after {seconds:.0f} s", flush=True)
        yield
