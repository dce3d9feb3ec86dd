"""Checkpoint folders that mean harm: nothing in them is run, nothing outside them is read, nothing hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from encoder_service.checkpoints import load_encoder
from shared.errors import CheckpointError
from shared.families import read_config
from tests.encoder_service.damage import FC1, INDEX, edit_config, refused


@pytest.mark.parametrize(
    "file",
    [
        "../single/model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\x.safetensors",
        "x.bin",
        7,
        None,
        "a\0.safetensors",
    ],
)
def test_index_that_leads_out_of_the_folder(copy: Path, file: object) -> None:
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"][FC1] = file
    (copy / INDEX).write_text(json.dumps(index))
    refused(copy, INDEX, FC1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000, "\ud800"])
def test_damaged_index(copy: Path, text: str) -> None:
    (copy / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(copy, INDEX)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\ud800", "NaN"])
def test_damaged_config(single: Path, text: str) -> None:
    (single / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(single, "config.json")
    with pytest.raises(CheckpointError):
        read_config(single)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", -1),
        ("hidden_size", 10**12),
        ("hidden_size", "64"),
        ("hidden_size", 2.5),
        ("hidden_size", True),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", [1]),
        ("num_attention_heads", 3),
        ("num_patches", 255),
        ("num_channels", 4),
        ("layer_norm_eps", 0),
        ("layer_norm_eps", "1e-6"),
        ("hidden_act", "__import__('os').system('true')"),
        ("hidden_act", {"a": 1}),
        ("patch_size", 0),
        ("patch_size", 14),
        ("pixel_shuffle_scale_factor", "2"),
        ("intermediate_size", 0),
    ],
)
def test_hostile_vision_config(single: Path, field: str, value: object) -> None:
    edit_config(single, lambda config: config["vision_config"].update({field: value}))
    refused(single, "config.json", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vision_config", [1]),
        ("vision_config", "x"),
        ("vision_max_num_patches", -1),
        ("vision_max_num_patches", "many"),
        ("vision_max_num_patches", 3),
        ("vision_min_num_patches", 0),
        ("vision_min_num_patches", 300),
        ("hidden_size", None),
        ("text_config", 3),
        ("architectures", 3),
    ],
)
def test_hostile_top_of_the_config(single: Path, field: str, value: object) -> None:
    edit_config(single, lambda config: config.update({field: value}))
    if field == "architectures":  # the model type alone decides
        load_encoder(single, "float32")
    else:
        refused(single, "config")


def test_code_in_the_folder_is_never_run(single: Path) -> None:
    """CVE-2025-66448 and its like: names of code in the configuration are data."""
    trap = single / "trap"
    for name in ("modeling_isaac.py", "configuration_isaac.py", "__init__.py"):
        (single / name).write_text(f"open({str(trap)!r}, 'w')\n")
    edit_config(
        single,
        lambda config: config.update(
            auto_map={"AutoConfig": "configuration_isaac.Config", "AutoModel": "modeling_isaac.Model"},
            trust_remote_code=True,
        ),
    )
    load_encoder(single, "float32")
    assert not trap.exists()
