"""The examples of docs/api.md, run as they stand there, against this service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.conftest import ROOT

EXAMPLES = re.findall(
    r"```(bash|python)\n(.*?)```",
    (ROOT / "docs" / "api.md").read_text().partition("## Examples")[2].partition("\n## ")[0],
    re.DOTALL,
)
#: of the picture that they ask about
PICTURE = "4.png"


def run(language: str, code: str, service: str) -> str:
    code = code.replace("http://127.0.0.1:8000", service)
    command = ["bash", "-c", code] if language == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_examples_of_every_kind() -> None:
    assert [language for language, _ in EXAMPLES] == ["bash", "bash", "python", "python"]


@pytest.mark.parametrize("number", range(3))
def test_an_example_gives_the_right_answer(service: str, samples: list[tuple[Path, str]], number: int) -> None:
    (truth,) = (truth for path, truth in samples if path.name == PICTURE)
    assert truth in run(*EXAMPLES[number], service)


def test_langchains_messages_are_answered(service: str) -> None:
    """The demo was not trained with a system message, so its words are not compared."""
    assert run(*EXAMPLES[3], service).strip()
