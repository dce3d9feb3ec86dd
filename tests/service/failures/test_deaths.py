"""Processes that are killed or frozen while they work."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.service.conftest import metric, random_png
from tests.service.failures.conftest import Faulty, question
from tests.service.failures.victims import eventually, send, victims

pytestmark = pytest.mark.slow

#: answers long enough to be interrupted
LONG = {"max_tokens": 900, "ignore_eos": True}
#: seconds; a language replica on a busy machine
RESTART = 120


@pytest.fixture(autouse=True)
def _all_there(faulty: Faulty) -> Iterator[None]:
    eventually(lambda: httpx.get(f"{faulty.url}/readyz", timeout=10).status_code == 200, RESTART, "ready before")
    yield


def events(faulty: Faulty, seed: int, after_first: threading.Event) -> list[str]:
    """Data of a stream's events; the flag is set when the first has come."""
    found = []
    body = question(random_png(seed), stream=True, **LONG)
    with httpx.stream("POST", f"{faulty.url}/v1/chat/completions", json=body, timeout=130) as response:
        assert response.status_code == httpx.codes.OK
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(line.removeprefix("data: "))
                after_first.set()
    return found


def in_background(faulty: Faulty, seed: int) -> Future[str]:
    """A long answer, which is under way when this returns."""
    running = metric(faulty.url, "lookonce_requests_total")
    with_result: Future[str] = Future()

    def work() -> None:
        try:
            with_result.set_result(faulty.text(random_png(seed), **LONG))
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            with_result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    time.sleep(1)
    assert metric(faulty.url, "lookonce_requests_total") == running, "not under way any more"
    return with_result


@pytest.mark.parametrize("role", ["language", "engine"])
def test_a_whole_answer_survives_its_replica(faulty: Faulty, role: str) -> None:
    """A6: killed in the middle of an answer of which nothing has gone out, it is begun again elsewhere."""
    expected = faulty.text(random_png(1), **LONG)
    children = victims("engine")
    answer = in_background(faulty, 1)
    send(role)
    assert answer.result(timeout=RESTART) == expected
    assert metric(faulty.url, "lookonce_resubmitted_total") >= 1
    eventually(lambda: not set(children) & set(victims("engine")), 30, "the killed replica's engine is gone")


def test_a_stream_that_was_cut_says_so(faulty: Faulty) -> None:
    """After the first token nothing can be taken back: the stream ends in an error event."""
    flag = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(events, faulty, 2, flag)
        assert flag.wait(60)
        send("language")
        *_, last, done = stream.result(timeout=60)
    assert done == "[DONE]"
    error = json.loads(last)["error"]
    assert error["code"] == "unavailable"
    assert faulty.text(random_png(2)), "the next one is answered"


def test_readiness_is_lost_and_comes_back(faulty: Faulty) -> None:
    """A10: with no language replica left, nobody should be sent here."""
    send("language")

    def ready() -> int:
        return httpx.get(f"{faulty.url}/readyz", timeout=10).status_code

    eventually(lambda: ready() == httpx.codes.SERVICE_UNAVAILABLE, 30, "not ready")
    assert httpx.get(f"{faulty.url}/healthz", timeout=10).status_code == httpx.codes.OK
    eventually(lambda: ready() == httpx.codes.OK, RESTART, "ready again")


def test_killed_encoders_cost_time_only(faulty: Faulty) -> None:
    """A10: both encoders die under load; every picture is encoded by another one."""
    alone = [faulty.text(random_png(seed)) for seed in range(20, 24)]
    with ThreadPoolExecutor(12) as threads:
        new = [threads.submit(faulty.ask, random_png(seed, 300, 300)) for seed in range(200, 208)]
        time.sleep(0.2)
        send("encoder")
        known = [threads.submit(faulty.text, random_png(seed)) for seed in range(20, 24)]
        assert [answer.result() for answer in known] == alone, "known pictures need no encoder"
    assert [response.result().status_code for response in new] == [httpx.codes.OK] * len(new)


@pytest.mark.parametrize("role", ["encoder", "engine"])
def test_a_frozen_process_is_replaced(faulty: Faulty, role: str) -> None:
    """A process that hangs without dying: health checks find it, and what it held is done by another."""
    expected = faulty.text(random_png(30), **LONG)
    frozen = victims(role)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert faulty.ask(random_png(300)).status_code == httpx.codes.OK
        assert faulty.text(random_png(30), **LONG) == expected
    finally:
        eventually(lambda: not set(frozen) & set(victims(role)), 90, "the frozen processes are gone")


def test_redis_dies_under_load(faulty: Faulty) -> None:
    """R5: embeddings travel inside the requests until it is back; then they are kept again."""
    alone = [faulty.text(random_png(seed)) for seed in range(40, 44)]
    with ThreadPoolExecutor(8) as threads:
        first = [threads.submit(faulty.text, random_png(seed)) for seed in range(40, 44)]
        (old,) = send("redis")
        second = [threads.submit(faulty.text, random_png(seed)) for seed in range(40, 44)]
    assert [answer.result() for answer in first] == alone
    assert [answer.result() for answer in second] == alone
    eventually(lambda: [pid for pid in victims("redis") if pid != old], 10, "another Redis")
    time.sleep(5)  # until the circuits have closed
    assert faulty.text(random_png(45))
    body = faulty.ask(random_png(45)).json()
    details = body["usage"]["prompt_tokens_details"]
    assert details["cached_image_tokens"] == details["image_tokens"] > 0


def test_a_killed_ingress_comes_back(faulty: Faulty) -> None:
    """What was under way there is lost with an error; a client's own retry is answered."""
    expected = faulty.text(random_png(50))
    send("ingress")

    def answered() -> bool:
        try:
            response = faulty.ask(random_png(50))
        except httpx.TransportError:
            return False
        return response.status_code == 200 and response.json()["choices"][0]["message"]["content"] == expected

    eventually(answered, 60, "the ingress answers again")
