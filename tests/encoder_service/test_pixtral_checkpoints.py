"""Loading Pixtral towers: only what is wanted, or one sentence that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder_service.checkpoints import load_encoder
from encoder_service.preprocess.pixtral import PixtralPreprocess
from shared.errors import CheckpointError
from shared.families import context_length, family_of, read_config
from tests.encoder_service.damage import all_tensors, refused
from tools.checkpoints.pixtral import KINDS, LONGEST, PATCH, Kind, write_pixtral

TOWER_PARTS = ("vision_", "multi_modal_projector.", "patch_merger.", "pre_mm_projector_norm.")


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True])
def test_only_the_tower_is_read(tmp_path: Path, kind: Kind, sharded: bool) -> None:
    encoder = load_encoder(write_pixtral(tmp_path, kind, sharded=sharded, new_names=sharded), "float32")
    read = {name for names in encoder.read.values() for name in names}
    stored = {name for name in all_tensors(tmp_path) if name.removeprefix("model.").startswith(TOWER_PARTS)}
    assert read == stored
    assert isinstance(encoder.preprocess, PixtralPreprocess)
    assert encoder.preprocess.resize == ("sharp" if kind.startswith("native") else "smooth-bicubic")
    assert vars(encoder.preprocess.rule)["longest"] == LONGEST


def test_shards_of_a_native_checkpoint_need_no_index(tmp_path: Path) -> None:
    write_pixtral(tmp_path, "native", sharded=True)
    (tmp_path / "consolidated.safetensors.index.json").unlink()
    load_encoder(tmp_path, "float32")


def test_a_folder_with_both_layouts_is_read_as_hugging_faces(tmp_path: Path) -> None:
    """As published: Mistral-Small-3.1 comes with both. Without Hugging Face's weights or tokenizer, as Mistral's."""
    write_pixtral(tmp_path, "native-merger", seed=1)
    write_pixtral(tmp_path, "mistral3", seed=2)
    assert family_of(read_config(tmp_path)).name == "mistral3"
    assert set(load_encoder(tmp_path, "float32").read) == {"model.safetensors"}
    (tmp_path / "tokenizer.json").rename(tmp_path / "kept.json")
    assert family_of(read_config(tmp_path)).name == "pixtral"
    (tmp_path / "kept.json").rename(tmp_path / "tokenizer.json")
    (tmp_path / "model.safetensors").unlink()
    assert family_of(read_config(tmp_path)).name == "pixtral"
    assert set(load_encoder(tmp_path, "float32").read) == {"consolidated.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_missing_misshapen_and_superfluous_tensors(tmp_path: Path, kind: Kind) -> None:
    write_pixtral(tmp_path, kind)
    native = kind.startswith("native")
    file = tmp_path / ("consolidated.safetensors" if native else "model.safetensors")
    prefix = "vision_encoder" if native else "vision_tower"
    name = f"{prefix}.transformer.layers.1.attention.{'wk' if native else 'k_proj'}.weight"
    whole = load_file(file)
    save_file({n: t for n, t in whole.items() if n != name}, file)
    refused(tmp_path, name)
    save_file({**whole, name: torch.zeros(64, 63)}, file)
    refused(tmp_path, file.name, name, "[64, 63]", "[64, 64]")
    save_file({**whole, f"{prefix}.extra.weight": torch.zeros(1)}, file)
    refused(tmp_path, file.name, f"{prefix}.extra.weight", "no place")
    save_file({**whole, f"{prefix}.transformer.layers.3.ffn_norm.weight": torch.zeros(64)}, file)
    refused(tmp_path, f"{prefix}.transformer.layers.3.ffn_norm.weight", "no place")
    save_file({n: t for n, t in whole.items() if not n.startswith(TOWER_PARTS)}, file)
    refused(tmp_path, "no tensor of the tower", prefix)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["vision_encoder"].update(hidden_size=66), "hidden_size 66"),
        (lambda p: p["vision_encoder"].update(hidden_size="64"), "hidden_size"),
        (lambda p: p["vision_encoder"].pop("num_hidden_layers"), "num_hidden_layers"),
        (lambda p: p["vision_encoder"].update(num_hidden_layers=10**9), "num_hidden_layers"),
        (lambda p: p["vision_encoder"].update(patch_size=0), "patch_size"),
        (lambda p: p["vision_encoder"].update(image_size=None), "image_size"),
        (lambda p: p["vision_encoder"].update(num_channels=4), "num_channels"),
        (lambda p: p["vision_encoder"].update(rope_theta=0), "rope_theta"),
        (lambda p: p["vision_encoder"].update(adapter_bias="yes"), "adapter_bias"),
        (lambda p: p["vision_encoder"].update(spatial_merge_size=2), "mm_projector_id"),
        (lambda p: p.pop("dim"), "dim"),
    ],
)
def test_hostile_params(tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    edit_json(write_pixtral(tmp_path, "native") / "params.json", change)
    refused(tmp_path, "params.json", words)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", lambda c: c.update(model_type="other", architectures=3), "no family"),
        ("config.json", lambda c: c.update(model_type=["x"], architectures=[{}]), "no family"),
        ("config.json", lambda c: c.update(vision_feature_layer=9), "vision_feature_layer"),
        ("config.json", lambda c: c.update(vision_feature_layer=[]), "vision_feature_layer"),
        ("config.json", lambda c: c.update(vision_feature_layer=[-1, -2]), "vision_feature_layer"),
        ("config.json", lambda c: c.update(projector_hidden_act="softsign"), "projector_hidden_act"),
        ("config.json", lambda c: c.update(spatial_merge_size=-1), "spatial_merge_size"),
        ("config.json", lambda c: c.update(text_config=[]), "text_config"),
        ("config.json", lambda c: c.update(vision_config=7), "vision_config"),
        ("config.json", lambda c: c["vision_config"].update(hidden_act=3), "hidden_act"),
        ("preprocessor_config.json", lambda c: c.update(resample=1), "resample"),
        ("preprocessor_config.json", lambda c: c.update(resample=[3]), "resample"),
        ("preprocessor_config.json", lambda c: c.update(rescale_factor=1.0), "rescale_factor"),
        ("preprocessor_config.json", lambda c: c.update(do_normalize=False), "do_normalize"),
        ("preprocessor_config.json", lambda c: c.update(image_std=[0, 1, 1]), "image_std"),
        ("preprocessor_config.json", lambda c: c.update(image_mean="grey"), "image_mean"),
        ("preprocessor_config.json", lambda c: c.update(size={"longest_edge": "big"}), "image_size"),
    ],
)
def test_hostile_configs(tmp_path: Path, file: str, change: Callable[[dict[str, Any]], object], words: str) -> None:
    edit_json(write_pixtral(tmp_path, "mistral3") / file, change)
    refused(tmp_path, words)


def test_a_llava_of_another_tower_is_no_family_of_ours(tmp_path: Path) -> None:
    write_pixtral(tmp_path, "llava")
    edit_json(tmp_path / "config.json", lambda c: c["vision_config"].update(model_type="clip_vision_model"))
    refused(tmp_path, "no family", "llava")


def test_native_text_models_are_no_family_of_ours(tmp_path: Path) -> None:
    write_pixtral(tmp_path, "native")
    edit_json(tmp_path / "params.json", lambda p: p.pop("vision_encoder"))
    refused(tmp_path, "no family", "mistral")


def test_sizes_that_published_configs_leave_out(tmp_path: Path) -> None:
    """mistral-community/pixtral-12b gives few of the tower's sizes: the rest are transformers' defaults."""
    write_pixtral(tmp_path, "llava")
    small = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    edit_json(tmp_path / "config.json", lambda c: [c["vision_config"].pop(name) for name in small])
    refused(tmp_path, "[1024, 3, 8, 8]")


@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_the_family(tmp_path: Path, kind: Kind) -> None:
    config = read_config(write_pixtral(tmp_path, kind))
    merge = 2 if kind in ("native-merger", "mistral3") else 1
    assert family_of(config).max_tokens(config) == (LONGEST // PATCH // merge) ** 2
    assert context_length(tmp_path) == 4096


def test_a_native_checkpoint_without_a_context_has_vllms(tmp_path: Path) -> None:
    edit_json(write_pixtral(tmp_path, "native") / "params.json", lambda p: p.pop("max_position_embeddings"))
    assert context_length(tmp_path) == 128_000


def test_damaged_params(tmp_path: Path) -> None:
    (write_pixtral(tmp_path, "native") / "params.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"params\.json"):
        read_config(tmp_path)
