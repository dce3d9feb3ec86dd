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


def test_caption_over_a_running_service(service: str, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    for name in ("0.png", "1.png"):
        shutil.copy(SAMPLES / name, folder / name)
    shutil.copy(SAMPLES / "0.png", folder / "sub" / "emoji 🎈.PNG")
    (folder / "broken.jpg").write_bytes(b"no picture")
    (folder / "notes.txt").write_text("not asked about")
    out = tmp_path / "captions"
    words = ("caption", folder, "--out", out, "--address", service, "--prompt", "Describe the picture.")
    run = lookonce(*words, "--prompt", "What is at row 1 column 1?", "--sidecars")
    assert run.returncode == 1
    assert "a sidecar holds one caption" in run.stderr
    run = lookonce(*words, "--prompt", "What is at row 1 column 1?", "--report")
    assert run.returncode == 3, run.stderr
    assert "failed: broken.jpg: " in run.stderr
    assert "4/4 captions, " in run.stderr
    assert run.stdout.startswith(f"3 captioned in {out}, 1 failed")
    lines = [json.loads(line) for line in (out / "part-000000.jsonl").read_text().splitlines()]
    texts = {(line["id"], line["prompt_index"]): line["caption"] for line in lines}
    assert {name for name, _ in texts} == {"0.png", "1.png", "sub/emoji 🎈.PNG"}
    assert texts["0.png", 0] == texts["sub/emoji 🎈.PNG", 0]
    assert texts["0.png", 0].startswith(f"Row 1: {texts['0.png', 1]}")
    assert "no picture" not in (out / "report.html").read_text()
    assert (out / "report.html").read_text().count("<img ") == 3


def test_caption_says_when_nobody_is_there(tmp_path: Path) -> None:
    run = lookonce("caption", SAMPLES, "--out", tmp_path / "out", "--address", "http://127.0.0.1:9")
    assert run.returncode == 1
    assert "no answer from http://127.0.0.1:9" in run.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


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
