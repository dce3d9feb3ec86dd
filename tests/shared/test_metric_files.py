"""Metrics of processes whose disk is full: nobody is killed for want of a page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: counts, lets the disk be filled, and counts on, past the file's first pages and past its first size
WORK = """
import sys
from shared import metrics
requests = metrics.REQUESTS
for number in range(4):
    requests.labels("/before", str(number), "200").inc()
print("filled?", flush=True)
input()
for number in range(3000):
    requests.labels("/after", f"model-{number}", "200").inc(2)
print(requests.labels("/before", "1", "200")._value.get(), requests.labels("/after", "model-2999", "200")._value.get())
"""
ROOM = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return


def work(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", WORK], env=environment, text=True, **pipes)


def test_a_process_counts_on_when_its_disk_is_full(small_disk: Path) -> None:
    with work(small_disk) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "filled?\n"
        fill(small_disk)
        said, complaint = process.communicate("\n", timeout=60)
    assert process.returncode == 0, complaint
    assert said == "1.0 2.0\n"
    assert complaint.count("are not seen from now on: No space left on device") >= 1


def test_a_process_starts_on_a_full_disk_and_what_others_counted_is_still_told(small_disk: Path) -> None:
    with work(small_disk) as first:
        assert first.stdout is not None
        first.stdout.readline()
        fill(small_disk)
        with work(small_disk) as second:
            said, complaint = second.communicate("\n", timeout=60)
        assert second.returncode == 0, complaint
        assert said == "filled?\n1.0 2.0\n"
        told = subprocess.run(
            [sys.executable, "-c", "from shared import metrics; print(metrics.render()[0].decode())"],
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(small_disk)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        first.communicate("\n", timeout=60)
    assert told.returncode == 0, told.stderr
    assert 'lookonce_requests_total{model="1",route="/before",status="200"} 1.0' in told.stdout
