"""Turns a checkpoint's configuration into one that names our tower-free class."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llm_service.vllm_plugin import SERVED, architecture
from shared.errors import CheckpointError
from shared.families import Family


def tower_free(config: PretrainedConfig) -> PretrainedConfig:
    """vLLM's ``hf_overrides``: our architecture name, and M-RoPE sections where the checkpoint leaves them open.

    vLLM decides from the configuration, before it builds the model, whether positions have three rows. Published
    Isaac checkpoints leave ``mrope_section`` empty, so it is filled in here. vLLM also calls this with a bare
    configuration that holds nothing but ``model_type``.
    """
    family = next((f for f in SERVED if f.model_type == config.model_type), None)
    if family is None:
        return config
    config.architectures = [architecture(family)]
    text = config.get_text_config()
    # vLLM looks at the top only; a head that is tied in text_config alone would stay uninitialised memory
    config.tie_word_embeddings = any(getattr(part, "tie_word_embeddings", False) for part in (config, text))
    if family.mrope_divisors:
        for part in {id(config): config, id(text): text}.values():
            _fill_sections(family, part)
    return config


def _fill_sections(family: Family, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None)
    rope = getattr(config, "rope_parameters", None)
    if head_dim is None or not isinstance(rope, dict):
        return
    wanted = [head_dim // part for part in family.mrope_divisors]
    given = rope.get("mrope_section")
    if given is not None and list(given) != wanted:
        raise CheckpointError(f"mrope_section is {given}; {family.name} with head size {head_dim} needs {wanted}")
    rope["mrope_section"] = wanted
