"""Stock vLLM, tower and all, on prompts of the parity tests: ``python -m tests.service.monolith PLAN OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def options(checkpoint: Path) -> dict[str, Any]:
    """What stock vLLM has to be told about a family."""
    from shared.families import family_of, read_config

    config = read_config(checkpoint)
    family = family_of(config).name
    if family == "isaac":
        # vLLM's Isaac processor has bounds of its own, whatever the checkpoint says
        bounds = {name: config[f"vision_{name}"] for name in ("min_num_patches", "max_num_patches")}
        return {"mm_processor_kwargs": bounds}
    if family == "pixtral":
        return {"config_format": "mistral", "tokenizer_mode": "mistral", "load_format": "safetensors"}
    if "nemotron" in family:
        from llm_service.vllm_plugin.configs import register_configs
        from tests.llm_service import nemotron

        register_configs()
        nemotron.register(raw_pixels=True)
    return {"enable_prefix_caching": False} if family == "nemotron-nano" else {}  # vLLM's Mamba on CPUs fails with it


def main(plan_path: str, out_path: str) -> None:
    from vllm import LLM, SamplingParams

    plan = json.loads(Path(plan_path).read_text())
    checkpoint = Path(plan["checkpoint"])
    llm = LLM(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=plan["context"],
        enforce_eager=True,
        limit_mm_per_prompt={"image": 8},
        **options(checkpoint),
    )
    params = SamplingParams(temperature=0, max_tokens=plan["max_tokens"], logprobs=0)
    results = []
    for output in llm.chat(plan["prompts"], params, chat_template_content_format="openai"):
        answer = output.outputs[0]
        steps = [step[token] for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        results.append(
            {
                "text": answer.text,
                "tokens": [step.decoded_token for step in steps],
                "logprobs": [step.logprob for step in steps],
                "prompt": len(output.prompt_token_ids),
            }
        )
    Path(out_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
