"""Tensors in one safetensors file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
METADATA = {"format": "pt"}
SHARDS = 3


def write_tensors(path: Path, stem: str, tensors: Tensors, *, sharded: bool) -> None:
    """Writes ``stem.safetensors``, or three shards that each hold some of every part of the model."""
    if sharded:
        names = sorted(tensors)
        write_shards(path, stem, tensors, [names[number::SHARDS] for number in range(SHARDS)])
    else:
        save_file(tensors, path / f"{stem}.safetensors", metadata=METADATA)


def write_shards(path: Path, stem: str, tensors: Tensors, shards: Sequence[Sequence[str]]) -> None:
    """Writes one file for each list of names, and the index."""
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file, metadata=METADATA)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))
