"""The tower-free engine against monolithic vLLM on small Pixtral checkpoints of every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.llm_service.plans import Run
from tests.llm_service.test_equivalence import TOLERANCE, Content, Results, check, difference, perform
from tools.checkpoints.pixtral import Kind, write_pixtral

SQUARE, WIDE, TALL, TINY, LARGE = (1, 40, 40), (2, 100, 30), (3, 20, 90), (4, 8, 8), (5, 128, 120)
TWIN = (6, 40, 40)  # another picture of SQUARE's size
CONVERSATIONS: dict[str, list[Content]] = {
    "text": ["What is in the picture?"],
    "one": [SQUARE, "What is in the picture?"],
    "twin": [TWIN, "What is in the picture?"],
    "image only": [WIDE],
    "turned": [TALL, "What is in the picture?"],
    "same twice": [SQUARE, "and again", SQUARE, "equal?"],
    "five": ["first", TALL, "second", TINY, WIDE, "third", LARGE, TWIN, "which?"],
    "long": ["How many objects are there? " * 5, SQUARE, "There are two objects: " * 5],
}
#: the others run the same code on other names: native with a merger and the older Hugging Face one cover the pairs
QUICK: tuple[Kind, ...] = ("native-merger", "llava")
SLOW: tuple[Kind, ...] = ("native", "mistral3")
KINDS = [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]


@pytest.fixture(scope="module", params=KINDS)
def results(request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("pixtral")
    quick = request.param in QUICK
    checkpoint = write_pixtral(folder / "c", request.param, seed=7, sharded=not quick, new_names=not quick)
    path = str(checkpoint)
    off = {"enable_prefix_caching": False}
    runs = [
        Run("monolith", path, "monolith"),
        Run("redis", path, passes=2, options={"block_size": 32}),
        Run("inline", path, "inline"),
        Run("chunks", path, together=True, options={"max_num_batched_tokens": 16, **off}),
    ]
    return perform(runs, checkpoint, redis_url, folder, CONVERSATIONS)


@pytest.mark.parametrize("run", ["redis", "inline", "chunks"])
def test_same_tokens_and_log_probabilities(results: Results, run: str) -> None:
    """Rows of images are cut by chunks of 16 tokens in every way, also so that a chunk holds a row's end alone."""
    (monolith,) = results["monolith"]
    check(results[run], monolith)


def test_the_comparison_sees_the_pictures(results: Results) -> None:
    """C5: prompts that differ in the picture alone, or in the order of its patches alone, answer differently."""
    (monolith,) = results["monolith"]
    for result in [monolith, *results["redis"]]:
        one, twin = result["one"], result["twin"]
        assert one["tokens"] != twin["tokens"] or difference(one, twin) > 10 * TOLERANCE


def answered(results: Results, name: str) -> list[dict[str, Any]]:
    return [result[name] for result in results["redis"]]


def test_the_second_pass_takes_the_first_ones_prefix(results: Results) -> None:
    """A prefix of image rows is reused as one of text is."""
    first, second = answered(results, "long")
    assert second["cached"] > first["cached"]


def test_folder_for_another_layout_is_refused(tmp_path: Path) -> None:
    """Weights of one layout beside the configuration of the other: the plugin reads none of them by mistake."""
    from llm_service.vllm_plugin.loader import check_language_tensors
    from shared.errors import CheckpointError

    write_pixtral(tmp_path, "llava")
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match="safetensors"):
        check_language_tensors(tmp_path)
