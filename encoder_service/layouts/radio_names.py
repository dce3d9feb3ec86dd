"""Where RADIO's parameters stand in the files: which of several spellings a checkpoint uses is read from its names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from encoder_service.layouts.base import Sources
from encoder_service.towers.base import Tower
from encoder_service.towers.radio import RadioTowerConfig

#: prefix of the ViT inside a chat model
VISION = "vision_model."


@dataclass(frozen=True)
class Spelling:
    """One way to name the tensors of the ViT.

    Attributes:
        mark: a name that only this spelling has.
        outer: our parameter to its name.
        block: name of block N, with ``{}`` for N.
        qkv: the fused product, or its three parts, inside a block; without ``.weight``.
        out, q_norm, k_norm: the rest of the attention, likewise.
        scales: names that a layer scale has, the two numbers in place of ``{}``.
    """

    mark: str
    outer: dict[str, str]
    block: str
    qkv: tuple[str, ...]
    out: str
    scales: tuple[str, ...]
    q_norm: str = "attention.q_norm"
    k_norm: str = "attention.k_norm"


_GENERATOR = "radio_model.model.patch_generator."
OLD = Spelling(
    mark=f"{_GENERATOR}embedder.weight",
    outer={
        "patch_projection.weight": f"{_GENERATOR}embedder.weight",
        "video_projection.weight": f"{_GENERATOR}video_embedder.weight",
        "position_table": f"{_GENERATOR}pos_embed",
        "prefix_tokens": f"{_GENERATOR}cls_token.token",
    },
    block="radio_model.model.blocks.{}.",
    qkv=("attn.qkv",),
    out="attn.proj",
    scales=("ls{}", "ls{}.gamma"),
    q_norm="attn.q_norm",
    k_norm="attn.k_norm",
)
_OUTER = {
    "patch_projection.weight": "embeddings.patch_projection.weight",
    "video_projection.weight": "embeddings.video_patch_projection.weight",
    "position_table": "embeddings.position_embedding",
    "prefix_tokens": "embeddings.cls_register_token",
}
NATIVE = Spelling(
    mark="encoder.layer.0.attention.q_proj.weight",
    outer=_OUTER,
    block="encoder.layer.{}.",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    scales=("layer_scale{}.lambda1",),
)
NATIVE_LONG = Spelling(
    mark="encoder.layer.0.attention.attention.query.weight",
    outer=_OUTER,
    block="encoder.layer.{}.",
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    out="attention.output.dense",
    scales=("layer_scale{}.lambda1",),
)
SPELLINGS = (OLD, NATIVE, NATIVE_LONG)


def stored_names(config: RadioTowerConfig, ours: tuple[str, ...], names: frozenset[str]) -> Sources:
    """Where each of our parameters stands.

    Args:
        config: of the tower.
        ours: its parameters.
        names: of all its tensors in the files, the family's root removed. When no spelling fits, the first is assumed,
            so that the error names a tensor that is missing.
    """
    chat = config.projector != "none"
    vision = VISION if chat else ""
    spelling = next((known for known in SPELLINGS if vision + known.mark in names), OLD)
    sources: Sources = {}
    for name in ours:
        if name.startswith("projector."):
            sources[name] = (name.replace("projector.", "mlp1.", 1),)
        elif name.startswith("final_norm."):
            sources[name] = (f"vision_projector.vision_{name.replace('final_norm', 'final_layernorm')}",)
        elif name in spelling.outer:
            sources[name] = (vision + spelling.outer[name],)
        else:
            sources[name] = tuple(vision + found for found in _in_block(spelling, name, vision, names))
    return sources


def _in_block(spelling: Spelling, name: str, vision: str, names: frozenset[str]) -> tuple[str, ...]:
    """Names of one parameter of a block, such as ``blocks.3.attention.qkv.weight``."""
    _, number, rest = name.split(".", 2)
    block = spelling.block.format(number)
    if scale := re.fullmatch(r"scale([12])", rest):
        spelled = [block + known.format(scale[1]) for known in spelling.scales]
        return (next((known for known in spelled if vision + known in names), spelled[0]),)
    part, kind = rest.rsplit(".", 1)
    theirs: tuple[str, ...] = {
        "attention.qkv": spelling.qkv,
        "attention.out": (spelling.out,),
        "attention.q_norm": (spelling.q_norm,),
        "attention.k_norm": (spelling.k_norm,),
        "mlp.up": ("mlp.fc1",),
        "mlp.down": ("mlp.fc2",),
    }.get(part, (part,))
    return tuple(f"{block}{found}.{kind}" for found in theirs)


#: stored, but not part of the tower: pixels are normalised in preprocessing, the summary's class tokens
#: come from the configuration, and adaptors are heads that imitate other models
_SPARE = re.compile(r"(vision_model\.)?(radio_model\.)?(input_conditioner\..*|summary_idxs|adaptors\..*)")


def is_spare(tower: Tower, name: str) -> bool:
    """Whether a stored tensor is rightly left unread."""
    return _SPARE.fullmatch(name) is not None


def absent(tower: Tower, name: str) -> float | None:
    """Layer scales that a checkpoint leaves out are 1: published RADIO towers have none."""
    return 1.0 if re.fullmatch(r"blocks\.\d+\.scale[12]", name) else None
