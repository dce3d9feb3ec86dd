"""Compares the exported model in stock vLLM with the training code: greedy answers and their log-probabilities.

python -m tools.demo.check_vllm --checkpoint models/demo --pictures 8
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from tools.demo.batches import BatchMaker, Pictures
from tools.demo.design import ISAAC
from tools.demo.model import DemoModel
from tools.demo.pictures import RULE, draw
from tools.demo.questions import caption

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
QUESTIONS = ("Describe the picture.", "What is at row 1 column 1?", "How many red things are there?")
MOST_TOKENS = 64


@torch.inference_mode()
def log_probabilities(
    model: DemoModel, maker: BatchMaker, pictures: Pictures, text: str, said: list[int]
) -> np.ndarray:
    """Log-probability ``[len(said)]`` that the training code gives each token of an answer."""
    ids, places, delta = maker.prompt(pictures.merged, text)
    whole = torch.tensor([ids + said])
    more = np.broadcast_to(np.arange(len(ids), whole.shape[1]) + delta, (3, len(said)))
    lines = torch.from_numpy(np.concatenate([places, more], axis=1))[:, None]
    mask = torch.ones(1, whole.shape[1], whole.shape[1], dtype=torch.bool).tril()
    hidden = model.language(whole, model.embed(pictures), whole == maker.image, lines, mask)
    scores = model.language.lm_head(hidden[0, len(ids) - 1 : -1]).log_softmax(-1)
    return scores.gather(1, torch.tensor(said)[:, None])[:, 0].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("models/demo"))
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--seed", type=int, default=50_000)
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    model = DemoModel.from_checkpoint(options.checkpoint).eval()
    bounds = {"min_num_patches": RULE.min_patches, "max_num_patches": RULE.max_patches}
    engine = LLM(
        str(options.checkpoint),
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        max_num_seqs=8,
        # vLLM's Isaac processor has bounds of its own, whatever the checkpoint says
        mm_processor_kwargs=bounds if model.design is ISAAC else None,
    )
    sampling = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, logprobs=1)
    maker = BatchMaker(AutoTokenizer.from_pretrained(options.checkpoint), model.design)
    largest, exact = 0.0, 0
    for seed in range(options.seed, options.seed + options.pictures):
        picture, scene = draw(seed, "held-out")
        for text in QUESTIONS:
            content = [{"type": "image_pil", "image_pil": picture}, {"type": "text", "text": text}]
            out = engine.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)[0].outputs[0]
            said = list(out.token_ids)
            theirs = np.array([step[token].logprob for step, token in zip(out.logprobs, said, strict=True)])
            ours = log_probabilities(model, maker, Pictures.of([(picture, scene)], model.design.preprocess), text, said)
            largest = max(largest, float(np.abs(ours - theirs).max()))
            exact += text == QUESTIONS[0] and out.text == caption(scene)
    print(f"largest difference of log-probabilities: {largest:.2e}")
    print(f"exact captions: {exact} of {options.pictures}")


if __name__ == "__main__":
    main()
