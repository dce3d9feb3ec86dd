"""A native Pixtral checkpoint behind the HTTP API: rows of image tokens, mistral-common, one look per picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from shared.config import AccessSettings
from shared.families import size_rule
from tests.api.conftest import MODEL, serving
from tests.api.test_uploads import as_url, png
from tools.checkpoints.pixtral import write_pixtral

TOKENS = 8 * 10  # of the pictures that png() gives, 60×80 pixels in patches of 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pixtral(tmp_path_factory.mktemp("pixtral"), "native", seed=4)


@pytest.fixture(scope="module")
def client(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with serving(tmp_path_factory.mktemp("redis"), AccessSettings(), checkpoint) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)


def ask(client: OpenAI, *content: Any) -> Any:
    parts = [{"type": "text", "text": c} if isinstance(c, str) else image(c) for c in content]
    messages: Any = [{"role": "user", "content": parts}]
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0, logprobs=True)


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": as_url(data)}}


def image_tokens(answer: Any) -> tuple[int, int]:
    details = answer.usage.prompt_tokens_details
    return details.image_tokens, details.cached_image_tokens


def test_a_picture_is_looked_at_once(client: OpenAI, checkpoint: Path) -> None:
    assert size_rule(checkpoint).tokens(80, 60) == TOKENS
    data = png(1)
    first, again, turned = ask(client, data, "What?"), ask(client, data, "What?"), ask(client, "And", data, "this?")
    assert [image_tokens(answer) for answer in (first, again, turned)] == [(80, 0), (80, 80), (80, 80)]
    tokens = [[entry.token for entry in answer.choices[0].logprobs.content] for answer in (first, again)]
    assert tokens[0] == tokens[1]
    assert first.usage.prompt_tokens > 8 * 11  # ten tokens and an end in each of eight rows


def test_several_pictures_and_typed_markers(client: OpenAI) -> None:
    one, other = png(2), png(3)
    both = ask(client, one, "[IMG][IMG_BREAK] or", other, "[IMG_END]?")
    assert image_tokens(both) == (2 * TOKENS, 0)
    assert image_tokens(ask(client, other)) == (TOKENS, TOKENS)


def test_text_alone_and_with_an_empty_system_message(client: OpenAI) -> None:
    """H13."""
    messages: Any = [{"role": "system", "content": ""}, {"role": "user", "content": "What is in the picture?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    assert image_tokens(answer) == (0, 0)


def test_a_conversation_that_mistral_common_refuses(client: OpenAI) -> None:
    messages: Any = [{"role": "tool", "tool_call_id": "x", "content": "1"}, {"role": "user", "content": "What?"}]
    with pytest.raises(BadRequestError, match="cannot take this conversation"):
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
