"""Our RADIO tower against vLLM's and transformers', with the weights of one checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from encoder_service.checkpoints import load_encoder
from encoder_service.preprocess.radio import tubelets
from encoder_service.towers.base import Budget
from encoder_service.towers.radio import RadioOutput, RadioTower
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches, relative_error
from tests.encoder_service.oracle import vllm_context
from tests.encoder_service.oracle_radio import pixels_of, transformers_radio, vllm_packed, vllm_radio
from tools.checkpoints.radio import Kind, Shape, write_radio

#: extremes, squares, the learned table's own size (16x16), the training pictures' (8x8), smaller, larger, odd ratios
GRIDS = [
    Grid(*sides)
    for sides in (
        (1, 1),
        (1, 64),
        (64, 1),
        (16, 16),
        (8, 8),
        (2, 2),
        (3, 20),
        (20, 3),
        (7, 16),
        (16, 5),
        (24, 24),
        (13, 11),
        (30, 18),
        (5, 9),
    )
]
FLOAT32, BFLOAT16 = 1e-5, 2e-2
#: prefixes of 5, 8, 16 and 32 tokens, and what else differs between published towers
SHAPES = {
    "plain": Shape(),
    "no qkv bias": Shape(qkv_bias=False, registers=2),
    "qk norm": Shape(qk_norm=True, registers=13),
    "scales": Shape(scales=True, registers=29),
    "uncropped": Shape(table=64),
}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with vllm_context(tmp_path_factory.mktemp("group")):
        yield


def tower_of(checkpoint: Path, dtype: str = "float32") -> RadioTower:
    tower = load_encoder(checkpoint, dtype).tower  # type: ignore[arg-type]
    assert isinstance(tower, RadioTower)
    return tower


@torch.inference_mode()
def encode(tower: RadioTower, patches: list[torch.Tensor], grids: list[Grid]) -> list[RadioOutput]:
    out = tower.encode(torch.cat(patches).to(tower.position_table.dtype), tower.plan(grids))
    features = out.features.split([grid.patches for grid in grids])
    return [RadioOutput(*pair) for pair in zip(features, out.summary, strict=True)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_features_equal_vllm(context: None, tmp_path: Path, shape: Shape) -> None:
    """V13, V6: any prefix; alone and packed with neighbours of other sizes."""
    checkpoint = write_radio(tmp_path, "old", shape, seed=3)
    oracle = vllm_radio(checkpoint)
    patches = [random_patches(grid, 192) for grid in GRIDS]
    packed = vllm_packed(oracle, patches, GRIDS)
    for dtype, bound in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        tower = tower_of(checkpoint, dtype)
        ours = encode(tower, patches, GRIDS)
        errors = [relative_error(mine.features, theirs) for mine, theirs in zip(ours, packed, strict=True)]
        assert max(errors) <= bound, (dtype, dict(zip(GRIDS, errors, strict=True)))
        for grid, values, reference in zip(GRIDS, patches, packed, strict=True):
            (alone,) = encode(tower, [values], [grid])
            assert alone.features.shape == (grid.patches, 64)
            assert relative_error(alone.features, reference) <= bound, (dtype, grid)


def test_summary_equals_vllm_and_the_oracle_alone(context: None, tmp_path: Path) -> None:
    checkpoint = write_radio(tmp_path, "old", seed=4)
    oracle = vllm_radio(checkpoint)
    patches = [random_patches(grid, 192) for grid in GRIDS]
    ours = encode(tower_of(checkpoint), patches, GRIDS)
    for grid, values, mine in zip(GRIDS, patches, ours, strict=True):
        with torch.inference_mode():
            summary, features = oracle(pixels_of(values, grid, 8)[None])
        assert mine.summary.shape == summary[0].shape == (2 * 64,)
        assert relative_error(mine.summary, summary[0]) <= FLOAT32
        assert relative_error(mine.features, features[0]) <= FLOAT32


@pytest.mark.parametrize("shape", [Shape(), Shape(scales=True, qkv_bias=False, registers=13)], ids=["plain", "scales"])
@torch.inference_mode()
def test_features_and_summary_equal_transformers(tmp_path: Path, shape: Shape) -> None:
    checkpoint = write_radio(tmp_path, "native", shape, seed=5)
    oracle = transformers_radio(checkpoint)
    patches = [random_patches(grid, 192) for grid in GRIDS]
    packed = oracle(torch.cat(patches), image_grid_hw=torch.tensor(GRIDS))
    summaries = packed.summary
    for dtype, bound in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        ours = encode(tower_of(checkpoint, dtype), patches, GRIDS)
        features = packed.features.split([grid.patches for grid in GRIDS])
        for place, (grid, mine) in enumerate(zip(GRIDS, ours, strict=True)):
            assert relative_error(mine.features, features[place]) <= bound, (dtype, grid)
            assert relative_error(mine.summary, summaries[place]) <= bound, (dtype, grid)
    for grid, values, mine in zip(GRIDS, patches, encode(tower_of(checkpoint), patches, GRIDS), strict=True):
        alone = oracle(pixels_of(values, grid, 8)[None])
        assert relative_error(mine.features, alone.features[0]) <= FLOAT32
        assert relative_error(mine.summary, alone.summary[0]) <= FLOAT32


@torch.inference_mode()
def test_layouts_of_one_tower_agree(tmp_path: Path) -> None:
    """All spellings hold the same weights; the old file is also loaded by transformers itself."""
    shape = Shape(scales=True)
    towers = {kind: tower_of(write_radio(tmp_path / kind, kind, shape)) for kind in ("old", "native", "native-long")}
    for name, parameter in towers["old"].state_dict().items():
        for other in towers.values():
            assert torch.equal(parameter, other.state_dict()[name]), name


@pytest.mark.parametrize("frames", [2, 4])
@pytest.mark.parametrize("kind", ["old", "native"])
@torch.inference_mode()
def test_nine_frames_of_video_equal_the_oracles(context: None, tmp_path: Path, kind: Kind, frames: int) -> None:
    """The last frame is repeated; each tubelet is a sequence of its own."""
    checkpoint = write_radio(tmp_path, kind, Shape(frames=frames), seed=6)
    grid = Grid(8, 12)
    patches = torch.stack([random_patches(grid, 192, seed) for seed in range(9)])
    count = -(-9 // frames)
    video = tubelets(patches, frames)
    assert video.shape == (count, 96, frames * 192)
    pictures = torch.stack([pixels_of(one, grid, 8) for one in patches])
    if kind == "old":
        summary, features = vllm_radio(checkpoint)(pictures, num_frames=9)
    else:
        padded = torch.cat([pictures, pictures[-1:].expand(-9 % frames, -1, -1, -1)])
        out = transformers_radio(checkpoint)(padded.view(count, 3 * frames, 64, 96))
        summary, features = out.summary, out.features
    for dtype, bound in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        tower = tower_of(checkpoint, dtype)
        ours = tower.encode(video.flatten(0, 1).to(getattr(torch, dtype)), tower.plan([grid] * count))
        assert relative_error(ours.features, features.flatten(0, 1)) <= bound, dtype
        assert relative_error(ours.summary, summary) <= bound, dtype


def test_padding_never_changes_a_real_row(tmp_path: Path) -> None:
    tower = tower_of(write_radio(tmp_path, "old", seed=7))
    patches = [random_patches(grid, 192) for grid in GRIDS]
    used = sum(grid.patches for grid in GRIDS)
    budget = Budget(used + 37, len(GRIDS) + 3)
    garbage = torch.full((37, 192), 1e30)
    with torch.inference_mode():
        plan = tower.plan(GRIDS, budget)
        padded = tower.encode(torch.cat([*patches, garbage]), plan)
        exact = tower.encode(torch.cat(patches), tower.plan(GRIDS))
    assert plan.cu_seqlens.shape == (len(GRIDS) + 4,)
    assert plan.max_seqlen == len(plan.extras["rows"]) == used + 37 + (len(GRIDS) + 3) * 8
    assert relative_error(padded.features[:used], exact.features) <= 1e-6
    assert relative_error(padded.summary[: len(GRIDS)], exact.summary) <= 1e-6
    shapes = {name: array.shape for name, array in plan.extras.items()}
    smaller = tower.plan(GRIDS[:2], budget)
    assert {name: array.shape for name, array in smaller.extras.items()} == shapes


def test_the_first_row_is_the_top_left_patch(tmp_path: Path) -> None:
    """V13: a change of one patch changes its own row most, wherever the prefix ends."""
    for registers in (2, 5, 13, 29):
        tower = tower_of(write_radio(tmp_path / str(registers), "old", Shape(registers=registers)))
        grid, base = Grid(4, 6), random_patches(Grid(4, 6), 192)
        plain = encode(tower, [base], [grid])[0].features
        for place in (0, 1, 6, 23):
            bright = base.clone()
            bright[place] = 2
            change = (encode(tower, [bright], [grid])[0].features - plain).norm(dim=1)
            assert int(change.argmax()) == place
