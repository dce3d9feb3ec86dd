"""RADIO checkpoint folders: every layout loads completely, or one sentence says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.checkpoints import load_encoder
from encoder_service.preprocess.radio import RadioPreprocess
from encoder_service.towers.radio import RadioTower
from shared.families import family_of, read_config
from shared.sizing_radio import DynamicRule, FixedRule, NearestRule, TileRule
from tests.encoder_service.damage import all_tensors, edit_config, edit_tensors, refused
from tools.checkpoints.radio import KINDS, Kind, Shape, write_radio

MARKS: dict[Kind, str] = {
    "old": "radio_model.model.blocks.1.mlp.fc1.weight",
    "native": "encoder.layer.1.attention.k_proj.bias",
    "native-long": "encoder.layer.1.attention.attention.value.weight",
    "llama": "vision_model.radio_model.model.patch_generator.pos_embed",
    "nano": "mlp1.3.weight",
}
NEVER_READ = ("summary_idxs", "language_model")


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_read_but_what_is_not_the_towers(tmp_path: Path, kind: Kind) -> None:
    shape = Shape(scales=True, frames=2)
    loaded = load_encoder(write_radio(tmp_path, kind, shape), "float32")
    read = {name for names in loaded.read.values() for name in names}
    assert read == {name for name in all_tensors(tmp_path) if not any(word in name for word in NEVER_READ)}
    assert isinstance(loaded.tower, RadioTower)
    config = loaded.tower.config
    assert (config.class_tokens, config.registers, config.summary) == (3, 5, (0, 1))
    assert not any(parameter.is_meta for parameter in loaded.tower.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_tensor_is_named(tmp_path: Path, kind: Kind) -> None:
    write_radio(tmp_path, kind)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(MARKS[kind]))
    refused(tmp_path, MARKS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_a_place_is_named_with_its_file(tmp_path: Path, kind: Kind) -> None:
    write_radio(tmp_path, kind)
    stray = MARKS[kind].replace("weight", "stray").replace("bias", "stray").replace("pos_embed", "stray")
    edit_tensors(tmp_path, lambda tensors: tensors.update({stray: torch.zeros(3)}))
    refused(tmp_path, stray, "model.safetensors", "no place")


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_shape_is_named_with_its_file(tmp_path: Path, kind: Kind) -> None:
    write_radio(tmp_path, kind)
    edit_tensors(tmp_path, lambda tensors: tensors.update({MARKS[kind]: torch.zeros(3, 7)}))
    refused(tmp_path, MARKS[kind], "model.safetensors", "[3, 7]")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_matches(tmp_path: Path, kind: Kind) -> None:
    """Never random weights."""
    write_radio(tmp_path, kind)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        held = dict(tensors)
        tensors.clear()
        tensors.update({f"other.{name}": tensor for name, tensor in held.items()})

    edit_tensors(tmp_path, rename)
    refused(tmp_path, "no tensor of the tower", str(tmp_path))


def test_names_of_an_unknown_spelling(tmp_path: Path) -> None:
    write_radio(tmp_path, "native")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        held = dict(tensors)
        tensors.clear()
        tensors.update({name.replace("q_proj", "qq"): tensor for name, tensor in held.items()})

    edit_tensors(tmp_path, rename)
    refused(tmp_path, "model.safetensors", "no place")


def test_layer_scales_that_are_left_out_are_one(tmp_path: Path) -> None:
    tower = load_encoder(write_radio(tmp_path, "native"), "float32").tower
    assert torch.equal(tower.get_parameter("blocks.1.scale2"), torch.ones(64))


def test_layer_scales_under_their_longer_name(tmp_path: Path) -> None:
    write_radio(tmp_path, "old", Shape(scales=True))
    name = "radio_model.model.blocks.0.ls1"
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{name}.gamma": tensors.pop(name)}))
    stored = all_tensors(tmp_path)[f"{name}.gamma"]
    assert torch.equal(load_encoder(tmp_path, "float32").tower.get_parameter("blocks.0.scale1"), stored)


def test_published_sizes_are_found_by_name(tmp_path: Path) -> None:
    """The old configuration gives no sizes; this one is then wrong for the small file, which says so."""
    write_radio(tmp_path, "old")
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    edit_config(tmp_path, lambda config: [config.pop(name) for name in sizes])
    refused(tmp_path, "pos_embed", "[1, 256, 64]", "[1, 256, 384]")
    edit_config(tmp_path, lambda config: config["args"].update(model="vit_unknown"))
    refused(tmp_path, "args.model", "vit_unknown", "vit_huge_patch16_224")


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("native", "hidden_size", -1),
        ("native", "num_attention_heads", 3),
        ("native", "mlp_ratio", "4"),
        ("native", "use_swiglu_ffn", True),
        ("native", "summary_idxs", [7]),
        ("native", "summary_idxs", "01"),
        ("native", "hidden_act", "__import__('os')"),
        ("native", "patch_size", 0),
        ("native", "max_img_size", 1 << 40),
        ("native", "num_registers", -1),
        ("native", "video_temporal_patch_size", "2"),
        ("old", "args", [1]),
        ("old", "preferred_resolution", 7),
        ("llama", "downsample_ratio", 0.3),
        ("llama", "vit_hidden_size", 65),
        ("llama", "projector_hidden_size", None),
        ("nano", "force_image_size", 100),
        ("nano", "norm_mean", [0.5, 0.5]),
        ("nano", "vision_config", 3),
    ],
)
def test_hostile_config(tmp_path: Path, kind: Kind, field: str, value: object) -> None:
    write_radio(tmp_path, kind)
    edit_config(tmp_path, lambda config: config.update({field: value}))
    refused(tmp_path, "config.json", field)


@pytest.mark.parametrize("teachers", [3, [1], [{"name": "a"}, {"name": "a"}, {"name": "b"}]])
def test_hostile_or_repeated_teachers(tmp_path: Path, teachers: object) -> None:
    write_radio(tmp_path, "old")
    edit_config(tmp_path, lambda config: config["args"].update(teachers=teachers))
    refused(tmp_path, "config.json", "teachers" if not isinstance(teachers, list) or teachers == [1] else "summary")


@pytest.mark.parametrize(
    ("kind", "shape", "rule", "resize"),
    [
        ("old", Shape(), NearestRule(8, 1, 128), "bilinear"),
        ("native", Shape(), NearestRule(8, 1, 128), "bilinear"),
        ("llama", Shape(), TileRule(8, 2, 8, 12, "last", "area"), "pillow"),
        ("nano", Shape(), TileRule(8, 2, 8, 12, "last", "ratio"), "bicubic"),
        ("nano", Shape(bounds=(4, 100)), DynamicRule(8, 2, 4, 100), "bicubic"),
        ("nano", Shape(bounds=(4, 0)), DynamicRule(8, 2, 4, 4 * 4096), "bicubic"),
    ],
)
def test_each_layout_has_its_preprocessing(tmp_path: Path, kind: Kind, shape: Shape, rule: Any, resize: str) -> None:
    preprocess = load_encoder(write_radio(tmp_path, kind, shape), "float32").preprocess
    assert isinstance(preprocess, RadioPreprocess)
    assert (preprocess.rule, preprocess.resize) == (rule, resize)
    config = read_config(tmp_path)
    family = family_of(config)
    assert max(rule.tokens(*size) for size in ((9000, 9000), (9000, 40))) <= family.max_tokens(config)


@pytest.mark.parametrize("kind", ["old", "llama"])
def test_the_input_conditioner_of_the_files_counts(tmp_path: Path, kind: Kind) -> None:
    """Other means than CLIP's would otherwise give wrong features in silence; rounded ones change nothing."""
    write_radio(tmp_path, kind)
    edit_config(tmp_path, lambda config: [config.pop(name, None) for name in ("norm_mean", "norm_std")])
    name = next(name for name in all_tensors(tmp_path) if name.endswith("conditioner.norm_mean"))
    plain = load_encoder(tmp_path, "float32")
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    assert load_encoder(tmp_path, "float32").preprocess == plain.preprocess
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.full((3, 1, 1), 0.5)}))
    other = load_encoder(tmp_path, "float32")
    assert isinstance(other.preprocess, RadioPreprocess)
    assert other.preprocess.mean == (0.5, 0.5, 0.5)
    assert other.fingerprints.preprocess != plain.fingerprints.preprocess
    edit_config(tmp_path, lambda config: config.update(norm_mean=[0.4, 0.5, 0.5]))
    refused(tmp_path, "config.json", name)


def test_an_image_processor_that_resizes_fixes_the_resolution(tmp_path: Path) -> None:
    """V18."""
    write_radio(tmp_path, "old")
    settings = '{"do_resize": true, "size": {"height": 48, "width": 64}, "resample": 3}'
    (tmp_path / "preprocessor_config.json").write_text(settings)
    assert load_encoder(tmp_path, "float32").preprocess.rule == FixedRule(8, 1, 6, 8)
    (tmp_path / "preprocessor_config.json").write_text(settings.replace("48", "50"))
    refused(tmp_path, "preprocessor_config.json", "50x64")
