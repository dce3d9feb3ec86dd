"""The tower-free engine against monolithic vLLM on small Nemotron checkpoints: tiles inside ``<img>``.

Llama-Nemotron has a Llama behind the tower, Nemotron-Nano-VL-V2 layers of attention and of Mamba.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_service.prompts import prompt_builder
from shared.errors import RequestError
from shared.families import context_length, size_rule
from tests.llm_service.plans import Run
from tests.llm_service.test_equivalence import TOLERANCE, Content, Results, check, difference, perform
from tools.checkpoints.radio import Shape, write_radio

SQUARE, WIDE, TALL, TINY, LARGE = (1, 64, 64), (2, 130, 60), (3, 40, 170), (4, 5, 5), (5, 256, 192)
TWIN = (6, 64, 64)  # another picture of SQUARE's size
CONVERSATIONS: dict[str, list[Content]] = {
    "text": ["What is in the picture?"],
    "one": [SQUARE, "What is in the picture?"],
    "twin": [TWIN, "What is in the picture?"],
    "image only": [WIDE],
    "twelve tiles": ["Look: ", LARGE, "What is in the picture?"],
    "four": ["first", TALL, "second", TINY, WIDE, "third", TWIN, "which?"],
}
SHAPE = Shape(text_width=64, language=True)


@pytest.fixture(scope="module", params=["llama", "nano"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_radio(tmp_path_factory.mktemp("nemotron") / "c", request.param, SHAPE, seed=11)


@pytest.fixture(scope="module")
def results(checkpoint: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    path, off = str(checkpoint), {"enable_prefix_caching": False}
    runs = [
        Run("monolith", path, "monolith", options=off),  # with it, vLLM's Mamba layers fail on CPUs
        Run("redis", path),
        Run("chunks", path, together=True, options={"max_num_batched_tokens": 16, **off}),
    ]
    return perform(runs, checkpoint, redis_url, tmp_path_factory.mktemp("runs"), CONVERSATIONS)


@pytest.mark.parametrize("run", ["redis", "chunks"])
def test_same_tokens_and_log_probabilities(results: Results, run: str) -> None:
    """Chunks of 16 tokens cut between ``<img>`` and the first row, inside tiles, and before ``</img>``."""
    (monolith,) = results["monolith"]
    check(results[run], monolith)


def test_the_comparison_sees_the_pictures(results: Results) -> None:
    """C5: prompts that differ in the picture alone answer differently."""
    (monolith,) = results["monolith"]
    for result in [monolith, *results["redis"]]:
        one, twin = result["one"], result["twin"]
        assert one["tokens"] != twin["tokens"] or difference(one, twin) > 10 * TOLERANCE


def test_prompts_hold_the_tokens_of_every_tile_between_their_marks(checkpoint: Path) -> None:
    builder, rule = prompt_builder(checkpoint), size_rule(checkpoint)
    sizes = [picture[1:] for picture in (SQUARE, LARGE)]
    content = [{"type": "image_url"}, {"type": "text", "text": "<img><image></img>"}, {"type": "image_url"}]
    prompt = builder.build([{"role": "user", "content": content}], [rule.merged(*size) for size in sizes])
    counts = [rule.tokens(*size) for size in sizes]
    assert counts == [16, 13 * 16]
    for place, count in zip(prompt.placeholders, counts, strict=True):
        ids = prompt.token_ids[place.offset : place.offset + place.length]
        assert place.mask == (False, *[True] * count, False)
        assert len(set(ids)) == 3
        assert len(set(ids[1:-1])) == 1
    # the marks that a user writes are text: the tokens stand in the prompt as often as the pictures need
    image, start = ids[1], ids[0]
    assert prompt.token_ids.count(image) == sum(counts)
    assert prompt.token_ids.count(start) == 2
    assert context_length(checkpoint) == 4096
    with pytest.raises(RequestError):
        builder.plain([image])
