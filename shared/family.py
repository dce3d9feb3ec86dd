"""What a model family is, as data that both services read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.model_config import Config
from shared.sizing import SizeRule

#: how Llama-like models fuse in memory what is apart in a file
HF_STACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class RowTokens:
    """Tokens around the embedding rows of an image that is written row by row; they take no embedding.

    Attributes:
        row_end: after every row of the merged grid but the last.
        image_end: after the last row.
    """

    row_end: str
    image_end: str


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: short name, used in module names and metrics.
        model_type: ``model_type`` in ``config.json``.
        architectures: ``architectures`` in ``config.json``.
        tower_parts: how the names of the tower's and projector's tensors begin, after one of the roots.
        size_rule: from ``config.json`` to the family's size arithmetic.
        max_tokens: from ``config.json`` to the most embedding rows that one image can have.
        image_text: what a chat template writes for one image.
        image_token: the token that stands for one embedding row in the prompt.
        language_architecture: the text model, as the language engine names it; None for encoders alone, and then
            whatever concerns prompts and language is left out.
        hybrid: whether the text model has Mamba layers beside attention.
        language_prefixes: checkpoint prefixes of the language model with what replaces them, first match wins.
        tower_roots: what stands before those parts; checkpoints differ in it.
        vision_model_type: ``model_type`` in ``vision_config``, where the family's own name says too little.
        rows: tokens between the rows of an image; None where its rows stand one after another.
        around: tokens before and after an image, which take no embedding.
        grid_origin: where an image's height and width positions begin (``llm_service.mrope.GridOrigin``); None for
            models with one row of positions.
        mrope_divisors: the M-RoPE sections, each as head size over this; empty without M-RoPE.
        stacked: parts of tensor names that the language engine joins to one parameter.
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]
    tower_parts: tuple[str, ...]
    size_rule: Callable[[Config], SizeRule]
    max_tokens: Callable[[Config], int]
    image_text: str = ""
    image_token: str = ""
    language_architecture: str | None = None
    hybrid: bool = False
    language_prefixes: tuple[tuple[str, str], ...] = ()
    tower_roots: tuple[str, ...] = ("",)
    vision_model_type: str | None = None
    rows: RowTokens | None = None
    around: tuple[str, str] | None = None
    grid_origin: str | None = None
    mrope_divisors: tuple[int, ...] = ()
    stacked: tuple[tuple[str, ...], ...] = HF_STACKED

    @property
    def tower_prefixes(self) -> tuple[str, ...]:
        """Every beginning of a tower tensor's name, in any of the family's checkpoints."""
        return tuple(root + part for root in self.tower_roots for part in self.tower_parts)

    def matches(self, config: Config) -> bool:
        """Whether a checkpoint's configuration describes this family."""
        given = config.get("architectures")
        names = given if isinstance(given, list) else []
        if config.get("model_type") != self.model_type and not any(name in self.architectures for name in names):
            return False
        vision = config.get("vision_config")
        kind = vision.get("model_type") if isinstance(vision, Mapping) else None
        return self.vision_model_type in (None, kind)
