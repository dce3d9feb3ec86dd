"""Reads a checkpoint's language tensors and nothing else.

vLLM's default loader can leave out whole files; a file that holds tower and language tensors together it reads in
full. This one decides tensor by tensor, before it reads. It takes safetensors only: other formats may hold code.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from shared.errors import CheckpointError
from shared.families import family_of, read_config
from shared.model_config import STEMS, weight_stem
from shared.weight_index import index_name, read_index


class TowerFreeLoader(DefaultModelLoader):
    """vLLM's default loader over the language tensors of a multimodal checkpoint."""

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        self.counter_before_loading_weights = time.perf_counter()
        folder = Path(source.model_or_path)
        skip = family_of(read_config(folder)).tower_prefixes
        yield from language_tensors(folder, skip)


def check_language_tensors(folder: Path) -> None:
    """Opens the files and looks for every tensor that will be read, without reading one.

    Raises:
        CheckpointError: as for :func:`language_tensors`, but before an engine process is started.
    """
    for _ in _listed(folder, family_of(read_config(folder)).tower_prefixes):
        pass


def language_tensors(folder: Path, skip: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of every tensor whose name begins with none of ``skip``.

    Raises:
        CheckpointError: no safetensors file, a damaged one, or a tensor that the index promises and no file holds.
    """
    for file, name in _listed(folder, skip):
        yield name, file.get_tensor(name)


def _index(folder: Path) -> Path:
    return folder / index_name(weight_stem(folder))


def _listed(folder: Path, skip: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    """Open file and name of every tensor to read."""
    for path, names in sorted(_wanted(folder, skip).items()):
        try:
            with safe_open(path, framework="pt") as file:
                held = set(file.keys())
                for name in sorted(held) if names is None else names:
                    if name.startswith(skip):
                        continue
                    if name not in held:
                        raise CheckpointError(f"{_index(folder)} says that {path.name} holds {name}, which it does not")
                    yield file, name
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error


def _wanted(folder: Path, skip: tuple[str, ...]) -> dict[Path, list[str] | None]:
    """Files to open, each with the names to read from it; None for all. Tower-only files are not opened."""
    index = _index(folder)
    if not index.exists():
        others = [stem for stem in STEMS.values() if stem != weight_stem(folder)]
        files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith(tuple(others)))
        if not files:
            raise CheckpointError(f"no safetensors file in {folder}")
        return dict.fromkeys(files)
    wanted: dict[Path, list[str] | None] = {}
    for name, file in sorted(read_index(index).items()):
        if not name.startswith(skip):
            names = wanted.setdefault(folder / file, [])
            assert names is not None
            names.append(name)
    return wanted
