"""The whole service against monolithic vLLM on the same checkpoint: the same tokens, the same log-probabilities."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from lookonce.listening import free_port
from tests.service.conftest import ROOT, image_part, random_png, text_part, user
from tools.checkpoints.pixtral import write_pixtral
from tools.checkpoints.radio import Shape, write_radio

QUESTIONS = (
    "Describe the picture.",
    "What is at row 1 column 1?",
    "How many red things are there?",
    "Which image has a red circle?",
    "Where is the green star?",
)
CONTEXT, MAX_TOKENS, TOLERANCE = 4096, 16, 1e-3
START_SECONDS = 300
#: a language model of 64 channels: heads of 32, the smallest that vLLM's attention takes on CPUs
CHAT = Shape(text_width=64, language=True)


@dataclass(frozen=True)
class Case:
    """What is compared.

    Attributes:
        checkpoint: writes it into a folder, or gives the folder that it has.
        sides: shortest and longest side of a picture, pixels.
        step: sides are multiples of it.
        prompts: how many.
    """

    checkpoint: Callable[[Path], Path]
    sides: tuple[int, int] = (24, 160)
    step: int = 1
    prompts: int = 20


CASES = {
    "isaac": Case(lambda _: ROOT / "models" / "demo", (40, 420), prompts=50),
    "pixtral-native": Case(partial(write_pixtral, kind="native", seed=21)),
    "pixtral-native-merger": Case(partial(write_pixtral, kind="native-merger", seed=22)),
    "pixtral-hf": Case(partial(write_pixtral, kind="llava", seed=23)),
    "mistral3": Case(lambda _: ROOT / "models" / "demo-pixtral", (40, 420)),
    "llama-nemotron": Case(partial(write_radio, kind="llama", shape=CHAT, seed=24)),
    "nemotron-nano": Case(partial(write_radio, kind="nano", shape=CHAT, seed=25)),
}


def conversations(case: Case) -> list[list[dict[str, Any]]]:
    """Prompts with one to four images of various sizes, before, after and between texts."""
    rng = np.random.default_rng(5)
    made = []
    for index in range(case.prompts):
        images = []
        for _ in range(int(rng.integers(1, 5)) if index % 3 == 0 else 1):
            width, height = (int(side) // case.step * case.step for side in rng.integers(*case.sides, 2))
            data = base64.b64encode(random_png(int(rng.integers(1 << 30)), width, height)).decode()
            images.append(image_part(f"data:image/png;base64,{data}"))
        question = text_part(QUESTIONS[index % len(QUESTIONS)])
        parts = [question, *images] if index % 4 == 1 else [*images, question]
        if len(images) > 1 and index % 2:
            parts.insert(1, text_part("and "))
        made.append(user(*parts))
    return made


def monolith(folder: Path, checkpoint: Path, prompts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Stock vLLM's answers, from a process of its own."""
    plan, out = folder / "plan.json", folder / "out.json"
    made = {"checkpoint": str(checkpoint), "context": CONTEXT, "max_tokens": MAX_TOKENS, "prompts": prompts}
    plan.write_text(json.dumps(made))
    environment = {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # classes that a test registers are known in one process
    command = [sys.executable, "-m", "tests.service.monolith", str(plan), str(out)]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


@contextmanager
def serving(folder: Path, checkpoint: Path) -> Iterator[str]:
    """``lookonce serve`` as a process: Ray ends a process that begins a second private cluster."""
    language = {"max_model_len": CONTEXT, "max_num_seqs": 16}
    model = {"name": "m", "checkpoint": str(checkpoint), "language": language}
    config, port = folder / "service.yaml", free_port()
    config.write_text(json.dumps({"models": [model]}))  # JSON is YAML
    command = [sys.executable, "-m", "lookonce.cli", "serve", "--port", str(port), "--config", str(config)]
    process = subprocess.Popen(command, cwd=ROOT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/readyz", timeout=5).status_code == httpx.codes.OK:
                    break
            assert process.poll() is None, "the service ended while it started"
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.fixture(params=CASES)
def named(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Case, Path]]:
    case = CASES[request.param]
    yield case, case.checkpoint(tmp_path / "checkpoint")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_service_answers_as_monolithic_vllm_does(named: tuple[Case, Path], tmp_path: Path) -> None:
    case, checkpoint = named
    prompts = conversations(case)
    expected = monolith(tmp_path, checkpoint, prompts)
    worst, answered = 0.0, set()
    with serving(tmp_path, checkpoint) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        for messages, truth in zip(prompts, expected, strict=True):
            answer = client.chat.completions.create(
                model="m", messages=messages, temperature=0, max_tokens=MAX_TOKENS, logprobs=True
            )
            choice = answer.choices[0]
            assert answer.usage.prompt_tokens == truth["prompt"]
            assert [token.token for token in choice.logprobs.content] == truth["tokens"]
            assert choice.message.content == truth["text"]
            ours = [token.logprob for token in choice.logprobs.content]
            worst = max(worst, float(np.abs(np.array(ours) - np.array(truth["logprobs"])).max()))
            answered.add(choice.message.content)
    print(f"largest difference of a log-probability: {worst:.1e} in {len(prompts)} prompts, {len(answered)} answers")
    assert worst <= TOLERANCE
    assert len(answered) > 3, "answers do not depend on the prompts"
