"""Clients that ask without a pause, and what became of every request."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.service.scaling.kit import body

#: answers of these pictures are known before
KNOWN = range(700, 704)


@dataclass
class Outcome:
    """What became of requests.

    Attributes:
        answered: how many have the right answer.
        faults: a sentence for every other.
    """

    answered: int = 0
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, fault: str | None) -> None:
        with self.lock:
            if fault is None:
                self.answered += 1
            else:
                self.faults.append(fault)


def streamed(url: str, request: dict[str, Any]) -> str:
    """The text of a streamed answer that came to its end."""
    text, ended = "", False
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=request | {"stream": True}, timeout=130) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            raise AssertionError(f"{response.status_code}: {response.text[:200]}")
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    assert ended, "the stream stopped before its end"
    return text


def long_answer(seed: int) -> dict[str, Any]:
    """A question whose answer takes seconds."""
    return body(seed, max_tokens=300, ignore_eos=True)


@contextmanager
def load(url: str, clients: int = 4) -> Iterator[Outcome]:
    """Asks for the length of a ``with`` block: long streams about known pictures, short questions about new ones."""
    expected = {seed: streamed(url, long_answer(seed)) for seed in KNOWN}
    outcome, stop, fresh = Outcome(), threading.Event(), itertools.count(50_000)

    def long() -> None:
        for seed in itertools.cycle(KNOWN):
            if stop.is_set():
                return
            same = streamed(url, long_answer(seed)) == expected[seed]
            outcome.note(None if same else f"another answer about picture {seed}")

    def short() -> None:
        while not stop.is_set():
            outcome.note(None if streamed(url, body(next(fresh))) else "an empty answer")

    def client(work: Callable[[], None]) -> None:
        while not stop.is_set():
            try:
                work()
            except (AssertionError, httpx.HTTPError) as error:
                outcome.note(f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(clients) as threads:
        done = [threads.submit(client, long if number % 2 else short) for number in range(clients)]
        try:
            yield outcome
        finally:
            stop.set()
            for future in done:
                future.result()
