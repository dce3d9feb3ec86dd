"""Batches through crashes of the process that runs them, full limits, and company: no engine is needed here."""

from __future__ import annotations

import asyncio
import io
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llm_service.api.access import EVERYBODY, Tenant
from llm_service.api.batches import attempts
from llm_service.api.batches.attempts import MAX_ATTEMPTS, attempt
from llm_service.api.batches.files import FileStore
from llm_service.api.batches.jobs import ANSWERS, BatchStore
from llm_service.api.batches.records import BatchRequest
from llm_service.api.batches.service import running_batches
from llm_service.api.batches.turns import Turns
from shared.config import BatchSettings
from shared.errors import Busy, PayloadTooLarge, Unavailable, UnknownFile

LINES = 300


def input_lines(count: int) -> bytes:
    body = {"messages": []}
    made = [
        {"custom_id": f"row {n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(count)
    ]
    for broken in made[::10]:
        broken["body"] = {"broken": True}
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def request(file: str) -> BatchRequest:
    return BatchRequest(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h")


def test_killed_at_any_time_every_line_has_one_answer(tmp_path: Path) -> None:
    """B2, B3: a process that is killed again and again, at times of chance."""
    files, jobs = FileStore(tmp_path, BatchSettings()), BatchStore(tmp_path)
    content = input_lines(LINES)
    file = files.add(EVERYBODY, "in.jsonl", io.BytesIO(content), None)
    batch = jobs.create(EVERYBODY, request(file.id))
    chance, kills = random.Random(3), 0
    deadline = time.monotonic() + 120
    while jobs.get(EVERYBODY, batch.id).status != "completed":
        assert time.monotonic() < deadline
        process = subprocess.Popen([sys.executable, "-m", "tests.api.batch_process", str(tmp_path)])
        journal = jobs.folder(EVERYBODY, batch.id) / ANSWERS
        before = journal.stat().st_size if journal.exists() else 0
        while process.poll() is None and jobs.get(EVERYBODY, batch.id).status != "completed":
            time.sleep(0.01)
            grown = (journal.stat().st_size if journal.exists() else 0) - before
            if kills < 5 and grown > chance.randrange(60_000, 200_000):
                kills += 1
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        if kills == 2 and journal.exists():  # power lost in the middle of a line
            with journal.open("r+b") as torn:
                torn.truncate(journal.stat().st_size - 700)
    assert kills >= 3
    done = jobs.get(EVERYBODY, batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (LINES * 9 // 10, LINES // 10)
    found = [
        json.loads(line)
        for name in (done.output_file_id, done.error_file_id)
        for line in files.content(EVERYBODY, str(name)).read_bytes().splitlines()
    ]
    assert sorted(row["custom_id"] for row in found) == sorted(f"row {n}" for n in range(LINES))
    assert all((row["response"]["status_code"] == 400) == ("error" in row["response"]["body"]) for row in found)


async def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Two ingress replicas on one folder: each line is answered once."""
    asked: list[bytes] = []

    async def answer(endpoint: str, body: bytes, tenant: Tenant, request: str) -> dict[str, Any]:
        asked.append(body)
        await asyncio.sleep(0.001)
        raise PayloadTooLarge("no")

    settings = BatchSettings(folder=tmp_path)
    async with (
        running_batches(settings, [EVERYBODY], answer, lambda: 0) as one,
        running_batches(settings, [EVERYBODY], answer, lambda: 0) as two,
    ):
        file = one.files.add(EVERYBODY, "in", io.BytesIO(input_lines(20)), None)
        batch = one.create(EVERYBODY, request(file.id))
        async with asyncio.timeout(20):
            while two.jobs.get(EVERYBODY, batch.id).status != "completed":  # noqa: ASYNC110 - what it waits for lives on a disk
                await asyncio.sleep(0.02)
    assert len(asked) == 20


async def test_a_line_is_tried_again_while_the_service_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_PAUSE", 0.001)
    left = [Busy("full")] * 30 + [Unavailable("down")] * (MAX_ATTEMPTS - 1)
    raw = input_lines(2).splitlines()[1]

    async def answer(endpoint: str, body: bytes, tenant: Tenant, request: str) -> dict[str, Any]:
        if left:
            raise left.pop()
        return {"fine": True}

    row, failed = await attempt(answer, "/v1/chat/completions", raw, EVERYBODY)
    assert (failed, row["custom_id"], row["response"]["body"]) == (False, "row 1", {"fine": True})
    left = [Unavailable("down")] * 100
    row, failed = await attempt(answer, "/v1/chat/completions", raw, EVERYBODY)
    assert failed
    assert row["response"]["status_code"] == 503
    assert len(left) == 100 - MAX_ATTEMPTS


async def test_people_go_first_and_tenants_in_turn() -> None:
    interactive = 1
    turns = Turns(BatchSettings(concurrency=3, concurrency_beside_others=1), lambda: interactive)
    order: list[str] = []

    async def line(tenant: str) -> None:
        await turns.take(tenant)
        order.append(tenant)

    tasks = [asyncio.create_task(line(name)) for name in "aaaaab"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a"]
    turns.give()
    await asyncio.sleep(0)
    assert order == ["a", "a"] or order == ["a", "b"]
    interactive = 0
    tasks[-2].cancel()  # somebody leaves the queue
    turns.give()
    await asyncio.sleep(0.01)
    assert len(order) == 5
    assert order.count("b") == 1
    turns.give()
    turns.give()
    turns.give()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order.count("a") == 4


def test_limits_on_files(tmp_path: Path) -> None:
    store = FileStore(tmp_path, BatchSettings(max_file_bytes=100, max_tenant_bytes=150))
    one = store.add(EVERYBODY, "a", io.BytesIO(b"x" * 100), None)
    with pytest.raises(PayloadTooLarge, match="the limit is 100"):
        store.add(EVERYBODY, "a", io.BytesIO(b"x" * 101), None)
    with pytest.raises(PayloadTooLarge, match="together"):
        store.add(EVERYBODY, "a", io.BytesIO(b"x" * 51), None)
    store.add(Tenant(name="somebody"), "a", io.BytesIO(b"x" * 51), None)
    store.delete(EVERYBODY, one.id)
    store.add(EVERYBODY, "a", io.BytesIO(b"x" * 51), None)


def test_expired_files_go(tmp_path: Path) -> None:
    store = FileStore(tmp_path, BatchSettings())
    file = store.add(EVERYBODY, "a", io.BytesIO(b"x"), -1)
    with pytest.raises(UnknownFile):
        store.get(EVERYBODY, file.id)
    store.sweep(EVERYBODY)
    assert not (tmp_path / "_everybody" / "files" / file.id).exists()
