"""Towers in 8 bits: exact arithmetic, bits that depend on nothing else, and the right neighbourhood of float32."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from encoder_service.checkpoints import load_encoder
from encoder_service.device import Patches, embed
from encoder_service.towers.base import Budget
from encoder_service.towers.int8 import BLOCK_ROWS, Int8Linear, quantised, to_int8
from encoder_service.utilisation import measure_work
from shared.config import EncoderSettings, ImageSettings
from shared.images import decode
from tests.encoder_service.test_replay_families import batch
from tests.encoder_service.test_replay_families import tower as family_tower
from tools.demo.pictures import draw

MODELS = Path(__file__).parents[2] / "models"
DEMO = MODELS / "demo"


def demo_pictures(dtype: str, demo: Path = DEMO, held_out: int = 0) -> list[Patches]:
    """The samples and as many of the pictures that no training saw."""
    preprocess = load_encoder(demo, "float32").preprocess
    pixels = [decode(path.read_bytes(), ImageSettings()) for path in sorted((DEMO / "samples").glob("*.png"))]
    assert len(pixels) > 3
    pixels += [np.array(draw(seed, "held-out")[0]) for seed in range(held_out)]
    made = (preprocess.patches(torch.from_numpy(picture)) for picture in pixels)
    return [Patches(values.to(getattr(torch, dtype)), grid) for values, grid in made]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 8, 8), (3, 17, 5), (BLOCK_ROWS + 1, 96, 40)])
def test_the_product_is_the_definition(rows: int, width: int, out: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(width, out, bias=bias).requires_grad_(False)
    x = torch.randn(rows, width) * torch.logspace(-6, 3, rows)[:, None]
    steps, scale = quantised(x)
    assert steps.abs().amax(1).eq(127).all()
    weight, weight_scale = quantised(linear.weight)
    exact = (steps.double() @ weight.double().T) * scale.double() * weight_scale.double().T
    if bias:
        exact += linear.bias.double()
    torch.testing.assert_close(Int8Linear(linear)(x).double(), exact, rtol=1e-5, atol=1e-6)


def test_zeros_and_damage_stay_in_their_rows() -> None:
    """V1: a padding row of NaN or infinity does not reach its neighbours."""
    torch.manual_seed(0)
    layer = Int8Linear(nn.Linear(32, 16).requires_grad_(False))
    x = torch.randn(6, 32)
    clean = layer(x)
    x[1], x[3], x[5] = float("nan"), float("inf"), 0
    out = layer(x)
    assert torch.equal(out[[0, 2, 4]], clean[[0, 2, 4]])
    assert torch.equal(out[5], layer.bias)


@pytest.mark.parametrize("name", ["demo", "demo-pixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_tower_keeps_its_embeddings(dtype: str, name: str) -> None:
    demo = MODELS / name
    exact, ours = load_encoder(demo, "float32").tower, load_encoder(demo, dtype, quantization="int8").tower
    wanted = embed(exact, demo_pictures("float32", demo, 8)).embeddings
    found = embed(ours, demo_pictures(dtype, demo, 8)).embeddings
    cosines = torch.cat([F.cosine_similarity(a, b.float()) for a, b in zip(wanted, found, strict=True)])
    assert found[0].dtype == getattr(torch, dtype)
    assert cosines.min() >= 0.999, (cosines.min(), cosines.mean())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_alone_and_in_company(dtype: str) -> None:
    tower, pictures = load_encoder(DEMO, dtype, quantization="int8").tower, demo_pictures(dtype)
    alone = [embed(tower, [picture]).embeddings[0] for picture in pictures]
    together = embed(tower, pictures[::-1]).embeddings[::-1]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_an_int8_tower_has_names_of_its_own() -> None:
    """C12: embeddings of another arithmetic are never taken for these."""
    prints = {load_encoder(DEMO, "bfloat16", quantization=q).fingerprints.tower for q in ("none", "int8", "int8")}
    assert len(prints) == 2


def test_its_memory_and_its_work_are_counted() -> None:
    plain, eight = load_encoder(DEMO, "bfloat16").tower, load_encoder(DEMO, "bfloat16", quantization="int8").tower
    assert not any(isinstance(layer, nn.Linear) for layer in eight.blocks.modules())  # type: ignore[operator, union-attr]
    bytes_of = [sum(tensor.nbytes for tensor in tower.state_dict().values()) for tower in (plain, eight)]
    assert bytes_of[1] < 0.7 * bytes_of[0]
    picture = demo_pictures("bfloat16")[0]
    assert measure_work(eight, picture).per_patch == pytest.approx(measure_work(plain, picture).per_patch)


def test_int8_on_cuda_is_refused() -> None:
    with pytest.raises(ValueError, match="int8 runs on CPUs only"):
        EncoderSettings(quantization="int8", device="cuda:0")


@pytest.mark.parametrize("name", ["pixtral", "radio", "radio tiles"])
def test_every_family(name: str) -> None:
    made = family_tower(name)
    rng = random.Random(4)
    images = batch(name, rng, Budget(160, 10), made.patch_dim)
    wanted = torch.cat(embed(made, images).embeddings)
    outer = {name for name, _ in made.named_modules()} & made.outer_layers
    assert outer, "the names of the outer layers are wrong"
    to_int8(made)
    assert all(isinstance(made.get_submodule(name), nn.Linear) for name in outer)
    found = torch.cat(embed(made, images).embeddings)
    assert F.cosine_similarity(wanted, found).min() > 0.99
    assert not torch.equal(wanted, found)
