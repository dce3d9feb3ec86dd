"""The same requests to ``vllm serve`` with the same checkpoint: the same statuses, fields and types."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import KEYS, MAX_MODEL_LEN, MODEL, ROOT
from tests.api.shapes import ask
from tools.stock_server import stock_server

DEMO = ROOT / "models" / "demo"
PICTURE = "data:image/png;base64," + base64.b64encode((DEMO / "samples" / "4.png").read_bytes()).decode()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def chat(*parts: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    return CHAT, body | more


def text(prompt: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": prompt, "temperature": 0, "max_tokens": 5, "ignore_eos": True} | more


LOOK = {"type": "image_url", "image_url": {"url": PICTURE}}
ASK = {"type": "text", "text": "Describe the picture."}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat("hello"),
    "chat with a picture": chat(LOOK, ASK, max_tokens=64),
    "chat with a picture, streamed": chat(LOOK, ASK, max_tokens=64, **USAGE),
    "chat, streamed": chat("hello", stream=True),
    "chat, streamed with usage": chat("hello", **USAGE),
    "chat with log-probabilities": chat("hello", logprobs=True, top_logprobs=3),
    "chat with log-probabilities, streamed": chat("hello", logprobs=True, top_logprobs=2, **USAGE),
    "chat of several answers": chat("hello", n=2, temperature=1, seed=1),
    "chat cut off": chat("hello", max_completion_tokens=1, ignore_eos=True),
    "chat with stop": chat(LOOK, ASK, max_tokens=64, stop=["Row 2"]),
    "chat with a stop token": chat(LOOK, ASK, max_tokens=64, stop_token_ids=list(range(20, 400))),
    "chat in JSON": chat(
        "hello", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    ),
    "chat with tools": chat("hello", tools=[TOOL], tool_choice="none"),
    "chat of several turns": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "hi"},
                {"role": "user", "content": [LOOK, ASK]},
            ],
            "max_tokens": 4,
        },
    ),
    "chat with every field": chat(
        "hello",
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        seed=3,
        logit_bias={"30": 1.5},
        user="me",
        temperature=0.7,
    ),
    "text": text("Row 1: red circle"),
    "text, streamed": text("Row 1: red circle", **USAGE),
    "text with log-probabilities": text("Row 1:", logprobs=2),
    "text with log-probabilities, streamed": text("Row 1:", logprobs=2, stream=True),
    "several texts": text(["Row 1:", "Row 2:"], n=2, temperature=1, seed=1),
    "token ids": text([30, 31, 32]),
    "texts of token ids": text([[30, 31], [32, 33, 34]]),
    "fault: another model": (CHAT, {**chat("hello")[1], "model": "nobody"}),
    "fault: no messages": (CHAT, {}),
    "fault: a wrong type": chat("hello", temperature="hot"),
    "fault: out of range": chat("hello", top_p=7),
    "fault: prompt too long": chat("red circle " * 600),
    "fault: answer too long": chat("hello", max_tokens=MAX_MODEL_LEN * 2),
    "fault: no picture": chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, ASK),
    "fault: unknown part": chat({"type": "smell", "smell": "x"}),
    "fault: text of no tokens": text([]),
}
#: requests whose answers must be the same to the letter
SAME_WORDS = ["chat with a picture", "chat", "chat with stop", "text", "token ids", "chat with log-probabilities"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stock_server(
        DEMO, MODEL, MAX_MODEL_LEN, tmp_path_factory.mktemp("vllm") / "log", "--max-num-seqs", "16"
    ) as url:
        yield url


def documented() -> tuple[set[str], set[str]]:
    """Fields that only one side has, by the table in docs/api.md: ours, vLLM's."""
    table = (ROOT / "docs" / "api.md").read_text().partition("## Beside `vllm serve`")[2].partition("\n## ")[0]
    ours, theirs = set(), set()
    for side, fields in re.findall(r"^\| (ours|vLLM's) \| ((?:`[^`]+`(?:, )?)+)", table, re.MULTILINE):
        (ours if side == "ours" else theirs).update(re.findall(r"`([^`]+)`", fields))
    assert ours
    assert theirs
    return ours, theirs


def _undocumented(fields: set[str], known: set[str]) -> list[str]:
    names = {field: re.sub(r"\[\]", "", field.partition(":")[0]) for field in fields}
    return sorted(
        field
        for field, name in names.items()
        if not any(name == one or name.startswith(f"{one}.") or name.endswith(f".{one}") for one in known)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shapes_are_those_of_vllm_but_for_the_documented_fields(url: str, stock: str) -> None:
    ours_alone, theirs_alone = documented()
    faults = []
    for name, (path, body) in REQUESTS.items():
        asked = {"model": MODEL} | body
        status, mine, words = ask(url, path, asked, KEYS["alice"])
        expected, theirs, reference = ask(stock, path, asked, "unused")
        if status != expected:
            faults.append(f"{name}: status {status}, vLLM's {expected}: {words} {reference}")
        faults += [f"{name}: only ours: {field}" for field in _undocumented(mine - theirs, ours_alone)]
        faults += [f"{name}: only vLLM's: {field}" for field in _undocumented(theirs - mine, theirs_alone)]
        if name in SAME_WORDS and _words(words) != _words(reference):
            faults.append(f"{name}: {_words(words)} instead of {_words(reference)}")
    assert not faults, "\n".join(faults)


def _words(answer: Any) -> list[Any]:
    """What was said, how it ended, and in how many tokens."""
    choices = [(one.get("text") or one["message"]["content"], one["finish_reason"]) for one in answer["choices"]]
    return [answer["usage"]["completion_tokens"], *choices]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_models_are_listed_in_vllms_shape(url: str, stock: str) -> None:
    import httpx

    mine = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEYS['alice']}"}).json()
    theirs = httpx.get(f"{stock}/v1/models").json()
    assert mine.keys() == theirs.keys()
    assert mine["data"][0].keys() <= theirs["data"][0].keys()
    assert Path(theirs["data"][0]["root"]) == DEMO
