"""A small random Qwen2-VL checkpoint, written by transformers: a model that is none of ours."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tools.checkpoints.qwen_tokenizer import CHAT_TEMPLATE, write_tokenizer

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def write_qwen2vl(path: Path, seed: int = 0) -> Path:
    """Writes it to ``path`` and returns that.

    Args:
        path: folder, made if missing.
        seed: of the random weights.
    """
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

    path.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(path, vocab_size=600)
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start")}
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 640,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 128,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": pad,
            "eos_token_id": end,
        },
        vision_config={"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
    )
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # the library's own start is so small that all answers would be alike
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
            elif "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    Qwen2VLImageProcessor(min_pixels=4 * 28 * 28, max_pixels=256 * 28 * 28).save_pretrained(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "Qwen2TokenizerFast",
        "processor_class": "Qwen2VLProcessor",
        "chat_template": CHAT_TEMPLATE.replace("<image>", IMAGE),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, pad], "pad_token_id": pad}))
    return path
