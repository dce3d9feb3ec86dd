"""A small Nemotron-H: the language half of Nemotron-Nano-VL-V2, attention and Mamba layers by turns."""

from __future__ import annotations

from typing import Any

import torch

#: Mamba, feed-forward, Mamba, attention
PATTERN = "M-M*"
HEADS, HEAD, HIDDEN = 2, 32, 128
MAMBA_HEADS, MAMBA_HEAD, STATE, KERNEL = 4, 32, 16, 4
INNER = MAMBA_HEADS * MAMBA_HEAD


def text_config(width: int, vocabulary: int, context: int) -> dict[str, Any]:
    """The text model's part of ``config.json``."""
    return {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": len(PATTERN),
        "hybrid_override_pattern": PATTERN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "intermediate_size": HIDDEN,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": MAMBA_HEADS,
        "mamba_head_dim": MAMBA_HEAD,
        "mamba_hidden_act": "silu",
        "n_groups": 1,
        "ssm_state_size": STATE,
        "conv_kernel": KERNEL,
        "chunk_size": 16,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "layer_norm_epsilon": 1e-5,
        "dtype": "float32",
        "tie_word_embeddings": False,
    }


def language_tensors(width: int, vocabulary: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """All tensors by the published names."""

    def random(*shape: int, scale: float | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if scale is None else scale)

    channels = INNER + 2 * STATE
    mixers = {
        "M": lambda: {
            "in_proj.weight": random(INNER + channels + MAMBA_HEADS, width),
            "conv1d.weight": random(channels, 1, KERNEL),
            "conv1d.bias": random(channels, scale=0.1),
            "A_log": torch.arange(1.0, MAMBA_HEADS + 1).log(),
            "D": 1 + random(MAMBA_HEADS, scale=0.1),
            "dt_bias": random(MAMBA_HEADS, scale=0.5),
            "norm.weight": 1 + random(INNER, scale=0.1),
            "out_proj.weight": random(width, INNER),
        },
        "-": lambda: {"up_proj.weight": random(HIDDEN, width), "down_proj.weight": random(width, HIDDEN)},
        "*": lambda: {
            "q_proj.weight": random(HEADS * HEAD, width),
            "k_proj.weight": random(HEAD, width),
            "v_proj.weight": random(HEAD, width),
            "o_proj.weight": random(width, HEADS * HEAD),
        },
    }
    at = "language_model.backbone."
    made = {
        f"{at}embeddings.weight": random(vocabulary, width, scale=0.5),
        f"{at}norm_f.weight": 1 + random(width, scale=0.1),
        "language_model.lm_head.weight": random(vocabulary, width),
    }
    for layer, kind in enumerate(PATTERN):
        made[f"{at}layers.{layer}.norm.weight"] = 1 + random(width, scale=0.1)
        made |= {f"{at}layers.{layer}.mixer.{name}": tensor for name, tensor in mixers[kind]().items()}
    return made
