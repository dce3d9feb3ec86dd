"""The load generator: streams chat completions and notes when every piece arrived. It knows no server's name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

#: a request that takes longer counts as failed, seconds
TIMEOUT = 600.0


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        body: without ``model`` and ``stream``.
        kind: what it is counted as, such as ``text`` or ``image``.
        at: when it is sent, seconds after the begin; None as soon as a client is free.
        expected: the right answer, where there is one.
    """

    body: dict[str, Any]
    kind: str = "image"
    at: float | None = None
    expected: str | None = None


@dataclass
class Result:
    """What became of one request. Times are in seconds after the begin of the run.

    Attributes:
        ask: the request.
        sent: when.
        pieces: arrival of every piece of the answer.
        text: the answer.
        prompt_tokens, answer_tokens: as the server counts them.
        error: why it failed; empty when it did not.
    """

    ask: Ask
    sent: float
    pieces: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first piece of the answer."""
        return self.pieces[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def right(self) -> bool:
        """Whether the answer is the expected one."""
        return not self.error and self.text == self.ask.expected


class Client:
    """Sends requests to one server.

    Args:
        url: base URL, without ``/v1``.
        model: name that the server gives its model.
    """

    def __init__(self, url: str, model: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False)
        self._model = model

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def send(self, ask: Ask, begin: float) -> Result:
        """Streams one answer; a failure becomes part of the result."""
        body = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **ask.body}
        content = json.dumps(body).encode()  # before the clock starts: it is no server's work
        result = Result(ask, time.perf_counter() - begin)
        headers = {"content-type": "application/json"}
        try:
            async with self._http.stream("POST", "/v1/chat/completions", content=content, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    result.error = f"{response.status_code}: {(await response.aread())[:300]!r}"
                    return result
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        _take(result, json.loads(line[6:]), time.perf_counter() - begin)
        except httpx.HTTPError as error:
            result.error = f"{type(error).__name__}: {error}"
        if not result.error and not result.pieces:
            result.error = "an empty stream"
        return result


def _take(result: Result, event: dict[str, Any], now: float) -> None:
    """Notes one server-sent event. What opens an answer carries no token yet and is not its first piece."""
    if "error" in event:
        result.error = str(event["error"])[:300]
    if usage := event.get("usage"):
        result.prompt_tokens = usage["prompt_tokens"]
        result.answer_tokens = usage["completion_tokens"]
    for choice in event.get("choices") or ():
        if "role" in choice["delta"] and not choice["delta"].get("content"):
            continue
        result.pieces.append(now)
        result.text += choice["delta"].get("content") or ""


async def closed_loop(client: Client, asks: Sequence[Ask], clients: int) -> list[Result]:
    """So many clients, each of which sends its next request when it has its answer."""
    waiting = iter(asks)
    begin = time.perf_counter()

    async def one() -> list[Result]:
        return [await client.send(ask, begin) for ask in waiting]  # the clients share the iterator

    return [result for results in await asyncio.gather(*(one() for _ in range(clients))) for result in results]


async def open_loop(client: Client, asks: Sequence[Ask]) -> list[Result]:
    """Every request at its own time, whatever became of those before."""
    begin = time.perf_counter()

    async def one(ask: Ask) -> Result:
        await asyncio.sleep((ask.at or 0) - (time.perf_counter() - begin))
        return await client.send(ask, begin)

    return list(await asyncio.gather(*(one(ask) for ask in asks)))


async def conversations(client: Client, chats: Sequence[Sequence[Ask]], clients: int) -> list[Result]:
    """So many clients, each of which leads whole conversations; a turn is sent when the turn before has its answer."""
    waiting = iter(chats)
    begin = time.perf_counter()

    async def one() -> list[Result]:
        return [await client.send(turn, begin) for chat in waiting for turn in chat]

    return [result for results in await asyncio.gather(*(one() for _ in range(clients))) for result in results]
