"""The contract of a checkpoint layout: from ``config.json`` to a tower, from its parameters to names in the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from encoder_service.preprocess.base import Preprocess
from encoder_service.towers.base import Tower
from shared.errors import CheckpointError
from shared.model_config import CONFIG
from shared.sizing import SizeRule

Config = Mapping[str, Any]
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


def section(config: Config, name: str, *, file: str = CONFIG) -> Config:
    """A nested mapping of the configuration; empty when it is missing or null. ``file`` is named in errors.

    Raises:
        CheckpointError: it is something else.
    """
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{file}: {name} must be an object, found {type(found).__name__}")
    return found


def whole(config: Config, name: str, default: int | None = None, *, most: int = 1 << 20, file: str = CONFIG) -> int:
    """A whole number between 1 and ``most`` from the configuration; ``file`` is named in errors.

    Raises:
        CheckpointError: missing without a default, of another type, or out of range.
    """
    found = config.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= most:
        raise CheckpointError(f"{file}: {name} must be a whole number from 1 to {most}, found {found!r:.80}")
    return found


def positive(config: Config, name: str, default: float) -> float:
    """A number above zero and below one from ``config.json``, such as an epsilon.

    Raises:
        CheckpointError: of another type or out of range.
    """
    found = config.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1:
        raise CheckpointError(f"config.json: {name} must be a number between 0 and 1, found {found!r:.80}")
    return float(found)
