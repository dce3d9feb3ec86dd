"""Pixtral's three kinds of checkpoints: Mistral's own, and two that transformers writes."""

from __future__ import annotations

from dataclasses import replace

from shared.family import Family, RowTokens
from shared.model_config import PARAMS, PREPROCESSOR, Config, section, whole_number
from shared.sizing import LongestSideRule


def _native_rule(config: Config) -> LongestSideRule:
    """``max_image_size`` is what pictures are reduced to; older files give the tower's ``image_size`` alone."""
    vision = section(config, "vision_encoder")
    return LongestSideRule(
        patch_size=whole_number("patch_size", vision.get("patch_size"), file=PARAMS),
        merge=whole_number("spatial_merge_size", vision.get("spatial_merge_size", 1), file=PARAMS),
        longest=whole_number("image_size", vision.get("max_image_size") or vision.get("image_size"), file=PARAMS),
    )


def _llava_rule(config: Config) -> LongestSideRule:
    """The image processor's limit comes first, as in transformers; merging is the model's, whatever that one says."""
    vision, processor = section(config, "vision_config"), section(config, PREPROCESSOR)
    longest = section(processor, "size").get("longest_edge") or vision.get("image_size", 1024)
    return LongestSideRule(
        patch_size=whole_number("patch_size", vision.get("patch_size", 16)),
        longest=whole_number("image_size", longest),
        rounding="down",
    )


def _mistral3_rule(config: Config) -> LongestSideRule:
    return replace(_llava_rule(config), merge=whole_number("spatial_merge_size", config.get("spatial_merge_size", 2)))


ROWS = RowTokens("[IMG_BREAK]", "[IMG_END]")

PIXTRAL = Family(
    name="pixtral",
    model_type="pixtral",
    architectures=("PixtralForConditionalGeneration",),
    image_text="[IMG]",
    image_token="[IMG]",
    rows=ROWS,
    language_architecture="MistralForCausalLM",
    tower_parts=("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."),
    language_prefixes=(("", ""),),
    stacked=(("wq", "wk", "wv"), ("w1", "w3")),
    size_rule=_native_rule,
    max_tokens=lambda config: _native_rule(config).max_tokens,
)

PIXTRAL_HF = Family(
    name="pixtral-hf",
    model_type="llava",
    architectures=("LlavaForConditionalGeneration",),
    vision_model_type="pixtral",
    image_text="[IMG]",
    image_token="[IMG]",
    rows=ROWS,
    language_architecture="MistralForCausalLM",
    tower_roots=("model.", ""),
    tower_parts=("vision_tower.", "multi_modal_projector."),
    language_prefixes=(
        ("model.language_model.", "model."),
        ("language_model.", ""),
        ("lm_head.", "lm_head."),
    ),
    size_rule=_llava_rule,
    max_tokens=lambda config: _llava_rule(config).max_tokens,
)

MISTRAL3 = replace(
    PIXTRAL_HF,
    name="mistral3",
    model_type="mistral3",
    architectures=("Mistral3ForConditionalGeneration",),
    vision_model_type=None,
    size_rule=_mistral3_rule,
    max_tokens=lambda config: _mistral3_rule(config).max_tokens,
)
