"""M-RoPE positions of a long prompt beside vLLM's own functions of four families.

python -m benchmarks.mrope --images 64
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from llm_service.mrope import GridOrigin, ImageSpan, positions
from tests.llm_service.test_mrope import features, oracle

FAMILIES = ("isaac", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def prompt(images: int, side: int, text: int) -> tuple[int, list[ImageSpan]]:
    """``images`` pictures of ``side`` × ``side`` tokens with ``text`` tokens before each and after the last."""
    spans = [ImageSpan(text + number * (side * side + text), 1, side, side) for number in range(images)]
    return images * (side * side + text) + text, spans


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--side", type=int, default=16, help="tokens along a side of a picture; 16 is 512 pixels")
    parser.add_argument("--text", type=int, default=30, help="tokens between pictures")
    parser.add_argument("--repeats", type=int, default=51)
    options = parser.parse_args()

    length, spans = prompt(options.images, options.side, options.text)
    print(f"{options.images} pictures, {length} tokens; medians of {options.repeats}\n")
    print("| family | vLLM ms | lookonce ms | ratio |\n|---|---:|---:|---:|")
    for family in FAMILIES:
        theirs = oracle(family)
        origin = GridOrigin.ZERO if family == "isaac" else GridOrigin.START
        tokens, made = [0] * length, features(spans)
        expected, delta = theirs(input_tokens=tokens, mm_features=made)
        ours, our_delta = positions(length, spans, origin)
        np.testing.assert_array_equal(ours, expected.numpy())
        assert delta == our_delta
        slow = milliseconds(lambda: theirs(input_tokens=tokens, mm_features=made), options.repeats)  # noqa: B023
        fast = milliseconds(lambda: positions(length, spans, origin), options.repeats)  # noqa: B023
        print(f"| {family} | {slow:.3f} | {fast:.3f} | {slow / fast:.1f}× |")


if __name__ == "__main__":
    main()
