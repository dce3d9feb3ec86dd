"""Configuration classes for model types that transformers does not know: published as code beside the weights.

That code is never run. What the language engine needs of such a configuration is the text model's part.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from shared.radio import LLAMA_NEMOTRON


class LlamaNemotronConfig(PretrainedConfig):
    """Llama-Nemotron-Nano-VL; the text model's part stands under ``llm_config``, in newer copies ``text_config``."""

    model_type = LLAMA_NEMOTRON.model_type

    def __init__(
        self,
        vision_config: dict[str, Any] | None = None,
        llm_config: dict[str, Any] | None = None,
        text_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        self.text_config = LlamaConfig(**(text_config or llm_config or {}))
        super().__init__(**kwargs)


def register_configs() -> None:
    """Makes the classes known to transformers; safe to call again."""
    AutoConfig.register(LlamaNemotronConfig.model_type, LlamaNemotronConfig, exist_ok=True)
