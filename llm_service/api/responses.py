"""Response bodies in OpenAI's shape, plain dictionaries ready for JSON."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from llm_service.messages import Chunk, EngineUsage, SampledLogprobs, TokenLogprob
from shared.errors import LookonceError
from shared.items import VisionItem


def error_body(error: LookonceError) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def usage_body(usage: EngineUsage, items: Sequence[VisionItem]) -> dict[str, Any]:
    """``usage``: image tokens are part of the prompt's; of them, those that needed no encoder forward are told."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.prefix_cached_tokens,
            "image_tokens": sum(item.tokens for item in items),
            "cached_image_tokens": sum(item.tokens for item in items if item.cached),
        },
    }


def report_body(usage: EngineUsage, items: Sequence[VisionItem]) -> dict[str, Any]:
    """``lookonce``: where each image came from and how long each step took, in seconds."""
    return {
        "images": [
            {
                "key": item.key,
                "source": "cache" if item.cached else "encoder",
                "tokens": item.tokens,
                "grid": list(item.merged),
                "timings": item.timings,
            }
            for item in items
        ],
        "timings": usage.timings,
    }


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; this is OpenAI's stand-in."""
    return max(logprob, -9999.0)


def _token_body(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": list(token.token.encode())}


def logprobs_body(logprobs: Sequence[SampledLogprobs] | None) -> dict[str, Any] | None:
    """``logprobs`` of a choice."""
    if logprobs is None:
        return None
    content = [_token_body(entry.sampled) | {"top_logprobs": [_token_body(t) for t in entry.top]} for entry in logprobs]
    return {"content": content}


def text_logprobs_body(logprobs: Sequence[SampledLogprobs] | None, start: int) -> dict[str, Any] | None:
    """``logprobs`` of a plain completion's choice; ``start`` is the place of its first token in the answer's text."""
    if logprobs is None:
        return None
    tokens = [entry.sampled.token for entry in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.sampled.logprob) for entry in logprobs],
        "top_logprobs": [{t.token: _finite(t.logprob) for t in (*entry.top, entry.sampled)} for entry in logprobs],
        "text_offset": [start + sum(map(len, tokens[:place])) for place in range(len(tokens))],
    }


class Writer(ABC):
    """Writes one completion, whole or as chunks.

    Args:
        request_id: becomes the completion's id.
        model: name that the client sent.
    """

    #: in front of the completion's id
    prefix: str
    #: ``object`` of a whole body and of a chunk
    whole_object: str
    chunk_object: str

    def __init__(self, request_id: str, model: str) -> None:
        self._head: dict[str, Any] = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices, **more}

    @abstractmethod
    def openings(self, answers: int) -> list[dict[str, Any]]:
        """What comes before any text."""

    @abstractmethod
    def piece(self, chunk: Chunk) -> dict[str, Any]:
        """A chunk of text."""

    def closing(self, usage: dict[str, Any], report: dict[str, Any] | None) -> dict[str, Any]:
        """The last chunk, without choices: usage, and the report when asked for."""
        return self._chunk([], usage=usage, **({"lookonce": report} if report else {}))

    def whole(
        self, chunks: Sequence[Chunk], answers: int, usage: dict[str, Any], report: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The completion in one body, from all its chunks."""
        choices = []
        for index in range(answers):
            mine = [chunk for chunk in chunks if chunk.index == index]
            last = mine[-1] if mine else Chunk(index, "")
            ending = {"finish_reason": last.finish_reason or "stop", "stop_reason": last.stop_reason}
            choices.append({"index": index, **self._answer(mine), **ending})
        body = {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}
        return body | ({"lookonce": report} if report else {})

    @abstractmethod
    def _answer(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Text and log-probabilities of one answer, from its chunks."""


class ChatWriter(Writer):
    """Chat completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def openings(self, answers: int) -> list[dict[str, Any]]:
        """The role of every answer, no text."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(answers)
        ]

    def piece(self, chunk: Chunk) -> dict[str, Any]:
        """See :meth:`Writer.piece`."""
        choice = {
            "index": chunk.index,
            "delta": {"content": chunk.text} if chunk.text or not chunk.finish_reason else {},
            "logprobs": logprobs_body(chunk.logprobs),
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }
        return self._chunk([choice])

    def _answer(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(chunk.text for chunk in chunks), "refusal": None}
        return {"message": message, "logprobs": logprobs_body(_logprobs(chunks))}


class TextWriter(Writer):
    """Plain completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request_id: str, model: str) -> None:
        super().__init__(request_id, model)
        self._written: dict[int, int] = defaultdict(int)

    def openings(self, answers: int) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def piece(self, chunk: Chunk) -> dict[str, Any]:
        """See :meth:`Writer.piece`."""
        logprobs = text_logprobs_body(chunk.logprobs, self._written[chunk.index])
        self._written[chunk.index] += len(chunk.text)
        ending = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
        return self._chunk([{"index": chunk.index, "text": chunk.text, "logprobs": logprobs, **ending}])

    def _answer(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        text = "".join(chunk.text for chunk in chunks)
        return {"text": text, "logprobs": text_logprobs_body(_logprobs(chunks), 0)}


def _logprobs(chunks: Sequence[Chunk]) -> list[SampledLogprobs] | None:
    """All log-probabilities of an answer; None when none were asked for."""
    if all(chunk.logprobs is None for chunk in chunks):
        return None
    return [entry for chunk in chunks for entry in chunk.logprobs or ()]
