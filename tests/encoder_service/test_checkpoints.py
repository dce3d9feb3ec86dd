"""Loading a tower from a checkpoint folder: only what is wanted, or one sentence that says what is wrong."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from encoder_service.checkpoints import load_encoder
from encoder_service.towers.isaac import IsaacTower
from tests.encoder_service.damage import FC1, INDEX, SINGLE, TOWER, all_tensors, edit_config, edit_tensors, refused
from tools.checkpoints.isaac import write_isaac


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_both_layouts_load_only_the_tower(tmp_path: Path, nested: bool, sharded: bool) -> None:
    encoder = load_encoder(write_isaac(tmp_path, nested=nested, sharded=sharded), "float32")
    stored = all_tensors(tmp_path)
    read = [name for names in encoder.read.values() for name in names]
    assert sorted(read) == sorted(name for name in stored if name.startswith(TOWER))
    for file, names in encoder.read.items():
        assert set(names) <= set(load_file(tmp_path / file))
    tower = encoder.tower
    assert isinstance(tower, IsaacTower)
    fused = torch.cat([stored[f"{TOWER}0.encoder.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(tower.get_parameter("blocks.1.attention.qkv.weight"), fused)
    assert torch.equal(tower.project_down.weight, stored[f"{TOWER}3.weight"])
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in tower.parameters())


def test_a_missing_language_shard_does_not_matter(copy: Path) -> None:
    """The proof that no language tensor is read."""
    (copy / "model-00001-of-00003.safetensors").unlink()
    load_encoder(copy, "float32")


def test_layouts_of_one_tower_agree_on_the_fingerprint(tmp_path: Path) -> None:
    prints = {
        load_encoder(
            write_isaac(tmp_path / f"{nested}{sharded}", nested=nested, sharded=sharded), "float32"
        ).fingerprints
        for nested in (True, False)
        for sharded in (True, False)
    }
    assert len(prints) == 1
    tower, preprocess = prints.pop()
    assert len(bytes.fromhex(tower)) == len(bytes.fromhex(preprocess)) == 32


def test_the_fingerprint_changes_with_what_changes_an_embedding(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: another dtype, one changed weight, another epsilon or arithmetic never meet the old entries."""
    base = load_encoder(single, "float32").fingerprints
    assert load_encoder(single, "float32").fingerprints == base
    prints = {base.tower, load_encoder(single, "bfloat16").fingerprints.tower}
    monkeypatch.setattr("encoder_service.checkpoints.NUMERICS_VERSION", 999)
    prints.add(load_encoder(single, "float32").fingerprints.tower)
    monkeypatch.undo()
    edit_config(single, lambda config: config["vision_config"].update(layer_norm_eps=1e-5))
    prints.add(load_encoder(single, "float32").fingerprints.tower)
    edit_tensors(single, lambda tensors: tensors[FC1][0, 0].add_(1e-3))
    prints.add(load_encoder(single, "float32").fingerprints.tower)
    assert len(prints) == 5


def test_language_settings_do_not_change_the_fingerprint_but_the_pixel_budget_does(single: Path) -> None:
    """C6 and its counterpart."""
    base = load_encoder(single, "float32").fingerprints
    edit_config(single, lambda config: config.update(num_hidden_layers=1, rope_theta=5.0, dtype="float16"))
    assert load_encoder(single, "float32").fingerprints == base
    edit_config(single, lambda config: config.update(vision_max_num_patches=128))
    changed = load_encoder(single, "float32").fingerprints
    assert (changed.tower == base.tower, changed.preprocess == base.preprocess) == (True, False)


def test_dtype_is_ours_whatever_the_file_holds(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    for dtype in ("float32", "bfloat16", "float16"):
        tower = load_encoder(single, dtype).tower  # type: ignore[arg-type]
        assert {parameter.dtype for parameter in tower.parameters()} == {getattr(torch, dtype)}


def test_sizes_that_the_config_leaves_out_are_siglip2_defaults(tmp_path: Path) -> None:
    write_isaac(tmp_path, sharded=False, position_side=16, patch_size=16)
    edit_config(
        tmp_path,
        lambda config: [
            config["vision_config"].pop(name)
            for name in ("num_patches", "layer_norm_eps", "hidden_act", "num_channels")
        ],
    )
    tower = load_encoder(tmp_path, "float32").tower
    assert isinstance(tower, IsaacTower)
    assert (tower.config.position_side, tower.config.norm_eps) == (16, 1e-6)
    assert tower.config.activation == "gelu_pytorch_tanh"


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "quick_gelu"])
def test_other_activations(single: Path, name: str) -> None:
    edit_config(single, lambda config: config["vision_config"].update(hidden_act=name))
    tower = load_encoder(single, "float32").tower
    assert isinstance(tower, IsaacTower)
    assert tower.config.activation == name


def test_missing_tensor(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.pop(FC1))
    refused(single, FC1, "single")


def test_wrong_shape_names_both(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({FC1: torch.zeros(128, 63)}))
    refused(single, FC1, SINGLE, "[128, 63]", "[128, 64]")


def test_integer_weights(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({FC1: torch.zeros(128, 64, dtype=torch.int8)}))
    refused(single, FC1, SINGLE, "I8")


def test_more_layers_in_the_file_than_in_the_config(single: Path) -> None:
    edit_config(single, lambda config: config["vision_config"].update(num_hidden_layers=1))
    refused(single, "encoder.layers.1", "no place")


def test_nothing_matches(single: Path) -> None:
    """Never random weights."""
    edit_tensors(single, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(TOWER)])
    refused(single, "no tensor of the tower", "model.vision_embedding.")


def test_unknown_family(single: Path) -> None:
    edit_config(single, lambda config: config.update(model_type="other", architectures=["OtherModel"]))
    refused(single, "other", "isaac")


def test_no_weights_or_only_a_pickle(single: Path) -> None:
    (single / SINGLE).rename(single / "pytorch_model.bin")
    refused(single, SINGLE, "only safetensors")


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -1000])
def test_cut_short(single: Path, keep: int) -> None:
    whole = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(whole[:keep])
    refused(single, SINGLE)


def test_missing_shard(copy: Path) -> None:
    (copy / "model-00003-of-00003.safetensors").unlink()
    refused(copy, "model-00003-of-00003.safetensors")


def test_index_that_names_the_wrong_shard(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"][FC1] = "model-00001-of-00003.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    refused(copy, FC1, "model-00001-of-00003.safetensors")


def test_loading_allocates_the_tower_once(tmp_path: Path) -> None:
    """Straight into place: no parameter is made first on the host and then copied."""
    write_isaac(tmp_path, sharded=False, vision_hidden=256, vision_intermediate=1024, hidden=64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        tower = load_encoder(tmp_path, "float32").tower
    held = list(accumulate(event.self_cpu_memory_usage for event in profile.events() if event.name == "[memory]"))
    sizes = [parameter.nbytes for parameter in tower.parameters()]
    assert sum(sizes) <= max(held) <= 1.1 * (sum(sizes) + max(sizes))
