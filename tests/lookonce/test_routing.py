"""Which replica a request prefers."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from llm_service.prompts import Prompt
from lookonce.routing import PREFIX_TOKENS, affinity, order
from shared.items import VisionItem
from shared.sizing import Grid

IDLE: dict[str, int | None] = {"a": 0, "b": 0, "c": None}
KEYS = [f"lookonce:emb:{number}" for number in range(300)]


def arguments(tokens: list[int], *images: str, salt: str | None = None) -> list[Any]:
    items = [VisionItem(key, Grid(2, 2), 1, 4) for key in images]
    return ["request", Prompt(tokens, cache_salt=salt), items, SimpleNamespace()]


def test_requests_meet_by_image_then_by_prefix() -> None:
    long = list(range(2 * PREFIX_TOKENS))
    assert affinity(arguments([1, 2], "x", "y")) == affinity(arguments([3], "x")) == "x"
    assert affinity(arguments(long)) == affinity(arguments([*long[:PREFIX_TOKENS], 7]))
    assert affinity(arguments(long)) != affinity(arguments([5, *long]))
    assert affinity(arguments(long)) != affinity(arguments(long, salt="tenant")), "they share no prefix cache"
    assert affinity(arguments([1, 2, 3])) is None
    assert affinity([]) is None, "another method"


def test_a_key_has_one_favourite_and_keys_spread() -> None:
    firsts = [order(key, IDLE, 4)[0] for key in KEYS]
    assert firsts == [order(key, IDLE, 4)[0] for key in KEYS]
    shares = Counter(name for (name,) in firsts)
    assert set(shares) == set(IDLE)
    assert min(shares.values()) > len(KEYS) / 5


def test_a_replica_that_goes_moves_its_own_keys_only() -> None:
    before = {key: order(key, IDLE, 4)[0][0] for key in KEYS}
    after = {key: order(key, {"a": 0, "b": 0}, 4)[0][0] for key in KEYS}
    assert all(after[key] == name for key, name in before.items() if name != "c")


def test_a_busier_favourite_is_passed_over() -> None:
    (favourite,) = order("x", IDLE, 4)[0]
    others = sorted(set(IDLE) - {favourite})
    assert order("x", IDLE | {favourite: 4}, 4)[0] == [favourite]
    for _ in range(20):
        (pair,) = order("x", IDLE | {favourite: 5}, 4)
        assert set(pair) <= set(others)


def test_a_favourite_that_does_not_answer_is_followed_by_others() -> None:
    favourite, rest = order("x", {"a": None, "b": None}, 4)
    assert len(favourite) == 1
    assert sorted(rest) == ["a", "b"]


def test_without_a_key_two_are_compared() -> None:
    ((one, other),) = order(None, IDLE, 4)
    assert one != other
    assert order(None, {"a": 3}, 4) == [["a"]]
