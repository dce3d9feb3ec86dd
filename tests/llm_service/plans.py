"""What :mod:`tests.llm_service.variants` is told to run; importable without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llm_service.prompts import Placeholder, Prompt


@dataclass
class Case:
    """One prompt.

    Attributes:
        name: for the report.
        token_ids, placeholders: of the prompt; each placeholder as (offset, length, image index, mask).
        images: (seed, width, height) each.
    """

    name: str
    token_ids: list[int]
    placeholders: list[tuple[int, int, int, list[bool] | None]]
    images: list[tuple[int, int, int]]

    @property
    def prompt(self) -> Prompt:
        places = [Placeholder(*place, mask and tuple(mask)) for *place, mask in self.placeholders]
        return Prompt(self.token_ids, tuple(places))


@dataclass
class Run:
    """One engine.

    Attributes:
        name: for the report.
        checkpoint: its folder.
        kind: ``monolith`` (vLLM's own model), ``redis`` or ``inline``.
        options: engine arguments that differ.
        together: all prompts at once, else one after the other.
        passes: how often.
        flush: empty Redis as soon as every prompt has its first token.
        max_tokens: length of the answers.
        origin: another position convention, to prove that the comparison would notice.
    """

    name: str
    checkpoint: str
    kind: str = "redis"
    options: dict[str, Any] = field(default_factory=dict)
    together: bool = False
    passes: int = 1
    flush: bool = False
    max_tokens: int = 6
    origin: str | None = None
