"""vLLM without a tower: arguments, inputs, outputs and the engine that ties them together."""

from llm_service.engine.engine import LanguageEngine

__all__ = ["LanguageEngine"]
