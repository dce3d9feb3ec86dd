"""Response bodies in OpenAI's shape, plain dictionaries ready for JSON."""

from __future__ import annotations

import time
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


def _token_body(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": max(token.logprob, -9999.0), "bytes": list(token.token.encode())}


def logprobs_body(logprobs: Sequence[SampledLogprobs] | None) -> dict[str, Any] | None:
    """``logprobs`` of a choice."""
    if logprobs is None:
        return None
    content = [_token_body(entry.sampled) | {"top_logprobs": [_token_body(t) for t in entry.top]} for entry in logprobs]
    return {"content": content}


class CompletionWriter:
    """Writes one chat completion, whole or as chunks.

    Args:
        request_id: becomes the completion's id.
        model: name that the client sent.
    """

    def __init__(self, request_id: str, model: str) -> None:
        self._head: dict[str, Any] = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices, **more}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of an answer: its role, no text."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, chunk: Chunk) -> dict[str, Any]:
        """A chunk of text."""
        choice = {
            "index": chunk.index,
            "delta": {"content": chunk.text} if chunk.text or not chunk.finish_reason else {},
            "logprobs": logprobs_body(chunk.logprobs),
            "finish_reason": chunk.finish_reason,
        }
        return self._chunk([choice])

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
            logprobs = [entry for chunk in mine for entry in chunk.logprobs or ()]
            asked = any(chunk.logprobs is not None for chunk in mine)
            message = {"role": "assistant", "content": "".join(chunk.text for chunk in mine), "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs_body(logprobs) if asked else None,
                    "finish_reason": next((c.finish_reason for c in mine if c.finish_reason), "stop"),
                }
            )
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}
        return body | ({"lookonce": report} if report else {})
