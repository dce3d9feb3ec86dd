"""Every layout, damaged in the ways that downloads are: one sentence that names the file and the tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from encoder_service.checkpoints import load_encoder
from lookonce.inspect import inspect
from shared.families import family_of, read_config
from tests.encoder_service.damage import refused
from tools.checkpoints.catalogue import LAYOUTS


def tower_file(checkpoint: Path) -> tuple[Path, str]:
    """A file of the checkpoint and the name of a matrix of the tower in it."""
    prefixes = family_of(read_config(checkpoint)).tower_prefixes
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                if name.startswith(prefixes) and len(file.get_slice(name).get_shape()) == 2:
                    return path, name
    raise AssertionError("no tower in this checkpoint")


def damaged(whole: Path, to: Path) -> tuple[Path, Path, str]:
    """A fresh copy of a checkpoint, the file to damage and the tensor."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(whole, to)
    return to, *tower_file(to)


@pytest.mark.parametrize("name", LAYOUTS)
def test_five_damages_are_told_apart(name: str, tmp_path: Path) -> None:
    whole, copy = LAYOUTS[name].write(tmp_path / "whole"), tmp_path / "copy"
    load_encoder(whole, "float32")

    folder, path, tensor = damaged(whole, copy)
    tensors = load_file(path)
    save_file({key: value for key, value in tensors.items() if key != tensor}, path)
    refused(folder, tensor)  # of what is missing, the index, or the folder, is the place

    folder, path, tensor = damaged(whole, copy)
    rows, columns = tensors[tensor].shape
    save_file(tensors | {tensor: torch.zeros(rows + 1, columns)}, path)
    refused(folder, path.name, tensor, str([rows + 1, columns]), str([rows, columns]))

    folder, path, tensor = damaged(whole, copy)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 100])
    refused(folder, path.name)
    assert any(path.name in problem for problem in inspect(folder).problems)

    folder, *_ = damaged(whole, copy)
    for part in folder.glob("*.safetensors"):
        save_file({f"other.{key}": value for key, value in load_file(part).items()}, part)
    for index in folder.glob("*.index.json"):
        tree = json.loads(index.read_text())
        tree["weight_map"] = {f"other.{key}": file for key, file in tree["weight_map"].items()}
        index.write_text(json.dumps(tree))
    refused(folder, "no tensor of the tower", str(folder))

    folder, *_ = damaged(whole, copy)
    config = folder / ("params.json" if (folder / "params.json").exists() else "config.json")
    tree = json.loads(config.read_text())
    tree.pop("vision_encoder", None)
    config.write_text(json.dumps(tree | {"model_type": "unheard-of", "architectures": ["UnheardOf"]}))
    refused(folder, str(folder), "no family")
