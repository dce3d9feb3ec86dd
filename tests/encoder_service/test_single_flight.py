"""C19 across processes: one encode per new image, and a dead owner costs its lease, not the request."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.local_redis import LocalRedis
from tests.encoder_service.kit import file, pixels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
LEASE = 2.0


class Worker:
    """One process with an encoder."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def order(self, data: bytes, callers: int, *, hold: bool = False) -> None:
        assert self.process.stdin
        line = json.dumps({"file": base64.b64encode(data).decode(), "callers": callers, "hold": hold})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"the worker ended with {self.process.wait()}")


@contextmanager
def workers(count: int, checkpoint: Path, url: str) -> Iterator[list[Worker]]:
    command = [sys.executable, "-m", "tests.encoder_service.flight_worker", str(checkpoint), url, str(LEASE)]
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            made.append(Worker(process))
        assert all(worker.answer() == {"ready": True} for worker in made)
        yield made


def test_64_requests_in_4_processes_are_one_encode(checkpoint: Path, redis_server: LocalRedis) -> None:
    """20 times, each with a new image."""
    with workers(4, checkpoint, redis_server.url) as four:
        for turn in range(20):
            data = file(pixels(1000 + turn))
            for worker in four:
                worker.order(data, 16)
            answers = [worker.answer() for worker in four]
            assert [answer["answers"] for answer in answers] == [16] * 4, answers
            assert len({tuple(answer["keys"]) for answer in answers}) == 1
            assert sum(answer["forwards"] for answer in answers) == 1, (turn, answers)


def test_a_killed_owner_is_replaced_within_its_lease_and_a_second(checkpoint: Path, redis_server: LocalRedis) -> None:
    client = redis.Redis.from_url(redis_server.url)
    with workers(4, checkpoint, redis_server.url) as (owner, *others):
        for worker in others:  # warm
            worker.order(file(pixels(2000)), 1)
            worker.answer()
        data = file(pixels(2001))
        owner.order(data, 1, hold=True)
        while not client.keys("lookonce:lease:*"):
            time.sleep(0.01)
        for worker in others:
            worker.order(data, 16)
        time.sleep(2 * LEASE)  # the owner lives and renews: nobody moves
        assert client.keys("lookonce:lease:*")
        owner.process.kill()
        begin = time.monotonic()
        answers = [worker.answer() for worker in others]
        took = time.monotonic() - begin
        assert [answer["answers"] for answer in answers] == [16] * 3, answers
        assert sum(answer["forwards"] for answer in answers) == 1
        print(f"taken over and encoded {took:.2f} s after the kill; the lease is {LEASE} s")
        assert took < LEASE + 1
