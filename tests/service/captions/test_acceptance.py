"""A large folder through the whole path: each row once, right captions, one encode per picture, flat memory."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lookonce.caption import Job
from lookonce.service import RUN_VARIABLE, Service
from shared.config import Settings
from tests.service.captions.test_jobs import DESCRIBE, captioned, failures, texts
from tools.demo.folder import draw_folder

FILES = int(os.environ.get("LOOKONCE_CAPTION_FILES", "10000"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + FILES)]

#: share of whole captions that the demo model gets right, from its card and through the whole service
HELD_OUT = (0.967, 0.984)
#: what the driver and a worker may grow by, from a tenth of the rows to all of them
GROWTH = 96 << 20


def own(process: psutil.Process) -> int:
    """Resident memory that no other process maps, bytes."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


@contextmanager
def watched_memory() -> Iterator[dict[str, int]]:
    """Peak memory of this process and of the largest of the job's workers, bytes, looked at twice a second.

    Their own: without shared pages, since Ray's object store, whose size is set, is mapped into all of them bit by bit.
    Of one worker, since how many there are is the settings' and the queue's affair.
    """
    peaks = {"driver": 0, "worker": 0}
    stop = threading.Event()

    def watch() -> None:
        shown = 0.0
        while not stop.wait(0.5):
            workers = [own(process) for process in caption_workers()]
            peaks["worker"] = max(peaks["worker"], *workers, 0)
            peaks["driver"] = max(peaks["driver"], own(psutil.Process()))
            if time.monotonic() - shown > 20:
                shown = time.monotonic()
                print(f"workers: {[size >> 20 for size in workers]} MiB")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def caption_workers() -> Iterator[psutil.Process]:
    """The workers of this run's job."""
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            title = " ".join(process.info["cmdline"] or ())
            if "CaptionWorker" in title and process.environ().get(RUN_VARIABLE) == os.environ[RUN_VARIABLE]:
                yield process


def test_a_large_folder(pools: Service, settings: Settings, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    draw_folder(small, FILES // 10, seed=14_000_000)
    drawn = draw_folder(large, FILES, seed=15_000_000)
    job = Job(str(small), tmp_path / "small-out", (DESCRIBE,))
    job = replace(job, sampling=job.sampling.model_copy(update={"max_tokens": 96}))
    with watched_memory() as before:
        captioned(job, settings, pools)
    job = replace(job, source=str(large), out=tmp_path / "large-out")
    begin = time.monotonic()
    with watched_memory() as after:
        summary, encoded = captioned(job, settings, pools)
    found = texts(job.out)
    right = sum(found[name, 0] == truth for name, truth in drawn.truths.items()) / len(drawn.truths)
    seconds = time.monotonic() - begin
    print(f"{FILES} files in {seconds:.0f} s: {encoded} encoded, {drawn.distinct} distinct, {100 * right:.1f} % right")
    print(f"peak MiB, a tenth and all: {[{k: v >> 20 for k, v in peak.items()} for peak in (before, after)]}")
    assert {name for name, _ in found} == set(drawn.truths)
    assert set(failures(job.out)) == drawn.broken
    assert (summary.captioned, summary.failed) == (len(drawn.truths), len(drawn.broken))
    assert encoded == drawn.distinct
    chance = 2.6 * math.sqrt(0.03 * 0.97 / drawn.distinct)  # of a sample of this size, at 99 %
    assert HELD_OUT[0] - 0.01 - chance <= right <= HELD_OUT[1] + 0.01 + chance
    for name, peak in after.items():
        assert peak - before[name] < GROWTH, name


def test_a_second_prompt_encodes_nothing(pools: Service, settings: Settings, tmp_path: Path) -> None:
    files = max(20, FILES // 20)
    drawn = draw_folder(tmp_path / "pictures", files, duplicates=0, broken=0, seed=16_000_000)
    job = Job(str(tmp_path / "pictures"), tmp_path / "one", (DESCRIBE,))
    first, encoded = captioned(job, settings, pools)
    assert encoded == drawn.distinct == files
    second, again = captioned(replace(job, out=tmp_path / "two", prompts=("Tell what you see.",)), settings, pools)
    assert (again, second.tally.cached) == (0, files)
    print(f"first prompt {first.tally.seconds:.1f} s, second {second.tally.seconds:.1f} s")
