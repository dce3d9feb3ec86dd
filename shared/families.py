"""The model families: what differs between them, as data.

Everything that both services must agree on about a family stands here once. A family is found by the ``model_type``
or the ``architectures`` of a checkpoint's ``config.json``; nothing here reads weights or imports a service.
"""

from __future__ import annotations

from pathlib import Path

from shared.errors import CheckpointError
from shared.family import Family
from shared.model_config import Config, config_file, read_config
from shared.pixtral import MISTRAL3, PIXTRAL, PIXTRAL_HF
from shared.radio import LLAMA_NEMOTRON, NEMOTRON_NANO, RADIO
from shared.sizing import NaflexRule, SizeRule

__all__ = [
    "FAMILIES",
    "ISAAC",
    "RADIO",
    "Config",
    "Family",
    "context_length",
    "family_of",
    "has_language",
    "read_config",
    "size_rule",
]


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
    tower_roots=("model.", ""),
    tower_parts=("vision_embedding.",),
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

FAMILIES: dict[str, Family] = {
    family.name: family for family in (ISAAC, PIXTRAL, PIXTRAL_HF, MISTRAL3, RADIO, LLAMA_NEMOTRON, NEMOTRON_NANO)
}


def family_of(config: Config, checkpoint: Path | None = None) -> Family:
    """The family of a checkpoint, from its ``config.json``.

    Args:
        config: what :func:`read_config` gave.
        checkpoint: the folder, for the error's sentence.

    Raises:
        CheckpointError: no family here; names what was found.
    """
    for family in FAMILIES.values():
        if family.matches(config):
            return family
    where = f"{checkpoint / config_file(checkpoint)}: " if checkpoint else ""
    raise CheckpointError(
        f"{where}no family for model_type {config.get('model_type')!r:.80} with architectures "
        f"{config.get('architectures')!r:.200}; "
        f"known: {', '.join(family.model_type for family in FAMILIES.values())}"
    )


def size_rule(checkpoint: Path) -> SizeRule:
    """The size arithmetic of a checkpoint.

    Raises:
        CheckpointError: unknown family or unreadable configuration.
    """
    config = read_config(checkpoint)
    return family_of(config).size_rule(config)


def has_language(checkpoint: Path) -> bool:
    """Whether a checkpoint has a language model that is served here; else it is an encoder alone.

    Raises:
        CheckpointError: unknown family or unreadable configuration.
    """
    return family_of(read_config(checkpoint)).language_architecture is not None


def context_length(checkpoint: Path) -> int:
    """How many tokens the checkpoint's language model was made for.

    Raises:
        CheckpointError: the configuration does not say.
    """
    config = read_config(checkpoint)
    if (family := family_of(config)).language_architecture is None:
        raise CheckpointError(f"{checkpoint} has no language model to serve ({family.name}); try lookonce encode")
    text = config.get("text_config") or config.get("llm_config") or {}
    length = text.get("max_position_embeddings", config.get("max_position_embeddings"))
    if not isinstance(length, int) or length < 1:
        file = checkpoint / config_file(checkpoint)
        raise CheckpointError(f"{file} has no usable max_position_embeddings: {length!r}")
    return length
