"""The whole service against monolithic vLLM on the same checkpoint: the same tokens, the same log-probabilities."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from tests.service.conftest import MODEL, ROOT, image_part, random_png, text_part, user

QUESTIONS = (
    "Describe the picture.",
    "What is at row 1 column 1?",
    "How many red things are there?",
    "Which image has a red circle?",
    "Where is the green star?",
)
PROMPTS = 50
MAX_TOKENS = 16
TOLERANCE = 1e-3

#: runs stock vLLM with its own tower, in a process of its own
MONOLITH = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    prompts, checkpoint, out = json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3]
    config = json.load(open(checkpoint + "/config.json"))
    llm = LLM(
        model=checkpoint,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 8},
        # vLLM's Isaac processor has bounds of its own, whatever the checkpoint says
        mm_processor_kwargs={
            "min_num_patches": config["vision_min_num_patches"],
            "max_num_patches": config["vision_max_num_patches"],
        },
    )
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0)
    results = []
    for output in llm.chat(prompts, params, chat_template_content_format="openai"):
        answer = output.outputs[0]
        steps = [step[token] for step, token in zip(answer.logprobs, answer.token_ids)]
        results.append({
            "text": answer.text,
            "tokens": [step.decoded_token for step in steps],
            "logprobs": [step.logprob for step in steps],
            "prompt": len(output.prompt_token_ids),
        })
    json.dump(results, open(out, "w"))

if __name__ == "__main__":
    main()
"""


def conversations() -> list[list[dict[str, Any]]]:
    """Prompts with one to four images of various sizes, before, after and between texts."""
    rng = np.random.default_rng(5)
    made = []
    for index in range(PROMPTS):
        images = []
        for _ in range(int(rng.integers(1, 5)) if index % 3 == 0 else 1):
            width, height = (int(side) for side in rng.integers(40, 420, 2))
            data = base64.b64encode(random_png(int(rng.integers(1 << 30)), width, height)).decode()
            images.append(image_part(f"data:image/png;base64,{data}"))
        question = text_part(QUESTIONS[index % len(QUESTIONS)])
        parts = [question, *images] if index % 4 == 1 else [*images, question]
        if len(images) > 1 and index % 2:
            parts.insert(1, text_part("and "))
        made.append(user(*parts))
    return made


@pytest.mark.slow
def test_the_service_answers_as_monolithic_vllm_does(client: OpenAI, tmp_path: Path) -> None:
    prompts = conversations()
    given, script, out = tmp_path / "prompts.json", tmp_path / "monolith.py", tmp_path / "out.json"
    given.write_text(json.dumps(prompts))
    script.write_text(MONOLITH)
    environment = {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    subprocess.run(
        [sys.executable, script, given, ROOT / "models" / "demo", out],
        check=True,
        env=os.environ | environment | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    expected = json.loads(out.read_text())
    worst = 0.0
    for messages, truth in zip(prompts, expected, strict=True):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=MAX_TOKENS, logprobs=True
        )
        choice = answer.choices[0]
        assert answer.usage.prompt_tokens == truth["prompt"]
        assert choice.message.content == truth["text"]
        assert [token.token for token in choice.logprobs.content] == truth["tokens"]
        ours = [token.logprob for token in choice.logprobs.content]
        worst = max(worst, float(np.abs(np.array(ours) - np.array(truth["logprobs"])).max()))
    print(f"largest difference of a log-probability: {worst:.1e}")
    assert worst <= TOLERANCE
