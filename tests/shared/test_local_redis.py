"""The private Redis: private, mortal with its parent, and back when it fell."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from shared import local_redis
from shared.errors import ConfigError, Unavailable
from shared.local_redis import MAX_SOCKET_PATH, LocalRedis, find_server

ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not happen in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_it_is_private_and_keeps_nothing(redis_server: LocalRedis, tmp_path: Path) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        wanted = {
            "port": "0",
            "maxmemory": str(64 << 20),
            "maxmemory-policy": "allkeys-lru",
            "save": "",
            "appendonly": "no",
        }
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        client.set("a", "b")
        assert client.get("a") == b"b"
    folder = redis_server.socket.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(redis_server.socket.stat().st_mode) == 0o700
    assert (folder / "redis.log").stat().st_size
    assert not list(folder.glob("*.rdb"))


def test_an_open_directory_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    server = LocalRedis(folder, 16)
    server.start()
    server.stop()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_stop_ends_it_and_start_begins_anew(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / "r", 16)
    for _ in range(2):
        server.start()
        pid = server.pid
        with redis.Redis.from_url(server.url) as client:
            assert client.dbsize() == 0
            client.set("a", "b")
        server.stop()
        server.stop()
        assert not alive(pid)
        assert not server.socket.exists()


def test_a_frozen_server_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_redis, "STOP_SECONDS", 0.3)
    server = LocalRedis(tmp_path / "r", 16)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not alive(pid)


@pytest.mark.parametrize("name", ["with space", "per%20cent", "quest?ion#hash", "ümlaut"])
def test_odd_directories(tmp_path: Path, name: str) -> None:
    server = LocalRedis(tmp_path / name, 16)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    server.stop()


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / ("x" * 100) / ("y" * 100), 16)
    server.start()
    short = server.socket.parent
    assert len(os.fsencode(server.socket)) <= MAX_SOCKET_PATH
    assert stat.S_IMODE(short.stat().st_mode) == 0o700
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    server.stop()
    assert not short.exists()


def test_a_relative_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = LocalRedis(Path("r"), 16)
    server.start()
    monkeypatch.chdir("/")
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    server.stop()


def test_no_server_program_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_redis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install redis-server"):
        LocalRedis(tmp_path / "r", 16).start()


@pytest.mark.parametrize("name", local_redis.SERVERS)
def test_the_systems_server_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == tmp_path / name


@pytest.mark.parametrize(
    ("script", "word"),
    [("#!/bin/sh\necho broken\nexit 3\n", "broken"), ("#!/nowhere\n", "nowhere|No such file")],
)
def test_a_server_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, word: str) -> None:
    program = tmp_path / "redis-server"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    server = LocalRedis(tmp_path / "r", 16)
    before, begin = set(threading.enumerate()), time.monotonic()
    with pytest.raises(Unavailable, match=word):
        server.start()
    assert time.monotonic() - begin < 10
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "redis"]


def test_what_the_server_complains_of_is_shown(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="memory"):
        LocalRedis(tmp_path / "r", -5).start()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        LocalRedis(tmp_path / "file" / "r", 16).start()


def test_two_cannot_share_a_directory(redis_server: LocalRedis) -> None:
    """The second would take the first one's socket away."""
    second = LocalRedis(redis_server.socket.parent, 16)
    with pytest.raises(ConfigError, match="another Redis"):
        second.start()
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.ping()


def test_what_a_killed_predecessor_left_does_not_matter(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / "r", 16)
    server.start()
    left = server.socket.with_name("left")
    server.socket.rename(left)
    server.stop()
    left.rename(server.socket)
    server.start()
    server.stop()


def test_it_comes_back_after_it_was_killed(redis_server: LocalRedis) -> None:
    """R5."""
    before = redis_server.pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: redis_server.pid != before)
    with redis.Redis.from_url(redis_server.url) as client:
        wait_until(lambda: _answers(client))


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """The kernel's parent-death signal is about threads."""
    server = LocalRedis(tmp_path / "r", 16)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    server.stop()


PARENT = """
import sys, time
from pathlib import Path
from shared.local_redis import LocalRedis
server = LocalRedis(Path(sys.argv[1]), 16)
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_dies_with_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "r")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.send_signal(number)
    parent.wait()
    wait_until(lambda: not alive(pid))


def test_a_signal_to_the_terminals_group_does_not_reach_it(redis_server: LocalRedis) -> None:
    assert os.getpgid(redis_server.pid) != os.getpgid(0)
    assert os.getsid(redis_server.pid) != os.getsid(0)
