"""Runs the same prompts through several engines in one process and writes what each answered.

Started by the tests as ``python -m tests.llm_service.variants PLAN RESULT``: vLLM takes ten seconds to import, an
in-process engine only two more to start. Every run is a fresh engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE", "1"),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import redis
import torch
from torch._dynamo.utils import counters
from vllm.distributed.ec_transfer.ec_transfer_state import ensure_ec_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.v1.engine.llm_engine import LLMEngine

from llm_service.engine.args import engine_args
from llm_service.engine.inputs import _range, engine_input, sampling_params
from llm_service.sampling import SamplingOptions
from llm_service.vllm_plugin import models, register
from shared.config import CacheSettings, LanguageSettings, ModelSettings
from shared.families import ISAAC, Family, family_of, read_config, size_rule
from tests.llm_service.pictures import Embedded, Picture, embed
from tests.llm_service.plans import Case, Run


def monolith_args(run: Run) -> EngineArgs:
    return EngineArgs(
        model=run.checkpoint,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=16,
        enforce_eager=True,
        skip_mm_profiling=True,
        mm_processor_cache_gb=0,
        mm_device_do_normalize=False,  # else some of its models want pixels of 0 to 255
        limit_mm_per_prompt={"image": 16},
        **({"config_format": "mistral", "tokenizer_mode": "mistral"} if _family(run).name == "pixtral" else {}),
        **run.options,
    )


def tower_free_args(run: Run, url: str) -> EngineArgs:
    language = LanguageSettings(max_model_len=2048, max_num_seqs=16)
    model = ModelSettings(name="test", checkpoint=Path(run.checkpoint), language=language)
    return replace(engine_args(model, CacheSettings(), url), disable_log_stats=False, **run.options)


def embedded(case: Case, run: Run) -> list[Embedded]:
    return [embed(Path(run.checkpoint), Picture(*image)) for image in case.images]


def _family(run: Run) -> Family:
    return family_of(read_config(Path(run.checkpoint)))


def _isaac_image(image: Embedded, _: int) -> MultiModalKwargsItem:
    grid = torch.tensor([1, *image.grid])
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(data=image.patches, field=MultiModalFlatField(slices=[slice(None)])),
            "image_grid_thw": MultiModalFieldElem(data=grid, field=MultiModalBatchedField(keep_on_cpu=True)),
        }
    )


def _pixtral_image(image: Embedded, side: int) -> MultiModalKwargsItem:
    """Whole pictures, under the name that either of vLLM's classes wants."""
    height, width = image.grid
    pixels = image.patches.view(height, width, 3, side, side).permute(2, 0, 3, 1, 4)
    pixels = pixels.reshape(3, height * side, width * side)
    element = MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())
    return MultiModalKwargsItem({"pixel_values": element, "images": element})


def monolith_input(case: Case, run: Run) -> Any:
    images = embedded(case, run)
    if not images:
        return tokens_input(case.token_ids)
    family = _family(run)
    side = size_rule(Path(run.checkpoint)).patch_size
    if family.around:
        from tests.llm_service import nemotron

        fields = [nemotron.image_item(image, side, run.checkpoint) for image in images]
    else:
        fields = [(_isaac_image if family.name == "isaac" else _pixtral_image)(image, side) for image in images]
    return mm_input(
        prompt_token_ids=case.token_ids,
        mm_kwargs=MultiModalKwargsItems({"image": fields}),
        mm_hashes={"image": [e.key for e in images]},
        mm_placeholders={"image": [_range(p) for p in case.prompt.placeholders]},
    )


def answer(
    engine: LLMEngine, inputs: dict[str, Any], max_tokens: int, first_tokens: Callable[[], None]
) -> dict[str, Any]:
    sampling = SamplingOptions(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=5)
    for name, value in inputs.items():
        engine.add_request(name, value, sampling_params(sampling))
    answers: dict[str, Any] = {name: {"tokens": [], "top": []} for name in inputs}
    told = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            (completion,) = output.outputs
            got = answers[output.request_id]
            got["tokens"] += completion.token_ids
            got["top"] += [{str(t): v.logprob for t, v in step.items()} for step in completion.logprobs or ()]
            if output.finished:
                got |= {"cached": output.num_cached_tokens, "reason": completion.finish_reason}
                got["preempted"] = output.metrics.num_preemptions if output.metrics else 0
        if not told and all(got["tokens"] for got in answers.values()):
            told = True
            first_tokens()
    return answers


def perform(run: Run, cases: list[Case], url: str) -> list[dict[str, Any]]:
    begin = time.perf_counter()
    client = redis.Redis.from_url(url)
    client.flushall()
    tower_free = run.kind != "monolith"
    models.LookonceIsaacForConditionalGeneration.family = replace(ISAAC, grid_origin=run.origin or ISAAC.grid_origin)
    engine = LLMEngine.from_engine_args(tower_free_args(run, url) if tower_free else monolith_args(run))
    started = time.perf_counter()
    inputs: dict[str, Any] = {}
    for case in cases:
        if tower_free:
            images = embedded(case, run)
            for image in images if run.kind == "redis" else ():
                client.set(image.key, image.record)
            items = [image.item(inline=run.kind == "inline") for image in images]
            inputs[case.name] = engine_input(case.prompt, items, engine.model_config.get_inputs_embeds_size())
        else:
            inputs[case.name] = monolith_input(case, run)
    batches = [inputs] if run.together else [{name: value} for name, value in inputs.items()]
    results = []
    for _ in range(run.passes):
        result: dict[str, Any] = {}
        for batch in batches:
            result |= answer(engine, batch, run.max_tokens, lambda: client.flushall() if run.flush else None)
        results.append(result)
    if tower_free:
        connector = engine.engine_core.engine_core.scheduler.ec_connector
        assert connector._prefetcher.owners == 0, "a finished request still holds embeddings"
        assert not connector._horizon
    ended = time.perf_counter()
    print(f"{run.name}: start {started - begin:.1f} s, answers {ended - started:.1f} s", file=sys.stderr, flush=True)
    engine.engine_core.shutdown()
    del engine
    ensure_ec_transfer_shutdown()
    cleanup_dist_env_and_memory()
    return results


def main(plan_path: str, result_path: str) -> None:
    torch.set_num_threads(1)
    register()
    plan = json.loads(Path(plan_path).read_text())
    cases = [Case(**case) for case in plan["cases"]]
    if any(_family(Run(**entry)).around for entry in plan["runs"]):
        from tests.llm_service import nemotron  # brings torchvision along

        nemotron.register()
    with Path(result_path).open("w") as out:
        for entry in plan["runs"]:
            run = Run(**entry)
            before = counters["stats"]["calls_captured"]
            results = perform(run, cases, plan["redis"])
            compiled = counters["stats"]["calls_captured"] - before
            out.write(json.dumps({"name": run.name, "results": results, "compiled": compiled}) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
