"""Configuration classes for model types that transformers does not know: published as code beside the weights.

That code is never run. What the language engine needs of such a configuration is the text model's part.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig, NemotronHConfig, PretrainedConfig

from shared.radio import LLAMA_NEMOTRON, NEMOTRON_NANO


class LlamaNemotronConfig(PretrainedConfig):
    """Llama-Nemotron-Nano-VL; the text model's part stands under ``llm_config``, in newer copies ``text_config``."""

    model_type = LLAMA_NEMOTRON.model_type

    def __init__(self, **kwargs: Any) -> None:
        _split(self, LlamaConfig, kwargs)
        super().__init__(**kwargs)


class NemotronNanoConfig(PretrainedConfig):
    """Nemotron-Nano-VL-V2, whose text model has attention and Mamba layers."""

    model_type = NEMOTRON_NANO.model_type

    # of its own: transformers makes one for subclasses that have none, which leaves the parts plain dictionaries
    def __init__(self, **kwargs: Any) -> None:
        _split(self, NemotronHConfig, kwargs)
        super().__init__(**kwargs)


def _split(config: PretrainedConfig, text: type[PretrainedConfig], given: dict[str, Any]) -> None:
    """Takes the parts out of ``given`` and gives them their classes."""
    texts = [given.pop(name, None) for name in ("text_config", "llm_config")]
    config.vision_config = PretrainedConfig(**(given.pop("vision_config", None) or {}))
    config.text_config = text(**(texts[0] or texts[1] or {}))


def register_configs() -> None:
    """Makes the classes known to transformers; safe to call again."""
    for config in (LlamaNemotronConfig, NemotronNanoConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
