"""What a test of the engine needs from the ingress and the encoder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from llm_service.messages import Chunk
from llm_service.prompts import Prompt, PromptBuilder
from tests.llm_service.conftest import EngineThread
from tests.llm_service.pictures import Embedded, Picture, embed

SQUARE, WIDE = Picture(1, 96, 96), Picture(2, 200, 60)


class Desk:
    """Asks the engine about pictures, playing ingress and encoder."""

    def __init__(self, engine: EngineThread, checkpoint: Path, client: redis.Redis) -> None:
        self.engine = engine
        self.checkpoint = checkpoint
        self.client = client
        self.builder = PromptBuilder(checkpoint)
        self._fresh = 0

    def embed(self, *pictures: Picture, store: bool = True) -> list[Embedded]:
        """Under keys that no test before has used."""
        self._fresh += 1
        embedded = [embed(self.checkpoint, picture, f"{self._fresh}-{time.time_ns()}:") for picture in pictures]
        for image in embedded if store else ():
            self.client.set(image.key, image.record)
        return embedded

    def prompt(self, images: Sequence[Embedded], text: str = "What is in the picture?") -> Prompt:
        parts: list[dict[str, Any]] = [{"type": "image_url"} for _ in images]
        content = [*parts, {"type": "text", "text": text}]
        return self.builder.build([{"role": "user", "content": content}], [len(image.rows) for image in images])

    def ask(self, images: Sequence[Embedded], inline: bool = False, **sampling: Any) -> list[Chunk]:
        return self.engine.ask(self.prompt(images), [image.item(inline=inline) for image in images], **sampling)

    def check_alive(self) -> None:
        """The engine answers a fresh picture rightly."""
        images = self.embed(SQUARE)
        assert tokens(self.ask(images)) == tokens(self.ask(self.embed(SQUARE), inline=True))

    def quiet(self, within: float = 5) -> bool:
        """Whether nothing runs or waits any more."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            # figures come with steps, so give it one
            self.engine.ask(self.prompt([]), max_tokens=1)
            if self.engine.engine.stats()["running"] + self.engine.engine.stats()["waiting"] <= 1:
                return True
            time.sleep(0.1)
        return False


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]
