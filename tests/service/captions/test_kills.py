"""Jobs whose processes are killed at random times; the output is that of a job that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from lookonce.caption import Job, run
from lookonce.service import RUN_VARIABLE, Service
from shared.config import Settings
from tests.service.captions.test_jobs import DESCRIBE, failures, rows, texts
from tests.service.conftest import ROOT
from tests.service.failures.victims import eventually, victims
from tools.demo.folder import Drawn, draw_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FILES = int(os.environ.get("LOOKONCE_KILL_PICTURES", "150"))
RUNS = int(os.environ.get("LOOKONCE_KILL_RUNS", "10"))
SEED = int(os.environ.get("LOOKONCE_KILL_SEED", "1"))
ROLES = ("encoder", "language", "driver", "redis", "engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Drawn]:
    path = tmp_path_factory.mktemp("drawn")
    return path, draw_folder(path, FILES, duplicates=0.2, broken=0.03, seed=13_000_000)


def command(job: Job) -> subprocess.Popen[bytes]:
    """The job as a process of its own."""
    words = ["caption", job.source, "--out", str(job.out), "--prompt", DESCRIBE, "--max-tokens", "96"]
    environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-m", "lookonce.cli", *words, "--address", str(job.address)],
        cwd=ROOT,
        env=environment | {"LOOKONCE_JOBS__SHARD_ROWS": "10", "LOOKONCE_JOBS__IN_FLIGHT": "4"},  # so that it takes time
        start_new_session=True,
    )


def emptied(url: str) -> bool:
    """Empties a Redis; False while there is none."""
    try:
        return bool(redis.Redis.from_url(url).flushall())
    except redis.ConnectionError:
        return False


def kill_the_driver(job: Job, chance: random.Random, at: float) -> None:
    """Runs the command, kills it in its middle, and runs it again."""
    process = command(job)
    while process.poll() is None and not len(list(job.out.glob("part-*"))) > at:
        time.sleep(0.05)
    time.sleep(chance.uniform(0, 0.3))
    process.kill()
    process.wait()
    held = rows(job.out)
    assert 0 < len(held) < FILES - 10, "killed in its middle"
    assert command(job).wait() in (0, 3)
    assert rows(job.out)[: len(held)] == held, "what was finished is as it was"


def kill_a_process(job: Job, settings: Settings, pools: Service, role: str, at: float) -> None:
    """Runs the job here, while one process of a pool is killed."""

    def kill() -> None:
        while not len(list(job.out.glob("part-*"))) > at:
            time.sleep(0.05)
        os.kill(random.choice(victims(role)), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    run(job, settings, pools=pools)
    killer.join(timeout=60)
    assert not killer.is_alive(), "nothing was killed"


def test_whatever_is_killed_the_output_is_the_same(
    pools: Service, settings: Settings, folder: tuple[Path, Drawn], tmp_path: Path
) -> None:
    """B2, B7: no row twice, none missing, the same captions."""
    source, drawn = folder
    chance = random.Random(SEED)
    settings = settings.model_copy(update={"jobs": settings.jobs.model_copy(update={"shard_rows": 20})})
    plain = Job(str(source), tmp_path / "undisturbed", (DESCRIBE,))
    plain = replace(plain, sampling=plain.sampling.model_copy(update={"max_tokens": 96}))
    run(plain, settings, pools=pools)
    expected = texts(plain.out)
    assert {name for name, _ in expected} == set(drawn.truths)
    for number in range(RUNS):
        role = ROLES[number % len(ROLES)]
        eventually(lambda: emptied(pools.cache_url), 30, "an empty Redis")  # it may have been killed just before
        address = pools.url if role == "driver" else None
        job = replace(plain, out=tmp_path / f"{number}-{role}", address=address)
        at = chance.uniform(0, FILES / 20 - 2)
        begin = time.monotonic()
        if role == "driver":
            kill_the_driver(job, chance, at)
        else:
            kill_a_process(job, settings, pools, role, at)
        print(f"run {number}: {role} killed after part {at:.1f}; {time.monotonic() - begin:.1f} s")
        assert texts(job.out) == expected
        assert set(failures(job.out)) == drawn.broken
