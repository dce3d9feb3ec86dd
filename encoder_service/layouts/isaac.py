"""Isaac checkpoints: SigLIP2 names under ``vision_embedding.0``, the projector under ``.1`` and ``.3``."""

from __future__ import annotations

from math import isqrt

from encoder_service.layouts.base import Config, Layout, Sources, positive, section, whole
from encoder_service.preprocess.base import Preprocess
from encoder_service.preprocess.isaac import IsaacPreprocess
from encoder_service.towers.base import Tower
from encoder_service.towers.isaac import IsaacTower, IsaacTowerConfig
from encoder_service.towers.layers import ACTIVATIONS
from shared.errors import CheckpointError
from shared.sizing import NaflexRule, SizeRule

MAX_LAYERS = 1024


def tower_config(config: Config, rule: SizeRule) -> IsaacTowerConfig:
    """Sizes of the tower; what ``vision_config`` leaves out is SigLIP2's own default, as in its published class.

    Args:
        config: ``config.json``, with the text model's fields at the top (old) or under ``text_config`` (new).
        rule: the family's size rule for this configuration.

    Raises:
        CheckpointError: a value that no tower can have; names it.
    """
    vision, text = section(config, "vision_config"), section(config, "text_config")
    positions = whole(vision, "num_patches", 256)
    side = isqrt(positions)
    if side * side != positions:
        raise CheckpointError(f"config.json: num_patches must be a square number, found {positions}")
    if (channels := vision.get("num_channels", 3)) != 3:
        raise CheckpointError(f"config.json: num_channels must be 3, found {channels!r:.80}")
    activation = vision.get("hidden_act", "gelu_pytorch_tanh")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise CheckpointError(f"config.json: hidden_act of the tower must be one of {known}; found {activation!r:.80}")
    width, heads = whole(vision, "hidden_size", 768), whole(vision, "num_attention_heads", 12)
    if width % heads:
        raise CheckpointError(
            f"config.json: hidden_size {width} of the tower is not divisible by num_attention_heads {heads}"
        )
    return IsaacTowerConfig(
        width=width,
        layers=whole(vision, "num_hidden_layers", 12, most=MAX_LAYERS),
        heads=heads,
        hidden=whole(vision, "intermediate_size", 3072),
        patch_size=rule.patch_size,
        position_side=side,
        merge=rule.merge,
        output_width=whole(text if "hidden_size" in text else config, "hidden_size"),
        norm_eps=positive(vision, "layer_norm_eps", 1e-6),
        activation=activation,
    )


def _build(config: Config, rule: SizeRule) -> Tower:
    return IsaacTower(tower_config(config, rule))


def _describe(tower: Tower) -> str:
    assert isinstance(tower, IsaacTower)
    return repr(tower.config)


def _sources(tower: Tower) -> Sources:
    """q, k and v are apart in the file and one product here."""
    assert isinstance(tower, IsaacTower)
    sources: Sources = {
        "position_table": ("0.embeddings.position_embedding.weight",),
        "project_up.weight": ("1.weight",),
        "project_down.weight": ("3.weight",),
    }
    for kind in ("weight", "bias"):
        sources[f"patch_embedding.{kind}"] = (f"0.embeddings.patch_embedding.{kind}",)
        sources[f"norm.{kind}"] = (f"0.post_layernorm.{kind}",)
        for layer in range(tower.config.layers):
            ours, theirs = f"blocks.{layer}", f"0.encoder.layers.{layer}"
            sources |= {
                f"{ours}.norm1.{kind}": (f"{theirs}.layer_norm1.{kind}",),
                f"{ours}.attention.qkv.{kind}": tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv"),
                f"{ours}.attention.out.{kind}": (f"{theirs}.self_attn.out_proj.{kind}",),
                f"{ours}.norm2.{kind}": (f"{theirs}.layer_norm2.{kind}",),
                f"{ours}.mlp.up.{kind}": (f"{theirs}.mlp.fc1.{kind}",),
                f"{ours}.mlp.down.{kind}": (f"{theirs}.mlp.fc2.{kind}",),
            }
    return {ours: tuple(f"vision_embedding.{name}" for name in theirs) for ours, theirs in sources.items()}


def _preprocess(config: Config, rule: SizeRule) -> Preprocess:
    if not isinstance(rule, NaflexRule):
        raise CheckpointError(f"Isaac sizes images by the NaFlex rule, not by {type(rule).__name__}")
    return IsaacPreprocess(rule)


ISAAC = Layout(build=_build, describe=_describe, sources=_sources, preprocess=_preprocess)
