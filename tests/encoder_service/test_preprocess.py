"""Isaac preprocessing against vLLM's processor: token counts exactly, patches within one grey level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.transformers_utils.processors.isaac import IsaacImageProcessor

from encoder_service.preprocess.isaac import IsaacPreprocess
from shared.sizing import NaflexRule

#: V8's and D13's sizes, then plain ones that shrink, grow or stay
SIZES = [
    (1, 1), (2, 2), (3, 3), (1, 2000), (2000, 1), (1, 100), (15, 15), (16, 16), (17, 31), (48, 48), (80, 112),
    (1093, 5), (500, 19), (300, 1200), (224, 224), (256, 256), (257, 255), (277, 512), (512, 512), (640, 480),
    (480, 640), (1280, 720), (720, 1280), (1000, 30), (33, 64), (64, 33), (100, 700), (341, 341), (1600, 1200),
    (50, 50), (999, 1001), (2048, 2048),
]  # fmt: skip
#: published Isaac, and a small demonstration model with other limits, patch size and factor
RULES = [NaflexRule(), NaflexRule(patch_size=14, merge=2, min_patches=16, max_patches=256), NaflexRule(8, 4, None, 512)]
ONE_GREY_LEVEL = 2 / 255


def picture(width: int, height: int) -> np.ndarray:
    """Noise over a gradient, so that a wrong resize or a swapped axis shows."""
    rows, columns = np.mgrid[0:height, 0:width]
    smooth = np.stack(
        [rows * 255 // max(height - 1, 1), columns * 255 // max(width - 1, 1), (rows + columns) % 256], -1
    )
    noise = np.random.default_rng(width * 10007 + height).integers(-30, 31, smooth.shape)
    return np.clip(smooth + noise, 0, 255).astype(np.uint8)


def reference(rule: NaflexRule, pixels: np.ndarray) -> tuple[torch.Tensor, tuple[int, int]]:
    processor = IsaacImageProcessor(rule.patch_size, rule.max_patches, rule.min_patches, rule.merge)  # type: ignore[arg-type]
    out = processor(Image.fromarray(pixels))
    _, height, width = out["image_grid_thw"][0].tolist()
    return out["pixel_values"], (height, width)


@pytest.mark.parametrize("rule", RULES, ids=["published", "small", "no minimum"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_equals_the_reference_processor(rule: NaflexRule, width: int, height: int) -> None:
    pixels = picture(width, height)
    ours, grid = IsaacPreprocess(rule).patches(torch.from_numpy(pixels))
    theirs, their_grid = reference(rule, pixels)
    assert tuple(grid) == their_grid
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() <= ONE_GREY_LEVEL
    assert rule.tokens(width, height) == grid.patches // rule.merge**2


def test_the_tiniest_pictures_end_below_the_minimum_as_the_reference_does() -> None:
    """V8: the search for an enlargement stops at 100 times."""
    counts = {side: IsaacPreprocess().rule.grid(side, side).patches for side in (1, 2, 3)}
    assert counts == {1: 64, 2: 196, 3: 256}


def test_every_small_size_gives_whole_blocks() -> None:
    """V7: sides of 1 to 200 pixels always give grids that the pixel shuffle divides."""
    for rule in RULES:
        for width in range(1, 201):
            for height in range(1, 201, 1 if width % 20 == 0 else 13):
                grid = rule.grid(width, height)
                assert not grid.height % rule.merge, (width, height)
                assert not grid.width % rule.merge, (width, height)
                assert 0 < grid.patches <= rule.max_patches, (width, height)


def test_the_input_is_left_alone() -> None:
    pixels = torch.from_numpy(picture(40, 30))
    before = pixels.clone()
    IsaacPreprocess().patches(pixels)
    assert torch.equal(pixels, before)


def test_the_fingerprint_tells_settings_apart() -> None:
    prints = {IsaacPreprocess(rule).fingerprint() for rule in RULES}
    assert len(prints) == len(RULES)
    assert IsaacPreprocess(NaflexRule()).fingerprint() == IsaacPreprocess().fingerprint()
