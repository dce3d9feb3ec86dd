"""Checkpoint folders to damage, and how a refusal must look."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder_service.checkpoints import load_encoder
from shared.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOWER = "model.vision_embedding."
FC1 = f"{TOWER}0.encoder.layers.1.mlp.fc1.weight"


def all_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of every safetensors file in the folder."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def edit_config(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    change(config)
    (checkpoint / "config.json").write_text(json.dumps(config))


def edit_tensors(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(checkpoint / SINGLE)
    change(tensors)
    save_file(tensors, checkpoint / SINGLE)


def refused(checkpoint: Path, *words: str) -> None:
    """Loading fails with one sentence that has these words in it."""
    with pytest.raises(CheckpointError) as caught:
        load_encoder(checkpoint, "float32")
    message = str(caught.value)
    assert "\n" not in message.strip()
    for word in words:
        assert word in message, message
