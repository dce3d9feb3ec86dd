"""M-RoPE positions against vLLM's own functions of four families, and by properties."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llm_service.mrope import GridOrigin, ImageSpan, SpanError, positions

MERGE = 2
Case = tuple[int, list[ImageSpan]]


def random_case(rng: random.Random) -> Case:
    """Images first, last, adjacent, alone; long thin ones; text of any length, none included."""
    spans, at = [], rng.choice([0, 0, 1, 7, 40])
    for _ in range(rng.randint(0, 6)):
        h, w = rng.choice([(1, 1), (1, 30), (30, 1), (rng.randint(1, 12), rng.randint(1, 12))])
        spans.append(ImageSpan(at, 1, h, w))
        at += h * w + rng.choice([0, 0, 1, 3, 50])
    tail = rng.choice([0, 0, 1, 5, 60])
    length = max(spans[-1].offset + spans[-1].h * spans[-1].w + tail if spans else at + tail, 1)
    return length, spans


CASES = [random_case(random.Random(seed)) for seed in range(1000)]


def features(spans: list[ImageSpan]) -> list[Any]:
    from vllm.multimodal.inputs import PlaceholderRange

    made = [
        SimpleNamespace(
            modality="image",
            mm_position=PlaceholderRange(offset=s.offset, length=s.h * s.w),
            data={"image_grid_thw": SimpleNamespace(data=torch.tensor([s.t, s.h * MERGE, s.w * MERGE]))},
        )
        for s in spans
    ]
    random.Random(0).shuffle(made)
    return made


def oracle(family: str) -> Any:
    """The family's own function, unbound from its weights."""
    if family == "isaac":
        from vllm.model_executor.models.isaac import IsaacForConditionalGeneration as Model

        config = SimpleNamespace(vision_config=SimpleNamespace(pixel_shuffle_scale_factor=MERGE))
        fake = SimpleNamespace(config=config)
        fake.iter_mm_grid_hw = partial(Model.iter_mm_grid_hw, fake)
        return partial(Model.get_mrope_input_positions, fake)
    if family == "qwen3_vl":
        from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Qwen3

        config = SimpleNamespace(
            video_token_id=1,
            vision_start_token_id=2,
            vision_end_token_id=3,
            vision_config=SimpleNamespace(spatial_merge_size=MERGE),
        )
        return partial(Qwen3._get_mrope_input_positions, config=config)
    if family == "qwen2_vl":
        from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration as Qwen
    else:
        from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Qwen
    fake = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    fake.iter_mm_grid_thw = partial(Qwen.iter_mm_grid_thw, fake)
    return partial(Qwen.get_mrope_input_positions, fake)


@pytest.mark.parametrize("family", ["isaac", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_equal_to_vllm(family: str) -> None:
    origin = GridOrigin.ZERO if family == "isaac" else GridOrigin.START
    theirs = oracle(family)
    for length, spans in CASES:
        expected, expected_delta = theirs(input_tokens=[0] * length, mm_features=features(spans))
        got, delta = positions(length, spans, origin)
        np.testing.assert_array_equal(got, expected.numpy(), err_msg=f"{length} {spans}")
        assert delta == expected_delta, (length, spans)


@pytest.mark.parametrize("origin", list(GridOrigin))
def test_any_prefix_of_whole_images_has_the_same_columns(origin: GridOrigin) -> None:
    """M4: what a chunk needs does not depend on what comes later, but for ZERO's text after the last image."""
    for length, spans in CASES:
        whole, _ = positions(length, spans, origin)
        for count in range(len(spans)):
            cut = spans[count].offset
            part, _ = positions(cut, spans[:count], origin) if cut else (whole[:, :0], 0)
            known = cut if origin is GridOrigin.START else (spans[count - 1].offset + 1 if count else cut)
            np.testing.assert_array_equal(part[:, :known], whole[:, :known])


def test_text_alone_counts_up() -> None:
    """M3."""
    got, delta = positions(9, [])
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(9), (3, 9)))
    assert delta == 0


def test_offset_of_a_448_picture() -> None:
    """M1: 448×448 at patch 14 and merge 2 is 16×16 tokens; decoding counts on far below the token index."""
    spans = [ImageSpan(4, 1, 16, 16)]
    assert positions(300, spans, GridOrigin.START)[1] == 16 - 256
    assert positions(300, spans, GridOrigin.ZERO)[1] == 1 - 256


@pytest.mark.parametrize(
    "spans",
    [
        [ImageSpan(0, 1, 0, 3)],
        [ImageSpan(0, 1, -2, -2)],
        [ImageSpan(0, 0, 2, 2)],
        [ImageSpan(-1, 1, 2, 2)],
        [ImageSpan(8, 1, 2, 2)],
        [ImageSpan(0, 1, 10**9, 10**9)],
        [ImageSpan(0, 1, 2, 2), ImageSpan(3, 1, 2, 2)],
        [ImageSpan(5, 1, 1, 1), ImageSpan(0, 1, 1, 1)],
    ],
)
def test_absurd_grids_are_refused(spans: list[ImageSpan]) -> None:
    """M15."""
    with pytest.raises(SpanError):
        positions(10, spans)


def test_the_model_class_reads_positions_from_the_grid(caplog: pytest.LogCaptureFixture) -> None:
    """M1: from each image's own grid, whose offset the log tells; without a grid an error."""
    from vllm.multimodal.inputs import PlaceholderRange

    from llm_service.vllm_plugin.models import LookonceIsaacForConditionalGeneration as Model
    from llm_service.vllm_plugin.processing import image_item

    length, spans = next(case for case in CASES if len(case[1]) > 3)
    made = [
        SimpleNamespace(mm_position=PlaceholderRange(offset=s.offset, length=s.h * s.w), data=image_item((1, s.h, s.w)))
        for s in reversed(spans)
    ]
    fake = SimpleNamespace(family=Model.family)
    with caplog.at_level("DEBUG", "llm_service.vllm_plugin.models"):
        got, delta = Model.get_mrope_input_positions(fake, [0] * length, made)  # type: ignore[arg-type]
    assert delta < 0
    assert f"{length} tokens with {len(spans)} images: decoding counts on at {delta}" in caplog.text
    expected, expected_delta = positions(length, spans, GridOrigin.ZERO)
    np.testing.assert_array_equal(got.numpy(), expected)
    assert delta == expected_delta
    made[0].data = None
    with pytest.raises(ValueError, match="no grid"):
        Model.get_mrope_input_positions(fake, [0] * length, made)  # type: ignore[arg-type]
