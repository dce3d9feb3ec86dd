"""Changed settings come into force under load without a failed request, or are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from lookonce.listening import free_port
from tests.service.conftest import ROOT
from tests.service.scaling.kit import ask, body, replicas, within
from tests.service.scaling.load import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Server:
    """``lookonce serve`` as a process, and its file."""

    def __init__(self, folder: Path) -> None:
        self.tree: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
        self.tree["models"][0]["checkpoint"] = str(ROOT / "models" / "demo")
        self.tree["http"]["port"] = free_port()
        self.url = f"http://127.0.0.1:{self.tree['http']['port']}"
        self.config = folder / "served.yaml"
        self.write()

    def write(self) -> None:
        self.config.write_text(yaml.safe_dump(self.tree))

    def command(self, name: str) -> list[str]:
        return [sys.executable, "-m", "lookonce.cli", name, "--config", str(self.config)]

    def reload(self) -> subprocess.CompletedProcess[str]:
        """Writes the file and runs ``lookonce reload``."""
        self.write()
        environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
        return subprocess.run(
            self.command("reload"), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("served"))
    process = subprocess.Popen(server.command("serve"), cwd=ROOT, stdin=subprocess.DEVNULL)

    def serves() -> bool:
        assert process.poll() is None, "the service ended while it started"
        try:
            return httpx.get(f"{server.url}/healthz", timeout=1).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    try:
        within(240, serves, "the service runs")
        yield server
    finally:
        process.terminate()
        process.wait(60)


def test_every_pool_is_replaced_under_load_without_a_failed_request(server: Server) -> None:
    """Long streams go on to their end in the old replicas; what comes later meets the new settings."""
    assert ask(server.url, 1, side=96, max_tokens=1)
    server.tree["images"]["max_pixels"] = 90 * 90
    server.tree["models"][0]["language"]["max_num_seqs"] = 24
    with load(server.url) as outcome:
        done = server.reload()
        assert done.returncode == 0, done.stderr
        assert "is in force" in done.stdout
        during, faults = outcome.answered, list(outcome.faults)
        within(120, lambda: outcome.answered >= during + 8, "answers after the change")
    print(f"{during} answers while replicas were replaced, {outcome.answered} in all")
    assert faults == outcome.faults == []
    assert during > 0
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body(1, side=96), timeout=60)
    assert refused.status_code == httpx.codes.BAD_REQUEST
    assert "8100" in refused.json()["error"]["message"]


def test_bounds_change_without_a_new_replica(server: Server) -> None:
    """A pool grows where it is."""
    server.tree["models"][0]["encoder"] |= {"min_replicas": 2, "max_replicas": 2}
    assert server.reload().returncode == 0
    within(60, lambda: replicas(server.url, "encoder") == 2, "two encoders")


def test_what_needs_a_restart_is_refused_and_nothing_changes(server: Server) -> None:
    before, server.tree["http"]["port"] = server.tree["http"]["port"], free_port()
    done = server.reload()
    server.tree["http"]["port"] = before
    assert done.returncode == 1
    assert "http.port needs a restart" in done.stderr
    assert ask(server.url, 1)["choices"][0]["message"]["content"]


def test_an_unreadable_file_is_refused_and_nothing_changes(server: Server) -> None:
    server.tree["https"] = {}
    done = server.reload()
    del server.tree["https"]
    assert done.returncode == 1
    assert "https" in done.stderr
    assert ask(server.url, 1)["choices"][0]["message"]["content"]


def test_settings_that_do_not_start_are_taken_back_under_load(server: Server) -> None:
    """The old replicas answer all the while, and afterwards."""
    language = server.tree["models"][0]["language"]
    before, language["max_model_len"] = language["max_model_len"], 1 << 20  # more than the model has positions for
    with load(server.url) as outcome:
        done = server.reload()
    language["max_model_len"] = before
    assert done.returncode == 1
    assert "settings in force were kept" in done.stderr
    assert outcome.faults == []
    assert outcome.answered > 0
    assert ask(server.url, 1)["choices"][0]["message"]["content"]
    assert server.reload().returncode == 0, "and it can be asked again"
