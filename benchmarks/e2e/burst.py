"""Many image requests at the same moment, to the trained demo model: how many answers are right?"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.e2e.load import Ask, Client, Result, open_loop
from tools.demo import questions
from tools.demo.pictures import draw

CHECKPOINT = Path("models/demo")
#: pictures that no other command draws
FIRST_SEED = 9_700_000


@dataclass(frozen=True)
class Burst:
    """What came back.

    Attributes:
        side: which.
        sent, answered, right: requests, answers without an error, and those with the right text.
        seconds: until the last answer.
        errors: what the failed ones were told, each once.
    """

    side: str
    sent: int
    answered: int
    right: int
    seconds: float
    errors: list[str]


def burst_asks(count: int) -> list[Ask]:
    """One question with a known answer about each of so many new pictures."""
    asks = []
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        picture, scene = draw(seed, "held-out")
        question = questions.at(np.random.default_rng(seed), scene)
        file = io.BytesIO()
        picture.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question.text}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 32, "temperature": 0}
        asks.append(Ask(body, at=0.0, expected=question.answer))
    return asks


async def burst(client: Client, side: str, asks: list[Ask]) -> Burst:
    """Sends all at once."""
    results: list[Result] = await open_loop(client, asks)
    answered = [result for result in results if not result.error]
    return Burst(
        side,
        len(results),
        len(answered),
        sum(result.right for result in results),
        max((result.pieces[-1] for result in answered), default=0.0),
        sorted({result.error for result in results if result.error}),
    )
