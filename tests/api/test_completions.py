"""Plain completions, with the official client."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from llm_service.prompts import PromptBuilder
from tests.api.conftest import MAX_MODEL_LEN, MODEL, ROOT

TEXT = "Row 1: red circle, blue"
#: the demo model, made for chats, likes to end plain text at once
GO_ON = {"ignore_eos": True}


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder(ROOT / "models" / "demo")


def test_text_and_its_token_ids_go_on_alike(openai: OpenAI, builder: PromptBuilder) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, "extra_body": GO_ON}
    text = openai.completions.create(prompt=TEXT, **asked)
    ids = openai.completions.create(prompt=builder.plain(TEXT).token_ids, **asked)
    assert text.object == "text_completion"
    assert text.id.startswith("cmpl-")
    assert text.choices[0].text == ids.choices[0].text
    assert text.usage.prompt_tokens == len(builder.plain(TEXT).token_ids)
    assert text.usage.completion_tokens == 6
    assert text.choices[0].finish_reason == "length"


def test_several_prompts_and_answers_keep_their_order(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "extra_body": GO_ON}
    prompts = [TEXT, "What is at row", "How many red"]
    alone = [openai.completions.create(prompt=prompt, temperature=0, **asked).choices[0].text for prompt in prompts]
    together = openai.completions.create(prompt=prompts, temperature=0, **asked)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == alone
    assert together.usage.completion_tokens == 15
    sampled = openai.completions.create(prompt=prompts, n=2, seed=1, **asked)
    assert [choice.index for choice in sampled.choices] == list(range(6))
    assert sampled.usage.completion_tokens == 30


def test_streaming_gives_the_same(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": [TEXT, "Row 2:"], "max_tokens": 5, "temperature": 0}
    asked["extra_body"] = GO_ON
    whole = openai.completions.create(**asked)
    chunks = list(openai.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 10


def test_log_probabilities(openai: OpenAI) -> None:
    answer = openai.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=4, temperature=0, logprobs=2, extra_body=GO_ON
    )
    found = answer.choices[0].logprobs
    assert "".join(found.tokens).replace("<|im_end|>", "") == answer.choices[0].text
    assert found.text_offset == [sum(map(len, found.tokens[:place])) for place in range(4)]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values()) <= 0


def test_embeddings_are_no_prompt(openai: OpenAI) -> None:
    """M15: nothing is taken from a client but text and token ids; the engine lives on."""
    for body in ({"prompt_embeds": "AAAA"}, {"prompt_embeds": ["AAAA"], "repetition_penalty": 1.5}):
        with pytest.raises(BadRequestError, match="prompt"):
            openai.post("/completions", body={"model": MODEL, **body}, cast_to=object)
    assert openai.completions.create(model=MODEL, prompt=TEXT, max_tokens=1).usage.prompt_tokens


def test_control_tokens_typed_as_text_are_text(openai: OpenAI, builder: PromptBuilder) -> None:
    answer = openai.completions.create(model=MODEL, prompt="<|im_end|>", max_tokens=1)
    assert answer.usage.prompt_tokens == len(builder.plain("<|im_end|>").token_ids) > 1


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [10**9]},
        {"prompt": {"a": 1}},
        {"prompt": [20] * MAX_MODEL_LEN},
        {"echo": True},
        {"max_tokens": 0},
        {"logprobs": 21},
        {"stop": [""]},
        {"logit_bias": {"a": 1}},
        {"temperature": "hot"},
    ],
)
def test_wrong_requests(openai: OpenAI, change: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        openai.post("/completions", body={"model": MODEL, "prompt": "x", **change}, cast_to=object)


def test_an_image_token_is_for_chats(openai: OpenAI, builder: PromptBuilder) -> None:
    with pytest.raises(BadRequestError, match="image token"):
        openai.completions.create(model=MODEL, prompt=[builder._images.image])


def test_the_openapi_document_stands_by_itself(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    assert "#/$defs" not in str(document)
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    named = body["schema"]["$ref"].removeprefix("#/components/schemas/")
    assert document["components"]["schemas"][named]["required"] == ["model", "prompt"]
    assert all(example["value"]["model"] for example in body["examples"].values())
