"""Small random Isaac checkpoints in the exact layouts of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tools.checkpoints.files import write_shards, write_tensors
from tools.checkpoints.qwen_tokenizer import write_tokenizer


def write_isaac(
    path: Path,
    *,
    nested: bool = False,
    sharded: bool = True,
    seed: int = 0,
    tied: bool = False,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    intermediate: int = 128,
    vision_hidden: int = 64,
    vision_layers: int = 2,
    vision_heads: int = 2,
    vision_intermediate: int = 128,
    patch_size: int = 16,
    position_side: int = 16,
    merge: int = 2,
    min_patches: int = 16,
    max_patches: int = 256,
    max_positions: int = 4096,
    vocab_size: int = 640,
) -> Path:
    """Writes a random Isaac checkpoint to ``path`` and returns it.

    Args:
        path: folder, made if missing.
        nested: ``text_config`` and ``model.text_model.*`` as new checkpoints have them, else the old flat layout.
        sharded: several safetensors files with an index; one of them holds tower and language tensors together.
        seed: of the random weights.
        tied: no ``lm_head`` in the file; the head shares the token embeddings.
        hidden, layers, heads, kv_heads, head_dim, intermediate: sizes of the language model.
        vision_hidden, vision_layers, vision_heads, vision_intermediate: sizes of the tower.
        patch_size, position_side, merge, min_patches, max_patches: image geometry.
        max_positions: context length.
        vocab_size: rows of the token embeddings; the tokenizer has a few fewer.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(path, vocab_size=vocab_size - 40)
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    text: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8],
            "mrope_interleaved": True,
        },
    }
    config: dict[str, Any] = {
        "architectures": ["IsaacForConditionalGeneration"],
        "model_type": "isaac",
        "dtype": "float32",
        "vision_token": "<image>",
        "video_patch_size": patch_size,
        "pixel_shuffle_scale": merge,
        "vision_min_num_patches": min_patches,
        "vision_max_num_patches": max_patches,
        "max_sequence_length": max_positions,
        "bos_token_id": pad,
        "eos_token_id": end,
        "pad_token_id": pad,
        "vision_config": {
            "model_type": "pixel_shuffle_siglip2",
            "hidden_size": vision_hidden,
            "num_hidden_layers": vision_layers,
            "num_attention_heads": vision_heads,
            "intermediate_size": vision_intermediate,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "num_channels": 3,
            "num_patches": position_side**2,
            "patch_size": patch_size,
            "pixel_shuffle_scale_factor": merge,
        },
    }
    # even nested configurations repeat the sizes at the top: vLLM's Isaac reads hidden_size and head_dim there
    config |= text | ({"text_config": {"model_type": "qwen3"} | text} if nested else {})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, pad], "pad_token_id": pad}))

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if scale is None else scale)

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    language = "model.text_model." if nested else "model."
    tensors: dict[str, torch.Tensor] = {f"{language}embed_tokens.weight": random(vocab_size, hidden, scale=0.5)}
    for layer in range(layers):
        prefix = f"{language}layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(hidden),
            f"{prefix}self_attn.q_proj.weight": random(heads * head_dim, hidden),
            f"{prefix}self_attn.k_proj.weight": random(kv_heads * head_dim, hidden),
            f"{prefix}self_attn.v_proj.weight": random(kv_heads * head_dim, hidden),
            f"{prefix}self_attn.o_proj.weight": random(hidden, heads * head_dim),
            f"{prefix}self_attn.q_norm.weight": norm(head_dim) * 2,
            f"{prefix}self_attn.k_norm.weight": norm(head_dim) * 2,
            f"{prefix}post_attention_layernorm.weight": norm(hidden),
            f"{prefix}mlp.gate_proj.weight": random(intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": random(intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": random(hidden, intermediate),
        }
    tensors[f"{language}norm.weight"] = norm(hidden)
    if not tied:
        tensors["lm_head.weight"] = random(vocab_size, hidden)

    tower = "model.vision_embedding.0."
    merged = vision_hidden * merge**2
    vision: dict[str, torch.Tensor] = {
        f"{tower}embeddings.patch_embedding.weight": random(vision_hidden, 3 * patch_size**2),
        f"{tower}embeddings.patch_embedding.bias": random(vision_hidden, scale=0.1),
        f"{tower}embeddings.position_embedding.weight": random(position_side**2, vision_hidden, scale=0.5),
        f"{tower}post_layernorm.weight": norm(vision_hidden),
        f"{tower}post_layernorm.bias": random(vision_hidden, scale=0.1),
        "model.vision_embedding.1.weight": random(4 * merged, merged),
        "model.vision_embedding.3.weight": random(hidden, 4 * merged),
    }
    for layer in range(vision_layers):
        prefix = f"{tower}encoder.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", vision_hidden, vision_hidden),
            ("self_attn.k_proj", vision_hidden, vision_hidden),
            ("self_attn.v_proj", vision_hidden, vision_hidden),
            ("self_attn.out_proj", vision_hidden, vision_hidden),
            ("mlp.fc1", vision_intermediate, vision_hidden),
            ("mlp.fc2", vision_hidden, vision_intermediate),
        ):
            vision[f"{prefix}{name}.weight"] = random(rows, columns)
            vision[f"{prefix}{name}.bias"] = random(rows, scale=0.1)
        for name in ("layer_norm1", "layer_norm2"):
            vision[f"{prefix}{name}.weight"] = norm(vision_hidden)
            vision[f"{prefix}{name}.bias"] = random(vision_hidden, scale=0.1)

    everything = tensors | vision
    if not sharded:
        write_tensors(path, "model", everything, sharded=False)
        return path
    # three shards by name order: language only, both together, tower only
    half_text, half_vision = len(tensors) // 2, len(vision) // 2
    text_names, vision_names = list(tensors), list(vision)
    shards = [text_names[:half_text], text_names[half_text:] + vision_names[:half_vision], vision_names[half_vision:]]
    write_shards(path, "model", everything, shards)
    return path
