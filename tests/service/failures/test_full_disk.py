"""Disks without room: Ray's and everybody's temporary folder, Redis's own data, files and batches, a job's output."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
from openai import APIStatusError, OpenAI

from lookonce.service import free_port, running
from shared.local_redis import find_server
from tests.service.conftest import ROOT, metric, random_png, service_settings
from tests.service.failures.conftest import Faulty, question
from tests.service.failures.victims import eventually, send, victims

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
BALLAST = "ballast"


@contextmanager
def small_disk(mib: int) -> Iterator[Path]:
    """A file system of so many MiB; its path is short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="lkd", dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Takes the last byte of a disk for the length of a ``with`` block."""
    with (disk / BALLAST).open("wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
    try:
        yield
    finally:
        (disk / BALLAST).unlink()


@dataclass
class Disks:
    """A service with a small disk for everything that it writes.

    Attributes:
        faulty: how to ask it.
        temporary: its temporary folder, Ray's included.
        store: where its Redis keeps its data.
        files: where files and batches lie.
        cache: the Redis.
    """

    faulty: Faulty
    temporary: Path
    store: Path
    files: Path
    cache: redis.Redis


@contextmanager
def saving_redis(folder: Path) -> Iterator[str]:
    """A Redis that saves whatever changed after a second, as somebody's may be set; its URL."""
    port = free_port()
    command = [str(find_server()), "--port", str(port), "--dir", str(folder), "--save", "1", "1", "--maxmemory", "64mb"]
    process = subprocess.Popen([*command, "--maxmemory-policy", "allkeys-lru"], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as client:
            eventually(lambda: answers(client), 20, "Redis answers")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait(10)


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disks]:
    tmp_path_factory.getbasetemp()  # made now, so that it does not lie on a small disk for the rest of the run
    with ExitStack() as stack:
        temporary, store, files = (stack.enter_context(small_disk(mib)) for mib in (96, 2, 4))
        url = stack.enter_context(saving_redis(store))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(tempfile, "tempdir", str(temporary))
        deadline = {"request_timeout": 30.0}
        settings = service_settings(cache={"url": url}, batches={"folder": files / "batches"}, http=deadline)
        base = stack.enter_context(running(settings))
        cache = stack.enter_context(redis.Redis.from_url(url))
        yield Disks(Faulty(base), temporary, store, files, cache)


def test_without_temporary_space_questions_are_answered(disks: Disks) -> None:
    """Known and new pictures, streams, large bodies; nobody dies of it, and counting goes on."""
    faulty = disks.faulty
    expected = faulty.text(random_png(1))
    before = {role: victims(role) for role in ("ingress", "encoder", "language", "engine")}
    counted = metric(faulty.url, "lookonce_requests_total")
    with full(disks.temporary):
        assert faulty.text(random_png(1)) == expected
        assert faulty.text(random_png(2))
        assert faulty.text(random_png(3, 700, 700))
        stream = httpx.post(f"{faulty.url}/v1/chat/completions", json=question(random_png(1), stream=True), timeout=130)
        assert stream.text.rstrip().endswith("data: [DONE]")
        assert '"error"' not in stream.text
        assert metric(faulty.url, "lookonce_requests_total") >= counted + 4
    assert {role: victims(role) for role in before} == before


def test_without_temporary_space_a_killed_replica_comes_back(disks: Disks) -> None:
    """No new process starts meanwhile; known pictures are answered, and all is well once there is room."""
    faulty = disks.faulty
    with full(disks.temporary):
        expected = faulty.text(random_png(1))
        (old,) = send("encoder")
        new = faulty.ask(random_png(10))
        assert new.status_code in (httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT), (
            new.text
        )
        print(f"a new picture, with the only encoder killed on a full disk: {new.status_code} {new.text[:200]}")
        assert faulty.text(random_png(1)) == expected, "known pictures need no encoder"
    eventually(lambda: [pid for pid in victims("encoder") if pid != old], 120, "another encoder")
    eventually(lambda: httpx.get(f"{faulty.url}/readyz", timeout=10).status_code == 200, 120, "ready")
    assert faulty.text(random_png(11))


def test_a_large_upload_without_temporary_space_is_refused(disks: Disks) -> None:
    """A part of a form above 1 MiB goes through a temporary file."""
    picture = random_png(20, 800, 800)
    assert len(picture) > MIB
    with full(disks.temporary):
        answer = httpx.post(f"{disks.faulty.url}/v1/images", files={"file": ("a.png", picture)}, timeout=60)
    assert answer.status_code == httpx.codes.INSUFFICIENT_STORAGE, answer.text
    assert answer.json()["error"]["code"] == "storage"
    assert httpx.post(f"{disks.faulty.url}/v1/images", files={"file": ("a.png", picture)}, timeout=60).is_success


def test_a_redis_that_cannot_save_costs_time_only(disks: Disks) -> None:
    """It then refuses every write (MISCONF): embeddings travel in the requests; with room again they are kept."""
    faulty = disks.faulty
    with full(disks.store):
        disks.cache.set("filler", os.urandom(MIB))
        eventually(lambda: disks.cache.info("persistence")["rdb_last_bgsave_status"] == "err", 60, "saving has failed")
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            disks.cache.set("filler", b"")
        answers_full = [faulty.text(random_png(seed)) for seed in range(30, 34)]
        assert [faulty.text(random_png(seed)) for seed in range(30, 34)] == answers_full
    disks.cache.config_set("save", "")  # a new save would need the filler's room
    disks.cache.config_set("stop-writes-on-bgsave-error", "no")
    time.sleep(5)  # until the circuits have closed
    assert [faulty.text(random_png(seed)) for seed in range(30, 34)] == answers_full
    details = faulty.ask(random_png(30)).json()["usage"]["prompt_tokens_details"]
    assert details["cached_image_tokens"] == details["image_tokens"] > 0


def test_without_room_for_files_uploads_are_refused_and_chat_goes_on(disks: Disks) -> None:
    """507 with a sentence, nothing of the file is left; with room again the same upload is taken."""
    client = OpenAI(base_url=f"{disks.faulty.url}/v1", api_key="unused", max_retries=0)
    content = b'{"custom_id": "a"}\n' * 1000
    with full(disks.files):
        with pytest.raises(APIStatusError) as refused:
            client.files.create(file=("in.jsonl", content), purpose="batch")
        assert refused.value.status_code == httpx.codes.INSUFFICIENT_STORAGE
        assert "no space left" in str(refused.value)
        assert disks.faulty.text(random_png(40))
    assert list(client.files.list()) == []
    assert client.files.create(file=("in.jsonl", content), purpose="batch").bytes == len(content)


def test_a_job_on_a_full_disk_stops_and_goes_on_later(disks: Disks, tmp_path: Path) -> None:
    """One sentence, no traceback; with room again the same command finishes what is missing."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for seed in range(4):
        (pictures / f"{seed}.png").write_bytes(random_png(50 + seed))
    out = disks.files / "captions"
    command = [sys.executable, "-m", "lookonce.cli", "caption", str(pictures), "--out", str(out)]
    command += ["--address", disks.faulty.url]

    def run() -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"TMPDIR": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "300"}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    with full(disks.files):
        stopped = run()
    assert stopped.returncode not in (0, 3)
    assert "no space left" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    done = run()
    assert done.returncode == 0, done.stderr
    rows = [line for path in out.rglob("*.jsonl") for line in path.read_text().splitlines() if '"id"' in line]
    assert len(rows) >= 4
