"""Two stock ``vllm serve`` processes share what they encode, and nothing that Redis does disturbs them."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
import torch

from tests.llm_service.qwen2vl import write_qwen2vl
from tests.llm_service.stock import Server, data_url, serve
from tools.checkpoints.isaac import write_isaac

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
WRITERS: dict[str, Callable[[Path], Path]] = {"qwen2vl": write_qwen2vl, "isaac": write_isaac}
SQUARE, WIDE, OTHER = data_url(1), data_url(2, 168, 56), data_url(3, 96, 96)


@pytest.fixture(params=WRITERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return WRITERS[request.param](tmp_path / request.param)


def same(got: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [token for token, _ in got] == [token for token, _ in expected]
    assert max(abs(ours - theirs) for (_, ours), (_, theirs) in zip(got, expected, strict=True)) < 1e-3


def test_what_one_encodes_the_other_loads(checkpoint: Path, redis_url: str, tmp_path: Path) -> None:
    """Tokens and log-probabilities as without a connector; and the second engine loads instead of encoding."""
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    questions: list[tuple[str, ...]] = [(SQUARE,), (WIDE,), (OTHER,), (SQUARE, WIDE, SQUARE)]
    with serve(checkpoint, tmp_path / "plain.log", None) as plain:
        expected = [plain.ask(*urls) for urls in questions]
    assert expected[0] != expected[2], "the answers do not depend on the picture: the test is idle"
    extra = {"redis_url": redis_url}
    with ExitStack() as stack:
        first = stack.enter_context(serve(checkpoint, tmp_path / "first.log", "ec_both", extra))
        second = stack.enter_context(serve(checkpoint, tmp_path / "second.log", "ec_consumer", extra))
        for urls, wanted in zip(questions, expected, strict=True):
            same(first.ask(*urls), wanted)
        assert first.until("saved", 3)["saved"] == 3
        keys = set(client.scan_iter("lookonce:emb:*"))
        assert len(keys) == 3
        for urls, wanted in zip(questions, expected, strict=True):
            same(second.ask(*urls), wanted)
        counters = second.until("hits", 3)
        assert counters.get("misses", 0) == 0
        assert counters.get("saved", 0) == 0, "a consumer saves nothing"
        tenants(first, second, client, keys)
        uuids(first, client)
        if checkpoint.name == "qwen2vl":
            bare(second)
            same(second.ask(*questions[0]), expected[0])


def tenants(first: Server, second: Server, client: redis.Redis, keys: set[bytes]) -> None:
    """Another cache salt finds nothing and shares nothing, and its own second request does."""
    picture = data_url(11)
    first.ask(picture, cache_salt="red")
    first.until("saved", 4)
    assert len(set(client.scan_iter("lookonce:emb:*")) - keys) == 1
    before = second.counters()
    second.ask(picture, cache_salt="red")
    assert second.until("hits", before["hits"] + 1)["misses"] == before.get("misses", 0)
    second.ask(data_url(12), cache_salt="blue")
    second.until("misses", before.get("misses", 0) + 1)


def uuids(server: Server, client: redis.Redis) -> None:
    """C9: a client that names two pictures alike writes the embedding of each under its own content."""
    before = set(client.scan_iter("lookonce:emb:*"))
    for number in (21, 22):
        content: Any = [
            {"type": "image_url", "image_url": {"url": data_url(number)}, "uuid": "mine"},
            {"type": "text", "text": "What?"},
        ]
        server.client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], max_tokens=2)
    server.until("saved", server.counters()["saved"])
    added = set(client.scan_iter("lookonce:emb:*")) - before
    assert not any(b"mine" in key for key in added)
    assert len(added) == 1, "vLLM took its own entry for the second; ours was not written to"


def bare(server: Server) -> None:
    """A request that brings only the size of its picture: it fails, and nothing else does."""
    buffer = io.BytesIO()
    torch.save(torch.tensor([1, 6, 6]), buffer)
    part: Any = {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": base64.b64encode(buffer.getvalue()).decode()},
        "uuid": "seen-nowhere",
    }
    messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    with pytest.raises(openai.InternalServerError):
        server.client.chat.completions.create(model="m", messages=messages, max_tokens=2)
    assert server.until("unavailable", 1)["unavailable"] == 1


class Delay:
    """Holds back every byte of Redis's replies for so many seconds."""

    def __init__(self, upstream: Path) -> None:
        self.seconds = 0.0
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self.url = f"redis://127.0.0.1:{server.result(10).sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(str(self._upstream))
        await asyncio.gather(self._pump(reader, up_writer, False), self._pump(up_reader, writer, True))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
        try:
            while data := await reader.read(1 << 16):
                if slow and self.seconds:
                    await asyncio.sleep(self.seconds)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()


@pytest.fixture
def delay(redis_url: str) -> Iterator[Delay]:
    made = Delay(Path(redis_url.removeprefix("unix://")))
    yield made
    made.close()


def gaps(server: Server, tokens: int, meanwhile: Callable[[], object]) -> list[float]:
    """Seconds between the tokens of one text answer; ``meanwhile`` runs in a thread after the tenth."""
    stream = server.client.completions.create(
        model="m", prompt="How many?", max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    times: list[float] = []
    thread = threading.Thread(target=meanwhile)
    for _ in stream:
        times.append(time.monotonic())
        if len(times) == 10:
            thread.start()
    thread.join()
    return [after - before for before, after in pairwise(times[10:])]


def test_a_slow_redis_delays_no_other_request(delay: Delay, tmp_path: Path) -> None:
    """Redis answers after 1 s: who needs a picture waits for it; who decodes text does not notice."""
    checkpoint = write_qwen2vl(tmp_path / "qwen")
    extra = {"redis_url": delay.url, "timeout": 3.0}
    with serve(checkpoint, tmp_path / "slow.log", "ec_both", extra) as server:
        expected = server.ask(SQUARE)
        server.until("saved", 1)
        quiet = sorted(gaps(server, 400, lambda: server.ask(OTHER)))
        for number in range(40):  # push the first picture out of the engine's own caches
            server.ask(data_url(100 + number, 256, 256), max_tokens=1)
        delay.seconds = 1.0
        took: list[float] = []

        def ask() -> None:
            begin = time.monotonic()
            for number in (200, 201):
                server.ask(data_url(number), max_tokens=2)
            took.append(time.monotonic() - begin)

        slow = sorted(gaps(server, 400, ask))
        report = {
            name: (round(times[len(times) // 2], 4), round(times[-1], 4))
            for name, times in (("quiet", quiet), ("slow", slow))
        }
        print("median and largest gap between tokens, seconds:", report, "two pictures took", took)
        assert took[0] > 2, "the delay did not happen"
        assert slow[-1] < 0.5
        assert slow[-1] < max(0.1, 5 * quiet[-1])
        delay.seconds = 0.0
        same(server.ask(SQUARE), expected)


def test_a_dead_redis_costs_the_deadline(tmp_path: Path) -> None:
    """Nobody listens at all: every answer is right and the engine lives."""
    checkpoint = write_qwen2vl(tmp_path / "qwen")
    with serve(checkpoint, tmp_path / "plain.log", None) as plain:
        expected = plain.ask(SQUARE)
    with serve(checkpoint, tmp_path / "dead.log", "ec_both", {"redis_url": "redis://127.0.0.1:1"}) as server:
        begin = time.monotonic()
        same(server.ask(SQUARE), expected)
        assert time.monotonic() - begin < 10
        for number in range(5):
            server.ask(data_url(300 + number))
        assert server.until("save_failed", 6)["misses"] == 6
