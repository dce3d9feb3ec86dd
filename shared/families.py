"""The model families: what differs between them, as data.

Everything that both services must agree on about a family stands here once. A family is found by the ``model_type``
or the ``architectures`` of a checkpoint's ``config.json``; nothing here reads weights or imports a service.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError
from shared.sizing import NaflexRule, SizeRule

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: short name, used in module names and metrics.
        model_type: ``model_type`` in ``config.json``.
        architectures: ``architectures`` in ``config.json``.
        image_text: what a chat template writes for one image.
        image_token: the token that stands for one embedding row in the prompt.
        grid_origin: where an image's height and width positions begin (``llm_service.mrope.GridOrigin``); None for
            models with one row of positions.
        mrope_divisors: the M-RoPE sections, each as head size over this; empty without M-RoPE.
        language_architecture: the text model, as the language engine names it.
        tower_prefixes: checkpoint names of the tower and projector begin with one of these.
        language_prefixes: checkpoint prefixes of the language model with what replaces them, first match wins.
        size_rule: from ``config.json`` to the family's size arithmetic.
        max_tokens: from ``config.json`` to the most embedding rows that one image can have.
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]
    image_text: str
    image_token: str
    grid_origin: str | None
    mrope_divisors: tuple[int, ...]
    language_architecture: str
    tower_prefixes: tuple[str, ...]
    language_prefixes: tuple[tuple[str, str], ...]
    size_rule: Callable[[Config], SizeRule]
    max_tokens: Callable[[Config], int]


def _isaac_rule(config: Config) -> NaflexRule:
    """Old checkpoints say ``video_patch_size``, the class that wrote them ``vision_patch_size``."""
    vision: Config = config.get("vision_config") or {}
    patch = config.get("video_patch_size") or config.get("vision_patch_size") or vision.get("patch_size") or 16
    merge = config.get("pixel_shuffle_scale") or vision.get("pixel_shuffle_scale_factor") or 1
    for name, mine, theirs in (
        ("patch_size", patch, vision.get("patch_size", patch)),
        ("pixel_shuffle_scale_factor", merge, vision.get("pixel_shuffle_scale_factor", merge)),
    ):
        if mine != theirs:
            raise CheckpointError(f"config.json contradicts itself: {name} is {mine} and, in vision_config, {theirs}")
    return NaflexRule(
        patch_size=patch,
        merge=merge,
        min_patches=config.get("vision_min_num_patches"),
        max_patches=config.get("vision_max_num_patches", 256),
    )


def _isaac_max_tokens(config: Config) -> int:
    rule = _isaac_rule(config)
    return rule.max_patches // rule.merge**2


ISAAC = Family(
    name="isaac",
    model_type="isaac",
    architectures=("IsaacForConditionalGeneration",),
    image_text="<image>",
    image_token="<|image_pad|>",
    grid_origin="zero",
    mrope_divisors=(4, 8, 8),
    language_architecture="Qwen3ForCausalLM",
    tower_prefixes=("model.vision_embedding.", "vision_embedding."),
    language_prefixes=(
        ("lm_head.", "lm_head."),
        ("model.text_model.lm_head.", "lm_head."),
        ("model.lm_head.", "lm_head."),
        ("model.text_model.", "model."),
        ("model.", "model."),
    ),
    size_rule=_isaac_rule,
    max_tokens=_isaac_max_tokens,
)

FAMILIES: dict[str, Family] = {family.name: family for family in (ISAAC,)}


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``; data only, nothing that it names is ever imported or run.

    Raises:
        CheckpointError: missing or not a JSON object.
    """
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return config


def family_of(config: Config) -> Family:
    """The family of a checkpoint, from its ``config.json``.

    Raises:
        CheckpointError: no family here; names what was found.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures") or ()
    for family in FAMILIES.values():
        if model_type == family.model_type or set(architectures) & set(family.architectures):
            return family
    raise CheckpointError(
        f"no family for model_type {model_type!r} with architectures {list(architectures)}; "
        f"known: {', '.join(family.model_type for family in FAMILIES.values())}"
    )


def size_rule(checkpoint: Path) -> SizeRule:
    """The size arithmetic of a checkpoint.

    Raises:
        CheckpointError: unknown family or unreadable configuration.
    """
    config = read_config(checkpoint)
    return family_of(config).size_rule(config)


def context_length(checkpoint: Path) -> int:
    """How many tokens the checkpoint's language model was made for.

    Raises:
        CheckpointError: the configuration does not say.
    """
    config = read_config(checkpoint)
    text = config.get("text_config") or {}
    length = text.get("max_position_embeddings", config.get("max_position_embeddings"))
    if not isinstance(length, int) or length < 1:
        raise CheckpointError(f"{checkpoint / 'config.json'} has no usable max_position_embeddings: {length!r}")
    return length
