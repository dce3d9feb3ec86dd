"""The contract of a checkpoint layout: from ``config.json`` to a tower, from its parameters to names in the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from encoder_service.preprocess.base import Preprocess
from encoder_service.towers.base import Tower
from shared.errors import CheckpointError
from shared.model_config import Config, section, whole
from shared.sizing import SizeRule

__all__ = ["Config", "Layout", "Sources", "Stored", "positive", "section", "whole"]

#: parameter of the tower → names in the file, after the family's root; several are stacked by rows
Sources = dict[str, tuple[str, ...]]
#: from a name after the family's root to the stored tensor; None when there is none
Stored = Callable[[str], torch.Tensor | None]


def _as_it_is(tower: Tower, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _none(tower: Tower, name: str) -> bool:
    return False


def _one_spelling(tower: Tower, sources: Sources, names: frozenset[str]) -> Sources:
    return sources


def _never(tower: Tower, name: str) -> float | None:
    return None


def _complete(config: Config, stored: Stored) -> Config:
    return config


@dataclass(frozen=True)
class Layout:
    """How one family's checkpoints describe and store a tower.

    Attributes:
        build: makes the tower from ``config.json`` and the size rule; it is called where nothing is allocated.
        describe: text of everything but the weights that changes what the tower computes.
        sources: where each parameter of that tower stands in the files.
        preprocess: makes the preprocessing for a configuration and its size rule.
        arrange: puts a stored tensor, named after the family's root, into the tower's order; the shape stays.
        spare: whether a stored tensor may be without a place in the tower, because the configuration leaves it out.
        spelled: the sources in the spelling that the stored names show, where a family's checkpoints have several.
        absent: the value of a parameter that a checkpoint may leave out; None when it may not.
        completed: the configuration with what only the files say about preprocessing.
    """

    build: Callable[[Config, SizeRule], Tower]
    describe: Callable[[Tower], str]
    sources: Callable[[Tower], Sources]
    preprocess: Callable[[Config, SizeRule], Preprocess]
    arrange: Callable[[Tower, str, torch.Tensor], torch.Tensor] = _as_it_is
    spare: Callable[[Tower, str], bool] = _none
    spelled: Callable[[Tower, Sources, frozenset[str]], Sources] = _one_spelling
    absent: Callable[[Tower, str], float | None] = _never
    completed: Callable[[Config, Stored], Config] = _complete


def positive(config: Config, name: str, default: float) -> float:
    """A number above zero and below one from ``config.json``, such as an epsilon.

    Raises:
        CheckpointError: of another type or out of range.
    """
    found = config.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1:
        raise CheckpointError(f"config.json: {name} must be a number between 0 and 1, found {found!r:.80}")
    return float(found)
