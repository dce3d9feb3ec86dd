"""Loads a tower, and only a tower, from a checkpoint folder, and fingerprints what it loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from encoder_service.layouts.base import Layout, Sources, section, whole
from encoder_service.layouts.isaac import ISAAC
from encoder_service.layouts.pixtral import LLAVA, MISTRAL3, NATIVE
from encoder_service.layouts.radio import ALONE, LLAMA, NANO
from encoder_service.preprocess.base import Preprocess
from encoder_service.tensor_files import TensorFiles
from encoder_service.towers.base import Tower
from encoder_service.towers.int8 import INT8_VERSION, to_int8
from encoder_service.towers.radio import RadioSummaryTower, RadioTower
from shared.config import Dtype, EncoderOutput, Quantization
from shared.errors import CheckpointError
from shared.families import Family, family_of, read_config
from shared.model_config import config_file, weight_stem
from shared.sizing import NaflexRule, SizeRule

#: raise when a change of the towers' arithmetic changes the bits of an embedding: old cache entries then miss
NUMERICS_VERSION = 1

#: by the family's name in ``shared/families.py``
LAYOUTS: dict[str, Layout] = {
    "isaac": ISAAC,
    "pixtral": NATIVE,
    "pixtral-hf": LLAVA,
    "mistral3": MISTRAL3,
    "radio": ALONE,
    "llama-nemotron": LLAMA,
    "nemotron-nano": NANO,
}


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


def load_encoder(
    checkpoint: Path,
    dtype: Dtype,
    device: str = "cpu",
    quantization: Quantization = "none",
    output: EncoderOutput = "features",
) -> LoadedEncoder:
    """Loads the tower's tensors straight into the tower's own memory; language tensors are not read.

    Args:
        checkpoint: folder with ``config.json`` and safetensors files.
        dtype: dtype of the tower's weights, whatever the file holds.
        device: torch device.
        quantization: ``int8`` turns the tower's linear layers to 8 bits once they are loaded.
        output: what the tower gives; a ``summary`` takes an encoder without a language model.

    Raises:
        CheckpointError: one sentence that names the file and the tensor or setting at fault.
    """
    config = read_config(checkpoint)
    family = family_of(config, checkpoint)
    rule = _size_rule(family, config)
    layout, tower = _planned(checkpoint, config, family, rule, dtype)
    if output == "summary":
        tower = _summarising(tower, checkpoint, dtype)
    with TensorFiles(checkpoint, weight_stem(checkpoint)) as files:
        root, sources = _found(layout, tower, family, files, checkpoint)
        tower = tower.to_empty(device=torch.device(device)).eval()
        _fill(tower, layout, sources, files, root)
        if quantization == "int8":
            to_int8(tower)
        preprocess = layout.preprocess(layout.completed(config, partial(_stored, files, root)), rule)
    numbers = f"{dtype} int8 {INT8_VERSION}" if quantization == "int8" else dtype
    numbers += " summary" if output == "summary" else ""
    prints = Fingerprints(
        tower_fingerprint(tower, layout.describe(tower), numbers), blake3(preprocess.fingerprint().encode()).hexdigest()
    )
    return LoadedEncoder(tower, preprocess, prints, files.read)


def check_encoder(checkpoint: Path, dtype: Dtype = "bfloat16") -> Tower:
    """The tower of a checkpoint without its weights, on the ``meta`` device, once every tensor is known to be there.

    Only headers are read and no memory is spent on weights.

    Raises:
        CheckpointError: as for :func:`load_encoder`.
    """
    config = read_config(checkpoint)
    family = family_of(config, checkpoint)
    layout, tower = _planned(checkpoint, config, family, _size_rule(family, config), dtype)
    with TensorFiles(checkpoint, weight_stem(checkpoint)) as files:
        _found(layout, tower, family, files, checkpoint)
    return tower


def _planned(
    checkpoint: Path, config: dict[str, Any], family: Family, rule: SizeRule, dtype: Dtype
) -> tuple[Layout, Tower]:
    """The layout, and the tower where nothing is allocated."""
    layout = LAYOUTS.get(family.name)
    if layout is None:
        raise CheckpointError(f"{checkpoint}: no tower for family {family.name}; there are: {', '.join(LAYOUTS)}")
    with torch.device("meta"):
        return layout, layout.build(config, rule).to(getattr(torch, dtype)).requires_grad_(False)


def _summarising(tower: Tower, checkpoint: Path, dtype: Dtype) -> Tower:
    if not isinstance(tower, RadioTower) or tower.config.projector != "none":
        raise CheckpointError(f"{checkpoint} gives no summaries; only RADIO encoders without a language model do")
    with torch.device("meta"):
        return RadioSummaryTower(tower.config).to(getattr(torch, dtype)).requires_grad_(False)


def _found(layout: Layout, tower: Tower, family: Family, files: TensorFiles, checkpoint: Path) -> tuple[str, Sources]:
    """Root and sources of the tower's tensors, all there and of the right shape."""
    root = _root(family, files, checkpoint)
    sources = _located(layout, tower, family, root, files, checkpoint)
    _check_shapes(tower, sources, files)
    return root, sources


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
    numbers = {name for name, kind in type(rule).__annotations__.items() if kind.startswith("int")}
    for name, value in vars(rule).items():
        if name in numbers and value is not None:
            whole({name: value}, name)
    if isinstance(rule, NaflexRule) and rule.max_patches < max(rule.merge**2, rule.min_patches or 0):
        raise CheckpointError(
            f"config.json allows {rule.max_patches} patches at most, fewer than its minimum {rule.min_patches} "
            f"or than one block of {rule.merge}x{rule.merge}"
        )
    return rule


def _root(family: Family, files: TensorFiles, checkpoint: Path) -> str:
    """What stands before the tower's names in this checkpoint.

    Raises:
        CheckpointError: none of what the family knows.
    """
    for root in family.tower_roots:
        if any(files.names(root + part) for part in family.tower_parts):
            return root
    raise CheckpointError(
        f"{checkpoint} has no tensor of the tower of family {family.name}: "
        f"no name begins with {' or '.join(family.tower_prefixes)}"
    )


def _located(layout: Layout, tower: Tower, family: Family, root: str, files: TensorFiles, checkpoint: Path) -> Sources:
    """The sources with their full names; every tensor of the tower in the files must have a use.

    Raises:
        CheckpointError: a tensor that the configuration leaves without a place.
    """
    found = set().union(*(files.names(root + part) for part in family.tower_parts))
    stored = frozenset(name.removeprefix(root) for name in found)
    sources = layout.spelled(tower, layout.sources(tower), stored)
    located = {
        ours: tuple(root + name for name in theirs)
        for ours, theirs in sources.items()
        if layout.absent(tower, ours) is None or stored >= set(theirs)
    }
    unknown = found - {name for names in located.values() for name in names}
    if unknown := {name for name in unknown if not layout.spare(tower, name.removeprefix(root))}:
        raise CheckpointError(
            f"{files.place(min(unknown))}: {min(unknown)} has no place in the tower that "
            f"{config_file(checkpoint)} describes ({len(unknown)} such tensors)"
        )
    return located


def _check_shapes(tower: Tower, sources: Sources, files: TensorFiles) -> None:
    """Compares every shape in the headers with the tower's before memory is spent."""
    for ours, parameter in tower.state_dict().items():
        if (names := sources.get(ours)) is None:  # absent, as it may be
            continue
        wanted = (parameter.shape[0] // len(names), *parameter.shape[1:])
        for name in names:
            if (found := files.shape(name)) != wanted:
                raise CheckpointError(
                    f"{files.place(name)}: {name} has shape {list(found)}, the configuration asks for {list(wanted)}"
                )


def _stored(files: TensorFiles, root: str, name: str) -> torch.Tensor | None:
    return files.tensor(root + name) if root + name in files.names(root + name) else None


def _fill(tower: Tower, layout: Layout, sources: Sources, files: TensorFiles, root: str) -> None:
    """Copies the tensors into the parameters, with conversion of dtype and device on the way."""
    for ours, parameter in tower.state_dict().items():
        if (names := sources.get(ours)) is None:
            value = layout.absent(tower, ours)
            assert value is not None, f"{ours} has neither a source nor a value"
            parameter.fill_(value)
            continue
        for rows, name in zip(parameter.chunk(len(names)), names, strict=True):
            rows.copy_(layout.arrange(tower, name.removeprefix(root), files.tensor(name)))
