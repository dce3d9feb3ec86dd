"""Small random Pixtral checkpoints in the exact layouts of the published ones, all from one set of weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from encoder_service.preprocess.base import CLIP_MEAN, CLIP_STD
from tools.checkpoints.files import write_tensors
from tools.checkpoints.pixtral_tokenizers import write_tekken, write_tokenizer

#: ``native`` and ``native-merger`` are Mistral's (Pixtral-12B-2409, Mistral-Small-3.1), the others transformers'
Kind = Literal["native", "native-merger", "llava", "mistral3"]
KINDS: tuple[Kind, ...] = ("native", "native-merger", "llava", "mistral3")

#: of the language model's heads; its vocabulary has a few rows more than the tokenizer
TEXT_HEADS, TEXT_KV_HEADS, HEAD_DIM, TEXT_HIDDEN, TEXT_LAYERS = 2, 1, 32, 128, 2
VOCABULARY = 640


@dataclass(frozen=True)
class Sizes:
    """Sizes of a checkpoint.

    Attributes:
        width, heads, hidden, layers: of the tower.
        patch: side of a patch, pixels.
        longest: longest side of a picture, pixels.
        text_width: channels of the language model.
    """

    width: int = 64
    heads: int = 2
    hidden: int = 128
    layers: int = 3
    patch: int = 8
    longest: int = 256
    text_width: int = 96


SMALL = Sizes()
LAYERS, PATCH, LONGEST = SMALL.layers, SMALL.patch, SMALL.longest

NATIVE_NAMES = {
    "vision_tower.": "vision_encoder.",
    "multi_modal_projector.linear_1.": "vision_language_adapter.w_in.",
    "multi_modal_projector.linear_2.": "vision_language_adapter.w_out.",
    "multi_modal_projector.norm.": "pre_mm_projector_norm.",
    "multi_modal_projector.patch_merger.": "patch_merger.",
    "language_model.model.embed_tokens.": "tok_embeddings.",
    "language_model.model.norm.": "norm.",
    "language_model.lm_head.": "output.",
    "language_model.model.": "",
    ".self_attn.": ".attention.",
    ".mlp.": ".feed_forward.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
#: names since transformers 4.52
NEW_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def write_pixtral(
    path: Path,
    kind: Kind,
    *,
    seed: int = 0,
    sharded: bool = False,
    new_names: bool = False,
    merge: int | None = None,
    bias: bool | None = None,
    shift: int = 0,
    feature_layer: int | list[int] = -1,
    sizes: Sizes = SMALL,
) -> Path:
    """Writes a random checkpoint to ``path`` and returns it.

    Args:
        path: folder, made if missing.
        kind: layout.
        seed: of the weights; equal seeds give one model in every layout of equal merging and biases.
        sharded: several safetensors files with an index.
        new_names: ``model.vision_tower.…`` instead of ``vision_tower.…``.
        merge: side of a block of patches; None for 2 with a merger, 1 without.
        bias: whether the projector has biases; None for what the published checkpoint has.
        shift: moves the ids of the image tokens.
        feature_layer: ``vision_feature_layer`` of transformers' layouts.
        sizes: of the tower and its pictures.
    """
    path.mkdir(parents=True, exist_ok=True)
    merger = kind in ("native-merger", "mistral3")
    merge = merge or (2 if merger else 1)
    bias = (not merger) if bias is None else bias
    features = len(feature_layer) if isinstance(feature_layer, list) else 1
    tensors = _tensors(sizes, seed, merger=merger, merge=merge, bias=bias, features=features)
    if kind.startswith("native"):
        tensors = {_renamed(name, NATIVE_NAMES): _halves_to_pairs(sizes, name, t) for name, t in tensors.items()}
        params = _params(sizes, merger=merger, merge=merge, bias=bias)
        (path / "params.json").write_text(json.dumps(params, indent=1))
        images = {"patch": sizes.patch, "longest": sizes.longest, "merge": merge, "total": VOCABULARY}
        write_tekken(path, version="v7" if merger else "v3", shift=shift, **images)
        stem = "consolidated"
    else:
        if new_names:
            tensors = {_renamed(name, NEW_NAMES, once=True): tensor for name, tensor in tensors.items()}
        image_id = write_tokenizer(path, shift=shift)
        config = _config(sizes, merger=merger, merge=merge, bias=bias, image_id=image_id, feature_layer=feature_layer)
        (path / "config.json").write_text(json.dumps(config, indent=1))
        for name, content in processor_files(sizes.patch, sizes.longest, merge).items():
            (path / name).write_text(json.dumps(content, indent=1))
        stem = "model"
    write_tensors(path, stem, tensors, sharded=sharded)
    return path


def _tensors(
    sizes: Sizes, seed: int, *, merger: bool, merge: int, bias: bool, features: int
) -> dict[str, torch.Tensor]:
    """All tensors by transformers' older names; q and k in the order of rotated halves."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    def block(prefix: str, width: int, hidden: int, q: int, kv: int, names: tuple[str, str, str, str]) -> None:
        attention, feed, norm1, norm2 = (f"{prefix}{name}" for name in names)
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"{attention}.{part}_proj.weight"] = random(rows, width)
        tensors[f"{attention}.o_proj.weight"] = random(width, q)
        tensors[f"{feed}.gate_proj.weight"] = random(hidden, width)
        tensors[f"{feed}.up_proj.weight"] = random(hidden, width)
        tensors[f"{feed}.down_proj.weight"] = random(width, hidden)
        tensors[f"{norm1}.weight"], tensors[f"{norm2}.weight"] = norm(width), norm(width)

    tensors: dict[str, torch.Tensor] = {
        "vision_tower.patch_conv.weight": torch.randn(sizes.width, 3, sizes.patch, sizes.patch, generator=generator)
        * 0.1,
        "vision_tower.ln_pre.weight": norm(sizes.width),
    }
    for layer in range(sizes.layers):
        names = ("attention", "feed_forward", "attention_norm", "ffn_norm")
        block(f"vision_tower.transformer.layers.{layer}.", sizes.width, sizes.hidden, sizes.width, sizes.width, names)
    text = "language_model.model."
    tensors[f"{text}embed_tokens.weight"] = torch.randn(VOCABULARY, sizes.text_width, generator=generator) * 0.5
    tensors[f"{text}norm.weight"] = norm(sizes.text_width)
    tensors["language_model.lm_head.weight"] = random(VOCABULARY, sizes.text_width)
    for layer in range(TEXT_LAYERS):
        names = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
        rows = TEXT_HEADS * HEAD_DIM, TEXT_KV_HEADS * HEAD_DIM
        block(f"{text}layers.{layer}.", sizes.text_width, TEXT_HIDDEN, *rows, names)
    projector = "multi_modal_projector."
    tensors[f"{projector}linear_1.weight"] = random(sizes.text_width, sizes.width * features)
    tensors[f"{projector}linear_2.weight"] = random(sizes.text_width, sizes.text_width)
    if bias:
        for name in ("linear_1", "linear_2"):
            tensors[f"{projector}{name}.bias"] = torch.randn(sizes.text_width, generator=generator) * 0.1
    if merger:
        tensors[f"{projector}norm.weight"] = norm(sizes.width)
        tensors[f"{projector}patch_merger.merging_layer.weight"] = random(sizes.width, sizes.width * merge**2)
    return tensors


def _renamed(name: str, names: dict[str, str], *, once: bool = False) -> str:
    for old, new in names.items():
        if old in name and (not once or name.startswith(old)):
            name = name.replace(old, new, 1)
            if once:
                break
    return name


def _halves_to_pairs(sizes: Sizes, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Queries and keys of native files: the rows that turn together lie side by side."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return tensor
    head = sizes.width // sizes.heads if name.startswith("vision_tower.") else HEAD_DIM
    return tensor.view(tensor.shape[0] // head, 2, head // 2, -1).transpose(1, 2).reshape(tensor.shape).contiguous()


def _params(sizes: Sizes, *, merger: bool, merge: int, bias: bool) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if merger:
        extra = {
            "mm_projector_id": "patch_merge",
            "spatial_merge_size": merge,
            "add_pre_mm_projector_layer_norm": True,
            "max_image_size": sizes.longest,
        }
    return {
        "dim": sizes.text_width,
        "n_layers": TEXT_LAYERS,
        "head_dim": HEAD_DIM,
        "hidden_dim": TEXT_HIDDEN,
        "n_heads": TEXT_HEADS,
        "n_kv_heads": TEXT_KV_HEADS,
        "norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "vision_encoder": {
            "hidden_size": sizes.width,
            "num_channels": 3,
            "image_size": sizes.longest,
            "patch_size": sizes.patch,
            "rope_theta": 10000.0,
            "intermediate_size": sizes.hidden,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "adapter_bias": bias,
            "image_token_id": 10,
            **extra,
        },
    }


def _config(
    sizes: Sizes, *, merger: bool, merge: int, bias: bool, image_id: int, feature_layer: int | list[int]
) -> dict[str, Any]:
    name, model_type = ("Mistral3", "mistral3") if merger else ("Llava", "llava")
    extra: dict[str, Any] = {"spatial_merge_size": merge}
    if not merger:
        # published Mistral3 files leave it out, and its class then says that the head is tied, which it is not
        extra = {"vision_feature_select_strategy": "full", "tie_word_embeddings": False}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": model_type,
        "dtype": "float32",
        "image_token_index": image_id,
        "multimodal_projector_bias": bias,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": feature_layer,
        **extra,
        "text_config": {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "hidden_size": sizes.text_width,
            "num_hidden_layers": TEXT_LAYERS,
            "num_attention_heads": TEXT_HEADS,
            "num_key_value_heads": TEXT_KV_HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": TEXT_HIDDEN,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": sizes.width,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "intermediate_size": sizes.hidden,
            "head_dim": sizes.width // sizes.heads,
            "hidden_act": "silu",
            "image_size": sizes.longest,
            "patch_size": sizes.patch,
            "rope_theta": 10000.0,
        },
    }


def processor_files(patch_size: int, longest: int, merge: int) -> dict[str, dict[str, Any]]:
    """Files, by name, that tell transformers and vLLM how a Pixtral model sees pictures.

    Args:
        patch_size: side of a patch, pixels.
        longest: longest edge of a picture, pixels.
        merge: side of the square of patches that becomes one token.
    """
    images = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": longest},
        "patch_size": {"height": patch_size, "width": patch_size},
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
        "resample": 3,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "processor_class": "PixtralProcessor",
    }
    texts = {"processor_class": "PixtralProcessor", "patch_size": patch_size, "spatial_merge_size": merge}
    return {"preprocessor_config.json": images, "processor_config.json": texts}
