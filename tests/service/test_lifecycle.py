"""Starting, restarting and ending the service as a process, with nothing left behind."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lookonce.listening import free_port
from shared.local_redis import LocalRedis
from tests.service.conftest import MODEL, ROOT, image_part, metric, random_png, text_part, user

START_SECONDS = 180
#: Ctrl-C during load must end within this
STOP_SECONDS = 15


def question(seed: int) -> dict[str, object]:
    url = "data:image/png;base64," + base64.b64encode(random_png(seed)).decode()
    return {"model": MODEL, "messages": user(image_part(url), text_part("Describe the picture.")), "temperature": 0}


@contextmanager
def serving(tmp: Path, marker: str, **variables: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``lookonce serve`` as a process; every descendant carries ``marker`` in its environment."""
    port = free_port()
    environment = os.environ | {"LOOKONCE_TEST_MARKER": marker, "TMPDIR": str(tmp)} | variables
    command = [sys.executable, "-m", "lookonce.cli", "serve", "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx.get(f"{url}/healthz", timeout=1).status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, "the service ended while it started"
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.5)
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        for pid in marked(marker):
            os.kill(pid, signal.SIGKILL)


def short_folder(number: int) -> Path:
    """A temporary folder whose unix sockets have short enough paths."""
    return Path(tempfile.mkdtemp(prefix=f"lo{number}-", dir="/tmp"))


def marked(marker: str) -> list[int]:
    """Processes whose environment holds the marker."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if f"LOOKONCE_TEST_MARKER={marker}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_load_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    marker = f"{tmp_path.name}-{number.name}"
    short = short_folder(number.value)
    with serving(short, marker) as (process, url):
        stop = threading.Event()

        def load(seed: int) -> None:
            while not stop.is_set():
                try:
                    httpx.post(f"{url}/v1/chat/completions", json=question(seed), timeout=30)
                except httpx.TransportError:
                    return

        threads = [threading.Thread(target=load, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        begin = time.monotonic()
        process.send_signal(number)
        code = process.wait(timeout=STOP_SECONDS)
        took = time.monotonic() - begin
        stop.set()
        for thread in threads:
            thread.join()
        assert code == 0
        assert took < STOP_SECONDS
        deadline = time.monotonic() + 8
        while marked(marker) and time.monotonic() < deadline:
            time.sleep(0.2)
        left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(marker)}
        assert not left
        assert not [path for path in short.rglob("*") if path.is_socket()]
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/healthz", timeout=1)
    assert not [path for path in short.iterdir() if path.name.startswith("lookonce-")]


@pytest.mark.slow
def test_a_restart_keeps_the_embeddings(tmp_path: Path) -> None:
    redis = LocalRedis(tmp_path / "redis", 64)
    redis.start()
    try:
        texts = []
        for encoded in (1, 0):
            with serving(short_folder(encoded), f"restart{encoded}", LOOKONCE_CACHE__URL=redis.url) as (process, url):
                answer = httpx.post(f"{url}/v1/chat/completions", json=question(1), timeout=120).json()
                texts.append(answer["choices"][0]["message"]["content"])
                assert metric(url, "lookonce_encoded_images_total") == encoded
                process.send_signal(signal.SIGINT)
                process.wait(timeout=60)
        assert texts[0] == texts[1]
    finally:
        redis.stop()
