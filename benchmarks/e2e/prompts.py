"""Requests of a wanted length that no cache of either side has seen before."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.e2e.load import Ask
from benchmarks.e2e.pictures import picture_url

WORDS = re.findall(
    r"\w+",
    "the red square is left of a blue circle above green triangle there are two objects large yellow star and small "
    "black cross how many what in picture describe this image one sentence",
)
QUESTION = "What is in the picture?"


class Prompts:
    """Makes requests to one checkpoint.

    Args:
        checkpoint: its folder, for the tokenizer.
        side: of its pictures, pixels.
        answer: tokens of an answer.
    """

    def __init__(self, checkpoint: Path, side: int, answer: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.side = side
        self.answer = answer

    def text_of(self, tokens: int, seed: str) -> str:
        """Words of about so many tokens (never more than two off), others for every seed."""
        draw = random.Random(seed)
        words: list[str] = []
        while len(self._tokenizer.encode(" ".join(words)).ids) < tokens:
            words.append(draw.choice(WORDS))
        return " ".join(words)

    def text(
        self, tokens: int, seed: str, answer: int | None = None, kind: str = "text", at: float | None = None
    ) -> Ask:
        """A request without a picture."""
        return self._ask([_text(self.text_of(tokens, seed))], answer, kind, at)

    def image(
        self, *pictures: int, before: str = "", question: str = QUESTION, answer: int | None = None, kind: str = "image"
    ) -> Ask:
        """A request about pictures, by their seeds; ``before`` stands before the first of them."""
        parts = [_text(before)] if before else []
        parts += [{"type": "image_url", "image_url": {"url": picture_url(seed, self.side)}} for seed in pictures]
        return self._ask([*parts, _text(question)], answer, kind, None)

    def dialogue(self, picture: int, turns: int) -> list[Ask]:
        """Questions about one picture, each with all that was said before."""
        messages: list[dict[str, Any]] = []
        asks = []
        for turn in range(turns):
            parts = [_text(self.text_of(12, f"turn {picture} {turn}"))]
            if turn == 0:
                parts.insert(0, {"type": "image_url", "image_url": {"url": picture_url(picture, self.side)}})
            messages.append({"role": "user", "content": parts})
            asks.append(self._body(list(messages), self.answer, "first turn" if turn == 0 else "later turn", None))
            messages.append({"role": "assistant", "content": self.text_of(16, f"reply {picture} {turn}")})
        return asks

    def _ask(self, parts: list[dict[str, Any]], answer: int | None, kind: str, at: float | None) -> Ask:
        return self._body([{"role": "user", "content": parts}], answer or self.answer, kind, at)

    @staticmethod
    def _body(messages: list[dict[str, Any]], answer: int, kind: str, at: float | None) -> Ask:
        body = {"messages": messages, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        return Ask(body, kind, at)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
