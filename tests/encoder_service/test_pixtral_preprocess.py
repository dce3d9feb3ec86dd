"""Pixtral preprocessing against mistral-common's encoder and transformers' processor: token counts exactly."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from mistral_common.protocol.instruct.chunk import ImageChunk
from mistral_common.tokens.tokenizers.image import ImageConfig, ImageEncoder, SpecialImageIDs
from PIL import Image
from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor

from encoder_service.preprocess.pixtral import PixtralPreprocess
from shared.sizing import LongestSideRule
from tests.encoder_service.test_preprocess import picture

#: V9's 1080x675, edges of patches and blocks, the cap from both sides, strips, tiny and large pictures
SIZES = [
    (1, 1), (2, 3), (1, 100), (100, 1), (15, 15), (16, 16), (17, 16), (31, 33), (28, 28), (29, 27), (55, 57), (64, 64),
    (1080, 675), (675, 1080), (640, 480), (480, 640), (200, 60), (40, 170), (333, 500), (512, 512), (768, 1024),
    (1023, 1023), (1024, 1024), (1025, 1024), (1024, 1025), (1539, 100), (1540, 200), (1541, 99), (1500, 2000),
    (3000, 40), (40, 3000), (1920, 1080),
]  # fmt: skip
#: Pixtral-12B, Mistral-Small-3.1, and a small demonstration model
GEOMETRIES = [(16, 1, 1024), (14, 2, 1540), (8, 2, 256)]
geometry = pytest.mark.parametrize(("patch", "merge", "longest"), GEOMETRIES)
published = pytest.mark.parametrize(("patch", "merge", "longest"), GEOMETRIES[:2])


def mistral(patch: int, merge: int, longest: int) -> ImageEncoder:
    return ImageEncoder(ImageConfig(patch, longest, merge), SpecialImageIDs(10, 12, 13))


def as_picture(patches: torch.Tensor, rows: int, columns: int, side: int) -> torch.Tensor:
    return patches.view(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)


@geometry
def test_token_counts_equal_mistral_commons(patch: int, merge: int, longest: int) -> None:
    """V9: every size around the edges of patches, blocks and the cap; the reference needs no pixel for it."""
    rule, reference = LongestSideRule(patch, merge, longest), mistral(patch, merge, longest)
    cell = patch * merge
    sides = sorted({k * step + d for step in (patch, cell) for k in (1, 2, 5) for d in (-1, 0, 1)} | {675, 1080, 1})
    sides += [longest + d for d in (-1, 0, 1)] + [2 * longest + 1, 5 * longest]
    for width in sides:
        for height in sides:
            size = Image.new("1", (width, height))
            columns, rows = reference._image_to_num_tokens(size)
            assert rule.merged(width, height) == (rows, columns), (width, height)
            assert rule.tokens(width, height) == rows * columns <= rule.max_tokens
            assert rule.grid(width, height).patches == rows * columns * merge**2


@published
def test_native_equals_mistral_common(patch: int, merge: int, longest: int) -> None:
    reference = mistral(patch, merge, longest)
    preprocess = PixtralPreprocess(LongestSideRule(patch, merge, longest))
    for width, height in SIZES:
        pixels = picture(width, height)
        ours, grid = preprocess.patches(torch.from_numpy(pixels))
        encoded = reference(ImageChunk(image=Image.fromarray(pixels)))
        theirs = torch.from_numpy(np.ascontiguousarray(encoded.image))
        assert encoded.tokens.count(10) == preprocess.rule.tokens(width, height)
        found = as_picture(ours, *grid, patch)
        assert found.shape == theirs.shape, (width, height)
        # a 14th of a grey level: the two round the place between pixels in other precisions
        assert (found - theirs).abs().max() < 1e-3, (width, height)


@published
def test_hugging_face_equals_transformers(patch: int, merge: int, longest: int) -> None:
    """Within one grey level: transformers' kernel works in fixed point, with another rounding per memory layout."""
    processor = PixtralImageProcessor(size={"longest_edge": longest}, patch_size=patch * merge)
    preprocess = PixtralPreprocess(LongestSideRule(patch, merge, longest, "down"), "smooth-bicubic")
    for width, height in SIZES:
        pixels = picture(width, height)
        ours, grid = preprocess.patches(torch.from_numpy(pixels))
        theirs = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
        found = as_picture(ours, *grid, patch)
        assert found.shape == theirs.shape, (width, height)
        assert (found - theirs).abs().max() <= 1.01 / 255 / min(preprocess.std), (width, height)


def test_the_thinnest_strips_keep_one_row() -> None:
    """V11's kind: reduced to nothing, transformers gives a picture of no tokens; here it keeps a row of blocks."""
    for rounding in ("nearest", "down"):
        rule = LongestSideRule(16, 1, 1024, rounding)  # type: ignore[arg-type]
        assert rule.grid(1, 100_000) == (64, 1)
        assert rule.grid(100_000, 1) == (1, 64)


def test_the_input_is_left_alone_and_the_fingerprint_tells_settings_apart() -> None:
    pixels = torch.from_numpy(picture(40, 30))
    before = pixels.clone()
    make = partial(PixtralPreprocess, LongestSideRule(8, 1, 32))
    variants = [make(), make("smooth-bicubic"), make("smooth-bilinear"), make("sharp", (0.5, 0.5, 0.5))]
    for variant in variants:
        variant.patches(pixels)
    assert torch.equal(pixels, before)
    variants += [PixtralPreprocess(), PixtralPreprocess(LongestSideRule(rounding="down"))]
    assert len({variant.fingerprint() for variant in variants}) == len(variants)
