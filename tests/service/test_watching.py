"""What dashboards, alerts and ``lookonce top`` look at is there in a running service."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from lookonce.commands.sight import look
from lookonce.commands.top import view
from tests.service.conftest import MODEL, ROOT, image_part, random_png, text_part, user
from tests.test_watching import expressions, metrics_of


@pytest.fixture(scope="module")
def used(service: str) -> str:
    """The service after one request about a picture."""
    import base64

    url = "data:image/png;base64," + base64.b64encode(random_png(4711)).decode()
    body = {"model": MODEL, "messages": user(image_part(url), text_part("Describe the picture.")), "max_tokens": 4}
    assert httpx.post(f"{service}/v1/chat/completions", json=body, timeout=120).status_code == httpx.codes.OK
    return service


def test_every_metric_of_panels_and_alerts_exists(used: str) -> None:
    text = httpx.get(f"{used}/metrics", timeout=30).text
    there = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    wanted = {place: metrics_of(expression) - there for place, expression in expressions().items()}
    assert {place: names for place, names in wanted.items() if names} == {}


def test_top_shows_pools_rates_and_cache(used: str) -> None:
    with httpx.Client(base_url=used, timeout=30) as client:
        before = look(client)
        body = {"model": MODEL, "prompt": "Row 1:", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == httpx.codes.OK
        now = look(client)
    assert now.total("lookonce_requests_total", model=MODEL) == before.total("lookonce_requests_total", model=MODEL) + 1
    assert now.quantile(before, "lookonce_request_seconds", 0.5, model=MODEL) is not None
    console = Console(width=160, record=True, file=None)
    with console.capture() as capture:
        console.print(view(now, before))
    shown = capture.get()
    assert "1 running" in shown
    assert "patches waiting" in shown
    assert "KV cache" in shown
    assert "cache:" in shown


def test_top_without_a_terminal_writes_lines_until_nobody_reads(used: str) -> None:
    command = [sys.executable, "-m", "lookonce.cli", "top", "--url", used, "--every", "0.2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = [process.stdout.readline() for _ in range(4)]
        process.stdout.close()
        assert process.wait(30) == 0, process.stderr and process.stderr.read()
    fields = [dict(word.split("=", 1) for word in line.split()) for line in found]
    assert [line.get("model") for line in fields] == [MODEL, None, MODEL, None]
    assert all(line["at"].endswith("Z") for line in fields)
    for line in fields[::2]:
        assert {"requests_per_second", "errors_per_second", "encoder.waiting_patches"} <= line.keys()
        assert (line["language.replicas"], line["language.running"]) == ("1", "0")
    assert fields[1]["cache"] == "reachable"
    assert int(fields[1]["keys"]) >= 2


def test_a_service_that_runs_is_ready(service: str) -> None:
    assert httpx.get(f"{service}/readyz", timeout=10).json() == {"status": "ready"}
