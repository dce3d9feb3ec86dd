"""``python -m tools.checkpoints``: every layout is written, found again by its family, and its tower loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from encoder_service.checkpoints import load_encoder
from lookonce.inspect import inspect
from tools.checkpoints.catalogue import LAYOUTS


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_inspected_and_loaded(name: str, tmp_path: Path) -> None:
    folder = LAYOUTS[name].write(tmp_path / name, seed=3)
    found = inspect(folder)
    assert not found.problems
    assert found.facts["family"] == LAYOUTS[name].family
    assert sum(parameter.abs().sum() for parameter in load_encoder(folder, "float32").tower.parameters()) > 0


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    files = [LAYOUTS["mistral3"].write(tmp_path / str(n), seed=seed) for n, seed in enumerate((1, 1, 2))]
    first, same, other = ((folder / "model.safetensors").read_bytes() for folder in files)
    assert first == same != other


def test_command_writes_and_refuses(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tools.checkpoints", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    out = tmp_path / "isaac"
    assert run("isaac-tied", str(out)).returncode == 0
    assert inspect(out).facts["family"] == "isaac"
    refused = run("isac", str(out))
    assert refused.returncode == 2
    assert "isaac-flat" in refused.stderr
    assert all(name in run("--list").stdout for name in LAYOUTS)
