"""Small random RADIO checkpoints in the exact layouts of the published ones, all from one set of weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from encoder_service.preprocess.base import CLIP_MEAN, CLIP_STD
from tools.checkpoints import nemotron_h
from tools.checkpoints.files import write_tensors
from tools.checkpoints.qwen_tokenizer import write_tokenizer

#: remote-code names alone; transformers' two spellings; inside Llama-Nemotron-Nano-VL and Nemotron-Nano-VL-V2
Kind = Literal["old", "native", "native-long", "llama", "nano"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: of the language half; the tokenizer has a few tokens fewer
HEADS, VOCABULARY = 2, 640


@dataclass(frozen=True)
class Shape:
    """Sizes of a small checkpoint.

    Attributes:
        width, layers, heads, hidden, patch_size: of the ViT.
        table: side of the pictures for which the position table was made, pixels.
        teachers: names with whether their token belongs to the summary; one class token each.
        registers: further prefix tokens.
        qkv_bias, qk_norm, scales: whether the blocks have these; only old names have a norm of q and k.
        frames: per tubelet; 1 without video.
        tile: side of a tile, pixels.
        bounds: of patches, for dynamic resolution; None for tiles.
        ps_version: of the pixel shuffle.
        projector_hidden, text_width: of the chat models.
        language: whether a chat model has its language half and its tokenizer.
        final_norm: the LayerNorm that Nemotron models with token prediction heads have.
    """

    width: int = 64
    layers: int = 2
    heads: int = 2
    hidden: int = 256
    patch_size: int = 8
    table: int = 128
    teachers: tuple[tuple[str, bool], ...] = (("clip", True), ("siglip", True), ("sam", False))
    registers: int = 5
    qkv_bias: bool = True
    qk_norm: bool = False
    scales: bool = False
    frames: int = 1
    tile: int = 64
    bounds: tuple[int, int] | None = None
    ps_version: str = "v2"
    projector_hidden: int = 96
    text_width: int = 48
    language: bool = False
    final_norm: bool = False

    @property
    def prefix(self) -> int:
        return len(self.teachers) + self.registers

    @property
    def summary(self) -> list[int]:
        return [place for place, (_, used) in enumerate(self.teachers) if used]


def write_radio(path: Path, kind: Kind, shape: Shape | None = None, *, seed: int = 0, sharded: bool = False) -> Path:
    """Writes a random checkpoint to ``path`` and returns it; the ViT's weights depend on seed and shape alone."""
    shape = shape or Shape()
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = _vit(shape, kind, generator)
    if kind in ("llama", "nano"):
        tensors = {f"vision_model.{name}": tensor for name, tensor in tensors.items()}
        tensors |= _projector(shape, kind, generator)
        if not shape.language:
            tensors["language_model.model.norm.weight"] = torch.ones(shape.text_width)  # another half's: never read
        else:
            written = nemotron_h.language_tensors if kind == "nano" else _language
            tensors |= written(shape.text_width, VOCABULARY, generator)
            _write_tokenizer(path)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_tensors(path, "model", tensors, sharded=sharded)
    (path / "config.json").write_text(json.dumps(config(shape, kind), indent=1))
    if kind == "llama":
        processor = {"image_size": shape.tile, "max_num_tiles": 12, "use_thumbnail": True}
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def config(shape: Shape, kind: Kind) -> dict[str, Any]:
    """``config.json``."""
    if kind in ("native", "native-long"):
        return {
            "architectures": ["RadioModel"],
            "model_type": "radio",
            "hidden_size": shape.width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "mlp_ratio": shape.hidden / shape.width,
            "qkv_bias": shape.qkv_bias,
            "patch_size": shape.patch_size,
            "max_img_size": shape.table,
            "num_cls_tokens": len(shape.teachers),
            "num_registers": shape.registers,
            "summary_idxs": shape.summary,
            "video_temporal_patch_size": shape.frames if shape.frames > 1 else None,
        }
    vision: dict[str, Any] = {
        "architectures": ["RADIOModel"],
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.hidden,
        "patch_size": shape.patch_size,
        "max_resolution": shape.table,
        "preferred_resolution": [shape.tile, shape.tile],
        "video_temporal_patch_size": shape.frames,
        "separate_video_embedder": True,
        "args": {
            "model": "vit_small_patch16_224",
            "cpe_max_size": shape.table,
            "cls_token_per_teacher": True,
            "teachers": [{"name": name, "use_summary": used} for name, used in shape.teachers],
            "register_multiple": shape.prefix,
            "qkv_bias": shape.qkv_bias,
            "qk_normalization": shape.qk_norm,
        },
    }
    if kind == "old":
        return vision
    if shape.bounds:
        vision["args"] |= {"min_num_patches": shape.bounds[0], "max_num_patches": shape.bounds[1]}
    name = {"llama": "Llama_Nemotron_Nano_VL", "nano": "NemotronH_Nano_VL_V2"}[kind]
    text: dict[str, Any] = {"hidden_size": shape.text_width, "max_position_embeddings": 4096}
    if shape.language and kind == "nano":
        text |= nemotron_h.text_config(shape.text_width, VOCABULARY, 4096)
    elif shape.language:
        text |= {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 1,
            "head_dim": shape.text_width // HEADS,
            "intermediate_size": 2 * shape.text_width,
            "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
    return {
        "architectures": [name],
        "model_type": name,
        "downsample_ratio": 0.5,
        "force_image_size": shape.tile,
        "patch_size": shape.patch_size,
        "ps_version": shape.ps_version,
        "use_thumbnail": True,
        "template": "chatml",
        "image_tag_type": "internvl",
        "vit_hidden_size": shape.width,
        "projector_hidden_size": shape.projector_hidden,
        "norm_mean": CLIP_MEAN,
        "norm_std": CLIP_STD,
        "vision_config": vision,
        "llm_config" if kind == "llama" else "text_config": text
        | ({"num_nextn_predict_layers": 1} if shape.final_norm else {}),
    }


def _random(generator: torch.Generator, *shape: int, scale: float | None = None) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if scale is None else scale)


def _vit(shape: Shape, kind: Kind, generator: torch.Generator) -> dict[str, torch.Tensor]:
    width, native = shape.width, kind.startswith("native")
    patch, side = 3 * shape.patch_size**2, shape.table // shape.patch_size
    outer = ("patch_projection.weight", "video_patch_projection.weight", "position_embedding", "cls_register_token")
    if not native:
        outer = ("embedder.weight", "video_embedder.weight", "pos_embed", "cls_token.token")
    at = "embeddings." if native else "radio_model.model.patch_generator."
    tensors = {
        at + outer[0]: _random(generator, width, patch),
        at + outer[2]: _random(generator, 1, side**2, width, scale=0.5),
        at + outer[3]: _random(generator, shape.prefix, width, scale=0.5),
    }
    conditioner = "input_conditioner." if native else "radio_model.input_conditioner."
    tensors[f"{conditioner}norm_mean"] = torch.tensor(CLIP_MEAN).view(3, 1, 1)
    tensors[f"{conditioner}norm_std"] = torch.tensor(CLIP_STD).view(3, 1, 1)
    tensors["summary_idxs" if native else "radio_model.summary_idxs"] = torch.tensor(shape.summary)
    for layer in range(shape.layers):
        tensors |= _block(shape, kind, layer, generator)
    if shape.frames > 1:
        tensors[at + outer[1]] = _random(generator, width, shape.frames * patch)
    return tensors


def _block(shape: Shape, kind: Kind, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    width, native = shape.width, kind.startswith("native")
    made: dict[str, torch.Tensor] = {}
    for name, rows, columns in (
        ("qkv", 3 * width, width),
        ("out", width, width),
        ("mlp.fc1", shape.hidden, width),
        ("mlp.fc2", width, shape.hidden),
    ):
        made[f"{name}.weight"] = _random(generator, rows, columns)
        bias = _random(generator, rows, scale=0.1)
        if name != "qkv" or shape.qkv_bias:
            made[f"{name}.bias"] = bias
    for name in ("norm1", "norm2"):
        made[f"{name}.weight"] = 1 + _random(generator, width, scale=0.1)
        made[f"{name}.bias"] = _random(generator, width, scale=0.1)
    for name in ("q_norm", "k_norm"):
        weight = 1 + _random(generator, width, scale=0.1)
        if shape.qk_norm:
            made[f"attn.{name}.weight"] = weight
    for number in (1, 2):
        scale = _random(generator, width, scale=0.5)
        if shape.scales:
            made[f"layer_scale{number}.lambda1" if native else f"ls{number}"] = scale
    out = {"native": "attention.o_proj", "native-long": "attention.output.dense"}.get(kind, "attn.proj")
    parts = {"native": ("q_proj", "k_proj", "v_proj"), "native-long": ("query", "key", "value")}.get(kind)
    inner = {"native": "attention.", "native-long": "attention.attention."}.get(kind, "")
    named: dict[str, torch.Tensor] = {}
    for name, tensor in made.items():
        stem, _, rest = name.partition(".")
        if stem == "qkv" and parts:
            named |= {f"{inner}{part}.{rest}": piece for part, piece in zip(parts, tensor.chunk(3), strict=True)}
        else:
            named[{"qkv": f"attn.qkv.{rest}", "out": f"{out}.{rest}"}.get(stem, name)] = tensor
    block = f"encoder.layer.{layer}." if native else f"radio_model.model.blocks.{layer}."
    return {block + name: tensor for name, tensor in named.items()}


def _projector(shape: Shape, kind: Kind, generator: torch.Generator) -> dict[str, torch.Tensor]:
    merged = shape.width * 4
    made = {
        "mlp1.0.weight": 1 + _random(generator, merged, scale=0.1),
        "mlp1.1.weight": _random(generator, shape.projector_hidden, merged),
        "mlp1.3.weight": _random(generator, shape.text_width, shape.projector_hidden),
    }
    if kind == "llama":
        made["mlp1.0.bias"] = _random(generator, merged, scale=0.1)
        made["mlp1.1.bias"] = _random(generator, shape.projector_hidden, scale=0.1)
        made["mlp1.3.bias"] = _random(generator, shape.text_width, scale=0.1)
    if shape.final_norm:
        norm = "vision_projector.vision_final_layernorm."
        made[f"{norm}weight"] = 1 + _random(generator, shape.width, scale=0.1)
        made[f"{norm}bias"] = _random(generator, shape.width, scale=0.1)
    return made


def _language(width: int, vocabulary: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A small Llama."""
    head = width // HEADS
    at = "language_model.model."
    made = {
        f"{at}embed_tokens.weight": _random(generator, vocabulary, width, scale=0.5),
        f"{at}norm.weight": 1 + _random(generator, width, scale=0.1),
        "language_model.lm_head.weight": _random(generator, vocabulary, width),
    }
    for layer in range(2):
        block = f"{at}layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", width, width),
            ("self_attn.k_proj", head, width),
            ("self_attn.v_proj", head, width),
            ("self_attn.o_proj", width, width),
            ("mlp.gate_proj", 2 * width, width),
            ("mlp.up_proj", 2 * width, width),
            ("mlp.down_proj", width, 2 * width),
        ):
            made[f"{block}{name}.weight"] = _random(generator, rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{block}{name}.weight"] = 1 + _random(generator, width, scale=0.1)
    return made


def _write_tokenizer(path: Path) -> None:
    """A byte-level one with the model's image tokens, and a template that writes ``<image>`` for an image."""
    tokenizer = write_tokenizer(path, vocab_size=VOCABULARY - 40)
    names = ["<img>", "</img>", "<image>"]
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    for name in names:
        settings["added_tokens_decoder"][str(tokenizer.token_to_id(name))] = {"content": name, **plain}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, pad], "pad_token_id": pad}))
