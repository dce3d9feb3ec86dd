"""A dead man's test of every alert: the fault happens to a running service, and Prometheus's own rules call somebody.

What ``/metrics`` tells before and after the fault is played to ``promtool`` as if it went on for half an hour.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
import yaml
from prometheus_client.parser import text_string_to_metric_families

from lookonce import application
from lookonce.service import Service, service
from tests.service.conftest import MODEL, image_part, random_png, service_settings, text_part, user
from tests.service.failures.conftest import CrashingEncoder, Faulty, poisoned
from tests.service.failures.victims import eventually, send, victims
from tests.test_watching import PROMETHEUS, RULES, metrics_of

PROMTOOL = shutil.which("promtool")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; it comes with prometheus"),
]

#: seconds; more than the 30 s of which LookonceSlow tells
DEADLINE = 33.0
PLACES = 32
#: when the fault begins and when somebody must have been called, minutes
BEGIN, END = 10, 40

Series = dict[str, float]


@dataclass
class Watched:
    """A service and its Redis."""

    running: Service
    ask: Faulty

    def scrape(self) -> Series:
        """Every sample as Prometheus would store it; ``up`` alone where nobody answers."""
        try:
            text = httpx.get(f"{self.running.url}/metrics", timeout=10).raise_for_status().text
        except httpx.HTTPError:
            return {'up{job="lookonce"}': 0.0}
        found: Series = {'up{job="lookonce"}': 1.0}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    patch = pytest.MonkeyPatch()
    patch.setattr(application, "EncoderReplica", CrashingEncoder)
    settings = service_settings(
        images={"allow_private_hosts": True, "fetch_timeout": 2 * DEADLINE, "quarantine_seconds": 60.0},
        http={"request_timeout": DEADLINE, "max_concurrent": PLACES},
    )
    (model,) = settings.models
    # every picture is a batch of its own, so that pictures wait for each other
    encoder = model.encoder.model_copy(update={"max_replicas": 1, "max_batch_patches": 1})
    settings = settings.model_copy(update={"models": (model.model_copy(update={"encoder": encoder}),)})
    try:
        with service(settings) as running:
            yield Watched(running, Faulty(running.url))
    finally:
        patch.undo()


def pause(_: Watched) -> None:
    """Freezes the ingress; the scrape that follows gets no answer."""
    send("ingress", signal.SIGSTOP)


@contextmanager
def silent_site() -> Iterator[str]:
    """URL of a picture that never comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/picture.png"


def outlast_the_deadline(watched: Watched) -> None:
    with silent_site() as url:
        body = {"model": MODEL, "messages": user(image_part(url), text_part("Describe the picture."))}
        answer = httpx.post(f"{watched.running.url}/v1/chat/completions", json=body, timeout=2 * DEADLINE)
    assert answer.status_code == httpx.codes.GATEWAY_TIMEOUT, answer.text


def crowd_in(watched: Watched) -> None:
    with ThreadPoolExecutor(2 * PLACES) as threads:
        ask = [threads.submit(watched.ask.ask, random_png(n), max_tokens=200) for n in range(2 * PLACES)]
        assert {answer.result().status_code for answer in ask} >= {httpx.codes.TOO_MANY_REQUESTS}


def show_poison(watched: Watched) -> None:
    assert watched.ask.ask(poisoned(5)).status_code == httpx.codes.UNPROCESSABLE_ENTITY


def kill_a_language_replica(watched: Watched) -> None:
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(watched.ask.ask, random_png(6), max_tokens=900, ignore_eos=True)
        time.sleep(1)
        send("language")
        answer.result()  # its deadline may be over before another replica runs


def lose_redis(watched: Watched) -> None:
    (pid,) = victims("redis")
    frozen = psutil.Process(pid)
    frozen.suspend()
    try:
        for seed in range(700, 712):
            assert watched.ask.ask(random_png(seed), max_tokens=1).status_code == httpx.codes.OK
    finally:
        frozen.resume()


def forget_everything(watched: Watched) -> None:
    """Redis drops entries as fast as they come in."""
    stop = threading.Event()

    def forget() -> None:
        client = redis.Redis.from_url(watched.running.cache_url)
        while not stop.is_set():
            client.flushall()

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(forget)
        try:
            for seed in range(800, 830):
                assert watched.ask.ask(random_png(seed), max_tokens=1).status_code == httpx.codes.OK
        finally:
            stop.set()
            done.result()


def keep_the_encoder_busy(watched: Watched) -> None:
    with ThreadPoolExecutor(PLACES) as threads:
        large = [threads.submit(watched.ask.ask, random_png(900 + n, 1024, 1024), max_tokens=1) for n in range(PLACES)]
        for answer in large:
            answer.result()  # some may wait for longer than their deadline


FAULTS: dict[str, Callable[[Watched], None]] = {
    "LookonceDown": pause,
    "LookonceErrors": outlast_the_deadline,
    "LookonceBusy": crowd_in,
    "LookonceSlow": outlast_the_deadline,
    "LookonceEncoderDeaths": show_poison,
    "LookonceQuarantine": show_poison,
    "LookonceReplicaDeaths": kill_a_language_replica,
    "LookonceCacheFailing": lose_redis,
    "LookonceCacheTooSmall": forget_everything,
    "LookonceEncoderBehind": keep_the_encoder_busy,
}


def test_every_alert_has_its_fault() -> None:
    assert FAULTS.keys() == {rule["alert"] for rule in RULES}


@pytest.fixture
def ready(watched: Watched) -> Iterator[Watched]:
    def there() -> bool:
        try:
            return httpx.get(f"{watched.running.url}/readyz", timeout=10).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    eventually(there, 120, "ready before the fault")
    assert watched.ask.text(random_png(1), max_tokens=1)
    yield watched
    send("ingress", signal.SIGCONT)


@pytest.mark.parametrize("alert", FAULTS)
def test_somebody_is_called(alert: str, ready: Watched, tmp_path: Path) -> None:
    """Nobody before the fault, somebody after it has gone on for a while."""
    before = ready.scrape()
    FAULTS[alert](ready)
    after = ready.scrape()
    assert called(alert, before, before, tmp_path) is False, "without a fault"
    assert called(alert, before, after, tmp_path) is True, changes(alert, before, after)


def changes(alert: str, before: Series, after: Series) -> dict[str, tuple[float | None, float]]:
    """What the fault changed in the series of an alert."""
    return {name: (before.get(name), now) for name, now in after.items() if name.startswith(series_of(alert))}


def series_of(alert: str) -> tuple[str, ...]:
    """How the names begin of what an alert looks at."""
    (rule,) = (rule for rule in RULES if rule["alert"] == alert)
    return ("up{", *(f"{name}{{" for name in metrics_of(rule["expr"])))


def called(alert: str, before: Series, after: Series, folder: Path) -> bool:
    """Whether an alert fires when what happened from one scrape to the other happens every minute from then on."""

    def values(name: str) -> str:
        first = before.get(name, 0.0)
        if name.startswith("up{"):
            return f"{first:g}x{BEGIN} {after.get(name, 0.0):g}x{END}"
        return f"{first:.6f}x{BEGIN} {first:.6f}{after.get(name, first) - first:+.6f}x{END}"

    names = sorted({name for name in before.keys() | after.keys() if name.startswith(series_of(alert))})
    outcomes = []
    for fires in (True, False):
        expected = [{"labels": "{}", "value": 1}] if fires else []
        expression = f'sum(ALERTS{{alertname="{alert}",alertstate="firing"}})'
        test: dict[str, Any] = {
            "rule_files": [str(PROMETHEUS / "alerts.yaml")],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values(name)} for name in names],
                    "promql_expr_test": [
                        {"expr": expression, "eval_time": f"{BEGIN + 20}m", "exp_samples": expected},
                    ],
                }
            ],
        }
        path = folder / "alert.yaml"
        path.write_text(yaml.safe_dump(test))
        done = subprocess.run([str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True)
        outcomes.append(done.returncode == 0)
        words = done.stdout + done.stderr
    assert outcomes[0] != outcomes[1], words
    return outcomes[0]
