"""Small random checkpoints in the exact layout of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

#: added tokens of the Qwen2 tokenizer that Isaac uses, in order; the last four are not "special"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>")

PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- elif message.content %}
            {%- for part in message.content %}
                {%- if part.type == 'image' or part.type == 'image_url' %}
                    {{- '<image>' }}
                {%- elif part.type == 'text' %}
                    {{- part.text }}
                {%- else %}
                    {{- raise_exception('parts are text or image, not ' + part.type) }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CORPUS = (
    "What is in the picture? Describe this image in one sentence.",
    "The red square is left of the blue circle, above a green triangle.",
    "user assistant system tool <image> HTML <div> <p> text with numbers 0 1 2 3 4 5 6 7 8 9.",
    "How many objects are there? There are two objects: a large yellow star and a small black cross.",
)


def write_tokenizer(path: Path, vocab_size: int = 600, corpus: tuple[str, ...] = CORPUS) -> Tokenizer:
    """A byte-level BPE tokenizer like Qwen2's; returns it. All added tokens lie at the end of the vocabulary."""
    tokenizer = Tokenizer(BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(NOT_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(NOT_SPECIAL))
    tokenizer.save(str(path / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token in SPECIAL + NOT_SPECIAL
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return tokenizer


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

    if not sharded:
        save_file(tensors | vision, path / "model.safetensors", metadata={"format": "pt"})
        return path
    # three shards by name order: language only, both together, tower only
    half_text, half_vision = len(tensors) // 2, len(vision) // 2
    text_names, vision_names = list(tensors), list(vision)
    shards = [text_names[:half_text], text_names[half_text:] + vision_names[:half_vision], vision_names[half_vision:]]
    everything = tensors | vision
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: everything[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in everything.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return path
