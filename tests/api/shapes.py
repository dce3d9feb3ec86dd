"""Shapes of JSON: which fields there are and of what type, without values."""

from __future__ import annotations

import json
from typing import Any

import httpx

#: whose fields are tokens: alternatives in a plain completion
OPEN = "choices[].logprobs.top_logprobs[]"


def shape(value: Any, path: str = "") -> set[str]:
    """Paths of all fields with the types of their values; entries of a list are one."""
    if isinstance(value, dict):
        if path == OPEN:
            return {f"{path}: object"}.union(*(shape(one, f"{path}.*") for one in value.values()))
        return {f"{path}: object"}.union(
            *(shape(one, f"{path}.{name}" if path else name) for name, one in value.items())
        )
    if isinstance(value, list):
        return {f"{path}: list"}.union(*(shape(one, f"{path}[]") for one in value))
    kind = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}[type(value)]
    return {f"{path}: {kind}"}


def events(text: str) -> list[Any]:
    """Chunks of a stream; its end is checked."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ask(url: str, path: str, body: dict[str, Any], key: str) -> tuple[int, set[str], Any]:
    """Status, shape and content of an answer; of a stream, over all its chunks."""
    answer = httpx.post(f"{url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120)
    if answer.headers["content-type"].startswith("text/event-stream"):
        chunks = events(answer.text)
        return answer.status_code, set().union(*map(shape, chunks)), chunks
    return answer.status_code, shape(answer.json()), answer.json()
