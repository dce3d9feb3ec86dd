"""Mixed load: new pictures, repeated ones, text alone, streams to their end and streams that are left."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image

#: kinds of requests and how often they come
MIX = {"new": 5, "repeated": 5, "text": 3, "stream": 4, "left": 1}
#: repeated pictures, the first asked about most often
KNOWN = 60
SIDES = (64, 96, 128, 192, 256, 384)


@dataclass
class Tally:
    """What became of requests: answers by kind, and a sentence for every other."""

    answered: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def picture(seed: int) -> str:
    """A picture that this seed alone gives, as a data URL: quick to draw, so that the clients cost little."""
    side = SIDES[seed % len(SIDES)]
    pixels = np.full((side, side, 3), 200, np.uint8)
    pixels[: side // 2, : side // 2] = np.random.default_rng(seed).integers(0, 256, 3, dtype=np.uint8)
    pixels[-1, -8:] = np.frombuffer(seed.to_bytes(8, "big"), np.uint8)[:, None]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def request(model: str, kind: str, seed: int) -> dict[str, Any]:
    """One request; its pictures and length are the seed's."""
    text = {"type": "text", "text": f"Describe picture {seed}." if kind == "text" else "Describe the picture."}
    image = {"type": "image_url", "image_url": {"url": picture(seed)}}
    content = [text] if kind == "text" else [image, text]
    more = {"stream": True, "max_tokens": 48, "ignore_eos": True} if kind in ("stream", "left") else {"max_tokens": 8}
    return {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0} | more


class Load:
    """Clients that ask for as long as they may, with pauses between.

    Args:
        url: of the service.
        model: its name there.
        clients: how many ask at once.
        pause: seconds between two requests of one, about.
    """

    def __init__(self, url: str, model: str, clients: int, pause: float) -> None:
        self._url = url
        self._model = model
        self._clients = clients
        self._pause = pause
        self._fresh = itertools.count(1_000_000)
        self.tally = Tally()

    async def run(self, seconds: float) -> None:
        """Asks for so long; requests under way then come to their end."""
        end = asyncio.get_running_loop().time() + seconds
        async with httpx.AsyncClient(base_url=self._url, timeout=180, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, number, end) for number in range(self._clients)))

    async def _client(self, http: httpx.AsyncClient, number: int, end: float) -> None:
        chance = random.Random(number)
        ranks = [1 / (rank + 1) for rank in range(KNOWN)]
        while asyncio.get_running_loop().time() < end:
            (kind,) = chance.choices(list(MIX), list(MIX.values()))
            (known,) = chance.choices(range(KNOWN), ranks)
            seed = next(self._fresh) if kind == "new" or (kind == "left" and chance.random() < 0.5) else known
            try:
                await self._ask(http, kind, seed)
            except httpx.HTTPError as error:
                self.tally.faults.append(f"{kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(self._pause * chance.uniform(0.5, 1.5))

    async def _ask(self, http: httpx.AsyncClient, kind: str, seed: int) -> None:
        body = request(self._model, kind, seed)
        if "stream" not in body:
            response = await http.post("/v1/chat/completions", json=body)
            return self._note(kind, None if response.status_code == httpx.codes.OK else response.text[:200])
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            events = 0
            async for line in response.aiter_lines():
                events += line.startswith("data: ")
                if line == "data: [DONE]":
                    return self._note(kind, None)
                if line.startswith("data: ") and "error" in json.loads(line.removeprefix("data: ")):
                    return self._note(kind, line[:200])
                if kind == "left" and events == 3:
                    return self._note(kind, None)
        return self._note(kind, "the stream stopped before its end")

    def _note(self, kind: str, fault: str | None) -> None:
        if fault is None:
            self.tally.answered[kind] += 1
        else:
            self.tally.faults.append(f"{kind}: {fault}")
