"""Loads a tower, and only a tower, from a checkpoint folder, and fingerprints what it loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from encoder_service.layouts.base import Layout, Sources, section, whole
from encoder_service.layouts.isaac import ISAAC
from encoder_service.preprocess.base import Preprocess
from encoder_service.tensor_files import TensorFiles
from encoder_service.towers.base import Tower
from shared.config import Dtype
from shared.errors import CheckpointError
from shared.families import Family, family_of, read_config
from shared.sizing import NaflexRule, SizeRule

#: raise when a change of the towers' arithmetic changes the bits of an embedding: old cache entries then miss
NUMERICS_VERSION = 1

#: by the family's name in ``shared/families.py``
LAYOUTS: dict[str, Layout] = {"isaac": ISAAC}


class Fingerprints(NamedTuple):
    """What makes embeddings differ besides the picture; 256-bit BLAKE3, hex.

    Attributes:
        tower: of the weights as loaded, their dtype, the tower's sizes and the numerics version.
        preprocess: of the preprocessing's settings and version.
    """

    tower: str
    preprocess: str


@dataclass(frozen=True)
class LoadedEncoder:
    """A tower ready to run.

    Attributes:
        tower: in evaluation mode, on its device.
        preprocess: pixels to patches for this tower.
        fingerprints: for the cache keys.
        read: names of the tensors that were read, by file.
    """

    tower: Tower
    preprocess: Preprocess
    fingerprints: Fingerprints
    read: dict[str, list[str]]


def load_encoder(checkpoint: Path, dtype: Dtype, device: str = "cpu") -> LoadedEncoder:
    """Loads the tower's tensors straight into the tower's own memory; language tensors are not read.

    Args:
        checkpoint: folder with ``config.json`` and safetensors files.
        dtype: dtype of the tower's weights, whatever the file holds.
        device: torch device.

    Raises:
        CheckpointError: one sentence that names the file and the tensor or setting at fault.
    """
    config = read_config(checkpoint)
    family = family_of(config)
    layout = LAYOUTS.get(family.name)
    if layout is None:
        raise CheckpointError(f"{checkpoint}: no tower for family {family.name}; there are: {', '.join(LAYOUTS)}")
    rule = _size_rule(family, config)
    with torch.device("meta"):
        tower = layout.build(config, rule).to(getattr(torch, dtype)).requires_grad_(False)
    with TensorFiles(checkpoint) as files:
        sources = _located(layout.sources(tower), family, files, checkpoint)
        _check_shapes(tower, sources, files)
        tower = tower.to_empty(device=torch.device(device)).eval()
        _fill(tower, sources, files)
    preprocess = layout.preprocess(rule)
    prints = Fingerprints(
        tower_fingerprint(tower, layout.describe(tower), dtype), blake3(preprocess.fingerprint().encode()).hexdigest()
    )
    return LoadedEncoder(tower, preprocess, prints, files.read)


def tower_fingerprint(tower: Tower, description: str, dtype: str) -> str:
    """BLAKE3 over the numerics version, the tower's description, its dtype and every tensor's name, shape and bytes."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(f"lookonce tower {NUMERICS_VERSION}\n{description}\n{dtype}\n".encode())
    for name, tensor in sorted(tower.state_dict().items()):
        hasher.update(f"{name} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _size_rule(family: Family, config: dict[str, Any]) -> SizeRule:
    """The family's rule, once the numbers that it is made from are known to be numbers."""
    section(config, "vision_config")
    rule = family.size_rule(config)
    fields = vars(rule) if isinstance(rule, NaflexRule) else {"patch_size": rule.patch_size, "merge": rule.merge}
    for name, value in fields.items():
        if value is not None:
            whole({name: value}, name)
    if isinstance(rule, NaflexRule) and rule.max_patches < max(rule.merge**2, rule.min_patches or 0):
        raise CheckpointError(
            f"config.json allows {rule.max_patches} patches at most, fewer than its minimum {rule.min_patches} "
            f"or than one block of {rule.merge}x{rule.merge}"
        )
    return rule


def _located(sources: Sources, family: Family, files: TensorFiles, checkpoint: Path) -> Sources:
    """The sources under the prefix that this checkpoint uses; every tensor under it must have a use.

    Raises:
        CheckpointError: nothing under any known prefix, or a tensor that the configuration leaves without a place.
    """
    for prefix in family.tower_prefixes:
        if found := files.names(prefix):
            located = {ours: tuple(prefix + name for name in theirs) for ours, theirs in sources.items()}
            if unknown := found - {name for names in located.values() for name in names}:
                raise CheckpointError(
                    f"{checkpoint}: {min(unknown)} has no place in the tower that config.json describes "
                    f"({len(unknown)} such tensors)"
                )
            return located
    raise CheckpointError(
        f"{checkpoint} has no tensor of the tower of family {family.name}: "
        f"no name begins with {' or '.join(family.tower_prefixes)}"
    )


def _check_shapes(tower: Tower, sources: Sources, files: TensorFiles) -> None:
    """Compares every shape in the headers with the tower's before memory is spent."""
    for ours, parameter in tower.state_dict().items():
        names = sources[ours]
        wanted = (parameter.shape[0] // len(names), *parameter.shape[1:])
        for name in names:
            if (found := files.shape(name)) != wanted:
                raise CheckpointError(
                    f"{files.place(name)}: {name} has shape {list(found)}, config.json asks for {list(wanted)}"
                )


def _fill(tower: Tower, sources: Sources, files: TensorFiles) -> None:
    """Copies the tensors into the parameters, with conversion of dtype and device on the way."""
    for ours, parameter in tower.state_dict().items():
        names = sources[ours]
        for rows, name in zip(parameter.chunk(len(names)), names, strict=True):
            rows.copy_(files.tensor(name))
