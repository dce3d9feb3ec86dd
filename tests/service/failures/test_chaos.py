"""Mixed load with known answers while random processes are killed: ``make chaos``."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest

from lookonce.service import running
from tests.service.conftest import random_png, service_settings
from tests.service.failures.conftest import question
from tests.service.failures.victims import victims

SECONDS = float(os.environ.get("LOOKONCE_CHAOS_SECONDS", "120"))
SEED = int(os.environ.get("LOOKONCE_CHAOS_SEED", "1"))
#: seconds between two kills
PERIOD = 20.0
CLIENTS = 6
#: pictures whose answers are known before; every fifth request is about a new one
KNOWN = 12
#: tries of one request, as the official client makes them when a connection breaks or a 5xx or 429 comes
TRIES = 6

ROLES = ["encoder", "language", "engine", "ingress", "redis"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 900)]


@dataclass
class Tally:
    """What became of requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    answered_at: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def streamed(url: str, seed: int) -> tuple[str, str]:
    """Outcome and text of one streamed request: ``answered``, ``cut`` with an error event, or ``broken``."""
    text, last = "", None
    try:
        body = question(random_png(seed), stream=True)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=130) as response:
            if response.status_code != httpx.codes.OK:
                return "refused", str(response.status_code)
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                last = line.removeprefix("data: ")
                if last == "[DONE]":
                    return "answered", text
                event = json.loads(last)
                if "error" in event:
                    return "cut", text
                text += event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
    except httpx.TransportError as error:
        return "broken", type(error).__name__
    return "broken", f"the stream ended after {last}"


def whole(url: str, seed: int) -> tuple[str, str]:
    """Outcome and text of one whole request."""
    try:
        response = httpx.post(f"{url}/v1/chat/completions", json=question(random_png(seed)), timeout=130)
    except httpx.TransportError as error:
        return "broken", type(error).__name__
    if response.status_code != httpx.codes.OK:
        return "refused", f"{response.status_code} {response.text[:200]}"
    return "answered", response.json()["choices"][0]["message"]["content"]


def client(url: str, number: int, expected: dict[int, str], stop: threading.Event, tally: Tally) -> None:
    chance = random.Random(f"{SEED} {number}")
    fresh = 100_000 * (number + 1)
    while not stop.is_set():
        seed = chance.randrange(KNOWN)
        if chance.random() < 0.2:
            fresh += 1
            seed = fresh
        ask = streamed if chance.random() < 0.5 else whole
        found = []
        for attempt in range(TRIES):
            outcome, text = ask(url, seed)
            found.append(f"{outcome} {text}"[:200])
            with tally.lock:
                tally.outcomes[outcome if not attempt else f"{outcome} at a later try"] += 1
                if outcome == "answered":
                    tally.answered_at.append(time.monotonic())
                    if text != expected.get(seed, text) or not text:
                        tally.wrong.append(f"picture {seed}: {text!r}")
            if outcome in ("answered", "cut"):
                break
            time.sleep(0.5 * 2**attempt)
        else:
            with tally.lock:
                tally.lost.append(f"picture {seed}: {found}")


def test_chaos() -> None:
    """0 lost, 0 wrong; streams that were cut end in an error event and are counted apart."""
    chance, tally, stop = random.Random(SEED), Tally(), threading.Event()
    settings = service_settings(http={"replicas": 2})
    (model,) = settings.models
    encoder = model.encoder.model_copy(update={"min_replicas": 2, "max_replicas": 2})
    settings = settings.model_copy(update={"models": (model.model_copy(update={"encoder": encoder}),)})
    kills: list[tuple[float, str]] = []
    turns = itertools.cycle(chance.sample(ROLES, len(ROLES)))
    with running(settings) as url:
        expected = {seed: whole(url, seed)[1] for seed in range(KNOWN)}
        threads = [
            threading.Thread(target=client, args=(url, number, expected, stop, tally), daemon=True)
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS
        while time.monotonic() + PERIOD < end:
            time.sleep(PERIOD)
            if pids := victims(role := next(turns)):  # none while the last one killed is being replaced
                os.kill(chance.choice(pids), signal.SIGKILL)
                kills.append((time.monotonic(), role))
        time.sleep(PERIOD)
        stop.set()
        for thread in threads:
            thread.join(timeout=150)
            assert not thread.is_alive(), "a request never ended"
        assert [whole(url, seed)[1] for seed in range(KNOWN)] == list(expected.values())
    answered = sorted(tally.answered_at)
    for at, role in kills:
        gaps = [b - a for a, b in itertools.pairwise(answered) if b > at and a < at + PERIOD]
        print(
            f"{role:8} killed; longest time without an answer in the {PERIOD:g} s after: {max(gaps, default=0):.1f} s"
        )
    print(dict(tally.outcomes))
    assert {role for _, role in kills} == set(ROLES) or 2 * PERIOD * len(ROLES) > SECONDS
    assert tally.wrong == []
    assert tally.lost == []
    assert tally.outcomes["answered"] > SECONDS / 2
