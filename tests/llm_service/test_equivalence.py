"""The tower-free engine against monolithic vLLM on the same checkpoint: same tokens, log-probabilities within 1e-3."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from llm_service.prompts import prompt_builder
from shared.families import size_rule
from tests.llm_service.plans import Run

TOLERANCE = 1e-3
SQUARE, WIDE, TALL, TINY, LARGE = (1, 96, 96), (2, 200, 60), (3, 40, 170), (4, 30, 20), (5, 256, 250)
TWIN = (6, 96, 96)  # another picture of SQUARE's size
Content = str | tuple[int, int, int]

CONVERSATIONS: dict[str, list[Content]] = {
    "text": ["What is in the picture?"],
    "one": [SQUARE, "What is in the picture?"],
    "twin": [TWIN, "What is in the picture?"],
    "image only": [WIDE],
    "image last": ["Describe this image in one sentence. " * 4, TALL],
    "two adjacent": [SQUARE, WIDE, "compare"],
    "same twice": [SQUARE, "and again", SQUARE, "equal?"],
    "three": ["first", TALL, "second", SQUARE, "third", LARGE, "which?"],
    "four": [LARGE, SQUARE, "x", LARGE, TINY, "which of the four?"],
    "eight": [SQUARE, WIDE, TALL, TINY, "half", LARGE, TWIN, (7, 60, 60), (8, 128, 40), "all"],
    "long one": ["How many objects are there? " * 5, SQUARE, "There are two objects: " * 5],
    "long twin": ["How many objects are there? " * 5, TWIN, "There are two objects: " * 5],
    "other text": ["The red square is left of the blue circle."],
}


def cases(checkpoint: Path, conversations: dict[str, list[Content]]) -> list[dict[str, Any]]:
    builder, rule = prompt_builder(checkpoint), size_rule(checkpoint)
    made = []
    for name, contents in conversations.items():
        images = [content for content in contents if not isinstance(content, str)]
        parts = [
            {"type": "text", "text": content} if isinstance(content, str) else {"type": "image_url"}
            for content in contents
        ]
        prompt = builder.build(
            [{"role": "user", "content": parts}], [rule.merged(width, height) for _, width, height in images]
        )
        places = [(p.offset, p.length, p.image_index, p.mask) for p in prompt.placeholders]
        made.append({"name": name, "token_ids": prompt.token_ids, "placeholders": places, "images": images})
    return made


Results = dict[str, list[dict[str, Any]]]


def perform(
    runs: list[Run],
    checkpoint: Path,
    url: str,
    folder: Path,
    conversations: dict[str, list[Content]] = CONVERSATIONS,
    **variables: str,
) -> Results:
    plan, result = folder / "plan.json", folder / "result.jsonl"
    plan.write_text(
        json.dumps({"redis": url, "cases": cases(checkpoint, conversations), "runs": [asdict(run) for run in runs]})
    )
    command = [sys.executable, "-m", "tests.llm_service.variants", str(plan), str(result)]
    here, environment = Path(__file__).parents[2], os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {entry["name"]: entry["results"] for entry in map(json.loads, result.read_text().splitlines())}


def difference(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest difference of a log-probability over the tokens that both report."""
    worst = 0.0
    for ours, theirs in zip(got["top"], expected["top"], strict=True):
        common = ours.keys() & theirs.keys()
        assert len(common) >= 4, (ours, theirs)
        worst = max(worst, *(abs(ours[token] - theirs[token]) for token in common))
    return worst


def check(got: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in got:
        for name, answer in result.items():
            length = len(answer["tokens"])
            assert answer["reason"] == "length", (name, answer)
            wanted = {key: expected[name][key][:length] for key in ("tokens", "top")}
            assert answer["tokens"] == wanted["tokens"], name
            assert difference(answer, wanted) < TOLERANCE, name


def runs(checkpoint: Path) -> list[Run]:
    path = str(checkpoint)
    off = {"enable_prefix_caching": False}
    return [
        Run("monolith", path, "monolith", max_tokens=24),
        Run("redis", path, passes=2, options={"block_size": 32}),
        Run("inline", path, "inline"),
        Run("wrong positions", path, "inline", origin="start"),
        Run("mixed batch", path, together=True, options=off),
        *(
            Run(f"chunk {n}", path, options={"max_num_batched_tokens": n, **off}, together=n == 48)
            for n in (16, 32, 48)
        ),
        Run(
            "preempted",
            path,
            together=True,
            flush=True,
            max_tokens=24,
            options={"num_gpu_blocks_override": 14, "block_size": 32, "max_model_len": 320, **off},
        ),
    ]


@pytest.fixture(scope="module")
def results(flat: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return perform(runs(flat), flat, redis_url, tmp_path_factory.mktemp("variants"))


@pytest.fixture(scope="module")
def monolith(results: Results) -> dict[str, Any]:
    return results["monolith"][0]


def test_embeddings_from_redis(results: Results, monolith: dict[str, Any]) -> None:
    check(results["redis"], monolith)


def test_embeddings_in_the_request(results: Results, monolith: dict[str, Any]) -> None:
    check(results["inline"], monolith)


def test_the_comparison_would_notice_wrong_positions(results: Results, monolith: dict[str, Any]) -> None:
    wrong = results["wrong positions"][0]
    for name in ("two adjacent", "three", "eight"):
        assert wrong[name]["tokens"] != monolith[name]["tokens"][:6] or (
            difference(wrong[name], {"top": monolith[name]["top"][:6]}) > 10 * TOLERANCE
        ), name
    check([{name: wrong[name] for name in ("text", "other text")}], monolith)


def test_two_pictures_of_one_size_differ(monolith: dict[str, Any], results: Results) -> None:
    """C5: prompts that differ in the picture alone."""
    for run in ("redis", "mixed batch"):
        for result in results[run]:
            for pair in (("one", "twin"), ("long one", "long twin")):
                one, twin = (result[name] for name in pair)
                assert one["tokens"] != twin["tokens"] or difference(one, twin) > 10 * TOLERANCE


def test_prefix_reuse_stops_before_another_picture(results: Results) -> None:
    """C5: what the prefix cache gives "long twin" after "long one" ends before the picture; the second time not."""
    first, second = (result["long twin"] for result in results["redis"])
    place = next(case for case in CONVERSATIONS["long twin"] if isinstance(case, tuple))
    assert place == TWIN
    assert 32 <= first["cached"] < second["cached"]


def test_text_and_images_in_one_batch(results: Results, monolith: dict[str, Any]) -> None:
    """M3."""
    check(results["mixed batch"], monolith)


@pytest.mark.parametrize("name", ["two adjacent", "three", "four", "eight"])
def test_images_of_different_sizes(results: Results, monolith: dict[str, Any], name: str) -> None:
    """M5: each has its own grid; "eight" holds grids from 2×2 to 8×8 tokens."""
    for run in ("redis", "inline", "mixed batch"):
        check([{name: results[run][0][name]}], monolith)


@pytest.mark.parametrize("size", [16, 32, 48])
def test_chunk_edges_inside_images(results: Results, monolith: dict[str, Any], size: int) -> None:
    """M4: chunks smaller than an image, than its neighbours, and at several offsets within."""
    check(results[f"chunk {size}"], monolith)


def test_preempted_requests_find_their_embeddings_again(results: Results, monolith: dict[str, Any]) -> None:
    """The cache is emptied after the first tokens; who is preempted then must still be able to start over."""
    (result,) = results["preempted"]
    assert sum(answer["preempted"] for answer in result.values()) > 0, "no request was preempted: the test is idle"
    check([result], monolith)


@pytest.mark.slow
def test_nested_tied_single_file(nested: Path, redis_url: str, tmp_path: Path) -> None:
    """New layout, tied head; and the same without the sizes at the top of config.json, which vLLM's own class needs."""
    bare = tmp_path / "bare"
    shutil.copytree(nested, bare)
    config = json.loads((bare / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in config["text_config"] or name == "model_type"}
    (bare / "config.json").write_text(json.dumps(kept))
    runs = [Run("monolith", str(nested), "monolith"), Run("redis", str(nested)), Run("bare", str(bare), "inline")]
    got = perform(runs, nested, redis_url, tmp_path)
    check(got["redis"], got["monolith"][0])
    check(got["bare"], got["monolith"][0])
