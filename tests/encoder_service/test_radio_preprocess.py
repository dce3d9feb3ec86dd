"""RADIO preprocessing against the reference processors: token counts exactly, patches within one grey level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import CLIPImageProcessor
from vllm.transformers_utils.processors.internvl import calculate_internvl_targets, get_internvl_target_ratios
from vllm.transformers_utils.processors.nano_nemotron_vl import DynamicResolutionImageTiler, dynamic_preprocess
from vllm.transformers_utils.processors.nemotron_vl import (
    LlamaNemotronNanoVLImageProcessor,
    calculate_nemotron_vl_targets,
    get_nemotron_vl_target_ratios,
)

from encoder_service.preprocess.base import CLIP_MEAN, CLIP_STD
from encoder_service.preprocess.radio import RadioPreprocess, tubelets
from shared.sizing import Grid, SizeRule
from shared.sizing_radio import DynamicRule, FixedRule, NearestRule, TileRule
from tests.encoder_service.test_preprocess import picture

SIZES = [
    (1, 1), (2, 3), (1, 300), (300, 1), (15, 17), (48, 320), (320, 48), (64, 64), (200, 130), (130, 200), (640, 480),
    (333, 777), (511, 513),
]  # fmt: skip
MEAN, STD = torch.tensor(CLIP_MEAN).view(3, 1, 1), torch.tensor(CLIP_STD).view(3, 1, 1)
#: of one channel, normalised; a little more for rounding
ONE_GREY_LEVEL = 1.001 / 255 / min(CLIP_STD)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """The reference compiles its resize, which takes longer than all tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def cut(pictures: torch.Tensor, side: int) -> torch.Tensor:
    """``[n, 3, height, width]`` → ``[n · patches, 3 · side²]``, each (channel, row, column)."""
    count, _, height, width = pictures.shape
    cells = pictures.view(count, 3, height // side, side, width // side, side)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(-1, 3 * side * side)


def ours(preprocess: RadioPreprocess, width: int, height: int) -> torch.Tensor:
    patches, grid = preprocess.patches(torch.from_numpy(picture(width, height)))
    assert grid == preprocess.rule.grid(width, height)
    assert patches.dtype == torch.float32
    assert preprocess.rule.tokens(width, height) == len(patches) // preprocess.rule.merge**2
    return patches


def compare(mine: torch.Tensor, theirs: torch.Tensor, bound: float = ONE_GREY_LEVEL) -> None:
    assert mine.shape == theirs.shape
    assert (mine - theirs).abs().max() <= bound


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_llama_tiles_equal_the_reference(width: int, height: int) -> None:
    preprocess = RadioPreprocess(TileRule(patch_size=8, tile=8), "pillow")
    processor = LlamaNemotronNanoVLImageProcessor(64, 1, 12, True, True)
    (tiles,) = processor._images_to_pixel_values_lst([Image.fromarray(picture(width, height))], 1, 12, True)
    # its tower normalises; that is part of preprocessing here
    compare(ours(preprocess, width, height), cut((tiles - MEAN) / STD, 8), 1e-5)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nano_tiles_equal_the_reference(width: int, height: int) -> None:
    preprocess = RadioPreprocess(TileRule(patch_size=8, tile=8, choice="ratio"), "bicubic")
    tiles = dynamic_preprocess(
        Image.fromarray(picture(width, height)), image_size=64, norm_mean=MEAN[None], norm_std=STD[None]
    )
    compare(ours(preprocess, width, height), cut(tiles, 8), 1e-4)


def tiler(rule: DynamicRule) -> DynamicResolutionImageTiler:
    return DynamicResolutionImageTiler(
        max_model_len=1 << 20,
        patch_size=rule.patch_size,
        min_num_patches=rule.min_patches,
        max_num_patches=rule.max_patches,
        downsample_ratio=0.5,  # type: ignore[arg-type]
        norm_mean=CLIP_MEAN,
        norm_std=CLIP_STD,
    )


@pytest.mark.parametrize("rule", [DynamicRule(8, 2, 16, 600), DynamicRule(16, 2, 256, 1024)], ids=["small", "large"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_dynamic_resolution_equals_the_reference(rule: DynamicRule, width: int, height: int) -> None:
    image = Image.fromarray(picture(width, height))
    (theirs,), (tokens,) = tiler(rule)._images_to_pixel_values_lst(0, [image])
    assert rule.tokens(width, height) == tokens
    compare(ours(RadioPreprocess(rule, "bicubic"), width, height), cut(theirs[None], rule.patch_size), 1e-4)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_fixed_resolution_equals_the_clip_processor(width: int, height: int) -> None:
    preprocess = RadioPreprocess(FixedRule(patch_size=8, rows=6, columns=10), "bicubic-8bit")
    size = {"height": 48, "width": 80}
    processor = CLIPImageProcessor(do_resize=True, size=size, do_center_crop=False)
    image = Image.fromarray(picture(width, height))
    theirs = processor(images=image, return_tensors="pt")["pixel_values"]
    compare(ours(preprocess, width, height), cut(theirs, 8))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nearest_resolution_follows_the_published_recipe(width: int, height: int) -> None:
    """Values in [0, 1], bilinear to the nearest size in whole patches."""
    rule = NearestRule(patch_size=8, max_side=512)
    grid = rule.grid(width, height)
    assert max(grid) <= 64
    if max(width, height) <= 512:
        assert grid == (max(round(height / 8), 1), max(round(width / 8), 1))
    pixels = torch.from_numpy(picture(width, height)).permute(2, 0, 1)[None].float().div(255)
    size = (grid.height * 8, grid.width * 8)
    theirs = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
    compare(ours(RadioPreprocess(rule), width, height), cut((theirs - MEAN) / STD, 8), 1e-4)


@pytest.mark.parametrize("size", [512, 64])
def test_tile_counts_equal_the_references_for_many_sizes(size: int) -> None:
    area, ratio = TileRule(tile=size // 16), TileRule(tile=size // 16, choice="ratio")
    per_tile = (size // 32) ** 2
    candidates: dict[str, Any] = {
        "area": get_nemotron_vl_target_ratios(1, 12),
        "ratio": get_internvl_target_ratios(1, 12),
    }
    for width in (*range(1, 140, 3), 255, 256, 500, 512, 1000, 1024, 1536, 2048, 3333, 5000):
        for height in (1, 7, 64, 100, 256, 511, 512, 768, 1024, 2000, 3072, 4100):
            common = {"orig_width": width, "orig_height": height, "image_size": size, "use_thumbnail": True}
            blocks, _, _ = calculate_nemotron_vl_targets(target_ratios=candidates["area"], **common)
            assert area.tokens(width, height) == blocks * per_tile, (width, height)
            blocks, _, _ = calculate_internvl_targets(target_ratios=candidates["ratio"], **common)
            assert ratio.tokens(width, height) == blocks * per_tile, (width, height)


@pytest.mark.parametrize("rule", [DynamicRule(), DynamicRule(16, 2, 16, 400), DynamicRule(16, 2, 64, 64)], ids=repr)
def test_dynamic_counts_equal_the_reference_for_many_sizes(rule: DynamicRule) -> None:
    reference = tiler(rule)
    most = max(rule.max_patches, rule.min_patches)
    for width in (1, 5, 16, 17, 33, 48, 100, 320, 511, 512, 513, 1000, 1920, 4000):
        for height in (1, 8, 31, 32, 48, 64, 99, 320, 480, 777, 1080, 3000):
            if width / height > 60 or height / width > 60:
                continue  # the reference divides by a side of 0; see the next test
            param, _ = reference.process_media(Image.new("L", (width, height)), most)
            assert rule.tokens(width, height) == param.num_embeddings, (width, height)


@pytest.mark.parametrize("rule", [DynamicRule(16, 2, 4, 4), DynamicRule(16, 2, 16, 20), DynamicRule()], ids=repr)
def test_no_side_is_ever_empty(rule: DynamicRule) -> None:
    """V11: 48x320 with four patches comes to a width of 0 in the reference."""
    for width, height in ((48, 320), (320, 48), (1, 1), (1, 100_000), (100_000, 1), (20_000, 3)):
        grid = rule.grid(width, height)
        assert min(grid) >= 2
        assert not any(side % 2 for side in grid)
        assert rule.tokens(width, height) <= rule.max_tokens


RULES: list[SizeRule] = [NearestRule(), FixedRule(), TileRule(), TileRule(choice="ratio"), DynamicRule()]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_small_size_gives_whole_blocks(rule: SizeRule) -> None:
    for width in range(1, 201, 3):
        for height in range(1, 201, 7):
            grid = rule.grid(width, height)
            assert min(grid) >= rule.merge
            assert not any(side % rule.merge for side in grid)


def test_the_fingerprint_tells_settings_apart() -> None:
    made = [RadioPreprocess(rule) for rule in RULES]
    made += [RadioPreprocess(RULES[0], "bicubic"), RadioPreprocess(RULES[0], mean=(0.5, 0.5, 0.5))]
    assert len({one.fingerprint() for one in made}) == len(made)


def test_tubelets_repeat_the_last_frame() -> None:
    frames = torch.arange(5 * 2 * 3).view(5, 2, 3).float()
    joined = tubelets(frames, 2)
    assert joined.shape == (3, 2, 6)
    assert torch.equal(joined[2, 1], torch.cat([frames[4, 1], frames[4, 1]]))
    assert torch.equal(joined[0, 1], torch.cat([frames[0, 1], frames[1, 1]]))
    assert torch.equal(tubelets(frames, 1), frames)


def test_tiles_stand_in_reading_order_with_the_thumbnail_last() -> None:
    rule = TileRule(patch_size=8, tile=8)
    pixels = torch.zeros(128, 192, 3, dtype=torch.uint8)
    pixels[:64, 128:] = 255  # the third of six tiles
    patches, grid = RadioPreprocess(rule, "pillow").patches(pixels)
    assert grid == Grid(7 * 8, 8)
    means = patches.view(7, -1).mean(dim=1)
    assert int(means.argmax()) == 2
    assert means[[0, 1, 3, 4, 5]].max() < means[6] < means[2]
