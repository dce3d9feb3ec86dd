"""One row, from its reference to its captions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from llm_service.captioning.desks import Answer, Desk, Seen
from llm_service.captioning.duplicates import Index
from llm_service.captioning.images import read_image
from llm_service.captioning.patience import JobStopped, Patience
from llm_service.captioning.question import Question
from llm_service.captioning.rows import Outcome, Row
from shared import images
from shared.config import ImageSettings
from shared.errors import LookonceError
from shared.fetch import ImageFetcher
from shared.images import ImageHeader
from shared.keys import file_hash


@dataclass(frozen=True)
class Marks:
    """What every output row carries.

    Attributes:
        model: name of the model.
        model_fingerprint, prompt_fingerprint: of what made the caption.
    """

    model: str
    model_fingerprint: str
    prompt_fingerprint: str


class Captioner:
    """Captions rows, as many at a time as its caller likes.

    Args:
        desk: who answers.
        question: what is asked.
        marks: for the output.
        limits: on pictures.
        patience: when to try again.
        index: captions by content; None captions every row by itself.
    """

    def __init__(
        self,
        desk: Desk,
        question: Question,
        marks: Marks,
        limits: ImageSettings,
        patience: Patience,
        index: Index | None = None,
    ) -> None:
        self._desk = desk
        self._question = question
        self._marks = marks
        self._limits = limits
        self._patience = patience
        self._index = index
        self._fetcher = ImageFetcher(limits)

    async def close(self) -> None:
        """Closes connections."""
        await self._fetcher.aclose()

    async def caption(self, row: Row) -> Outcome:
        """What becomes of a row; its own faults are in the outcome.

        Raises:
            JobStopped: nothing answers any more.
        """
        if row.error is not None:
            return Outcome(row.id, error=row.error)
        try:
            return await self._caption(row)
        except JobStopped:
            raise
        except LookonceError as error:
            return Outcome(row.id, error=error.message)
        except Exception as error:  # noqa: BLE001 - one bad row must not end a job of millions
            return Outcome(row.id, error=f"unexpected {type(error).__name__}: {error}"[:500])

    async def _caption(self, row: Row) -> Outcome:
        begin = time.perf_counter()
        texts = self._question.texts(row)
        chats = [self._question.messages(row, text) for text in texts]
        data = await read_image(row.image, self._fetcher, self._limits)
        header = images.probe(data, self._limits)
        name = await asyncio.to_thread(file_hash, data)
        read = time.perf_counter()
        work = _Work(row, data, texts, chats, header, name, begin, read)
        return await self._patience.run(lambda: self._attempt(work))

    async def _attempt(self, work: _Work) -> Outcome:
        begin = time.perf_counter()
        seen = await self._desk.look(work.data, work.chats, self._question.sampling)
        looked = time.perf_counter()
        lines, known = await self._once(work, seen)
        seconds = {"read": work.read - work.begin, "encode": looked - begin, "answer": time.perf_counter() - looked}
        rounded = {f"{stage}_seconds": round(value, 4) for stage, value in seconds.items()}
        cached = bool(lines[0]["cached"])
        return Outcome(work.row.id, tuple({**line, **rounded} for line in lines), None, seconds, cached, known)

    async def _once(self, work: _Work, seen: Seen) -> tuple[list[Mapping[str, Any]], bool]:
        """Answers; with an index those of the first row with this content and these prompts."""
        if self._index is None:
            return self._lines(work, await self._desk.answer(seen)), False
        content = f"{seen.content} {blake3(repr(work.chats).encode(errors='surrogatepass')).hexdigest(16)}"
        found = await self._index.claim(content)
        if found is not None:
            own = self._lines(work, [_answer(line) for line in found])
            return [{**line, "duplicate_of": found[0]["id"]} for line in own], True
        lines = None
        try:
            lines = self._lines(work, await self._desk.answer(seen))
        finally:
            await asyncio.shield(asyncio.ensure_future(self._index.settle(content, lines)))
        return lines, False

    def _lines(self, work: _Work, answers: Sequence[Answer]) -> list[Mapping[str, Any]]:
        """Output rows, one per prompt."""
        return [
            {
                "id": work.row.id,
                "prompt_index": index,
                "prompt": text,
                "caption": answer.text,
                "finish_reason": answer.finish_reason,
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "image_tokens": answer.image_tokens,
                "image_hash": work.name,
                "width": work.header.width,
                "height": work.header.height,
                "bytes": len(work.data),
                "cached": answer.cached,
                "duplicate_of": None,
                "model": self._marks.model,
                "model_fingerprint": self._marks.model_fingerprint,
                "prompt_fingerprint": self._marks.prompt_fingerprint,
            }
            for index, (text, answer) in enumerate(zip(work.texts, answers, strict=True))
        ]


@dataclass(frozen=True)
class _Work:
    """A row whose file is read."""

    row: Row
    data: bytes
    texts: list[str]
    chats: list[list[dict[str, Any]]]
    header: ImageHeader
    name: str
    begin: float
    read: float


def _answer(line: Mapping[str, Any]) -> Answer:
    """What another row was told; that one paid for the encoder."""
    prompt, completion, image = (line[name] for name in ("prompt_tokens", "completion_tokens", "image_tokens"))
    return Answer(line["caption"], line["finish_reason"], prompt, completion, image, True)
