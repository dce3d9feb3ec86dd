"""The command line against a running service, as a person uses it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.conftest import ROOT, SAMPLES, random_png


def lookonce(*words: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lookonce.cli", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def test_ask_prints_the_answer_alone(service: str) -> None:
    run = lookonce("ask", SAMPLES / "0.png", "Describe the picture.", "--url", service)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Row 1:")


def test_ask_with_timings_says_where_the_embedding_came_from(service: str, tmp_path: Path) -> None:
    picture = tmp_path / "new.png"
    picture.write_bytes(random_png(77))
    first, second = (lookonce("ask", picture, "Describe the picture.", "--url", service, "--timings") for _ in range(2))
    assert "encoder" in first.stderr
    assert "Redis" in second.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.png", "What is this?"], "cannot read missing.png"),
        (["README.md", "What is this?"], "image 0"),
        ([str(SAMPLES / "0.png")], "must be the question"),
    ],
)
def test_ask_says_what_is_wrong(service: str, words: list[str], said: str) -> None:
    run = lookonce("ask", *words, "--url", service)
    assert run.returncode == 1
    assert said in run.stderr.replace("\n", " ")
    assert "Traceback" not in run.stderr


def test_caption_writes_one_line_per_picture_and_lists_failures(service: str, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    for name in ("0.png", "1.png"):
        shutil.copy(SAMPLES / name, folder / name)
    shutil.copy(SAMPLES / "0.png", folder / "sub" / "emoji 🎈.PNG")
    (folder / "broken.jpg").write_bytes(b"no picture")
    (folder / "notes.txt").write_text("not asked about")
    out = tmp_path / "captions.jsonl"
    run = lookonce("caption", folder, "--out", out, "--url", service)
    assert run.returncode == 3, run.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["image"] for line in lines] == ["0.png", "1.png", "broken.jpg", "sub/emoji 🎈.PNG"]
    assert lines[0]["caption"] == lines[3]["caption"]
    assert lines[2]["caption"] is None
    assert "image 0" in lines[2]["error"]
    assert "broken.jpg" in run.stderr
    again = lookonce("caption", folder, "--out", out, "--url", service)
    assert again.returncode == 3
    assert all(json.loads(line)["cached"] for line in out.read_text().splitlines() if "broken" not in line)


@pytest.mark.parametrize("words", [["nowhere"], ["docs"], [str(SAMPLES)]])
def test_caption_refuses_what_it_cannot_do(service: str, words: list[str], tmp_path: Path) -> None:
    out = SAMPLES / "0.png" if words == [str(SAMPLES)] else tmp_path / "out.jsonl"
    before = (SAMPLES / "0.png").read_bytes()
    run = lookonce("caption", *words, "--out", out, "--url", service)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert (SAMPLES / "0.png").read_bytes() == before


def test_a_service_that_is_not_there_is_said(tmp_path: Path) -> None:
    run = lookonce("ask", SAMPLES / "0.png", "What is this?", "--url", "http://127.0.0.1:9")
    assert run.returncode == 1
    assert "no answer from http://127.0.0.1:9" in run.stderr.replace("\n", " ")


def test_doctor_finds_this_machine_fit() -> None:
    run = lookonce("doctor")
    assert "vLLM" in run.stdout
    assert "Redis server" in run.stdout


def test_doctor_names_a_broken_configuration(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("models: []\n")
    run = lookonce("doctor", "--config", bad)
    assert run.returncode == 1
    assert "configuration" in run.stdout
