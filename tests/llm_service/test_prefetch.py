"""The prefetcher: what is held, for whom, and how much of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from llm_service.vllm_plugin.prefetch import BATCH_BYTES, Lost, Need, Prefetcher


class Source:
    """A cache whose answers a test can hold back."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.batches: list[list[str]] = []
        self.missing: set[str] = set()

    def fetch(self, needs: Sequence[Need]) -> list[torch.Tensor | None]:
        self.batches.append([need.key for need in needs])
        assert self.open.wait(10)
        if any(need.key == "broken" for need in needs):
            raise RuntimeError("a bug")
        return [None if need.key in self.missing else torch.zeros(need.tokens, 1) for need in needs]

    @property
    def asked(self) -> list[str]:
        return [key for batch in self.batches for key in batch]


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def prefetcher(source: Source) -> Iterator[Prefetcher]:
    made = Prefetcher(source.fetch, budget=100, threads=2)
    yield made
    source.open.set()
    made.close()


def need(key: str, nbytes: int = 10) -> Need:
    return Need(key, tokens=1, grid=(1, 1), nbytes=nbytes)


def until_ready(prefetcher: Prefetcher, owner: str, needs: list[Need]) -> None:
    deadline = time.monotonic() + 5
    while not prefetcher.ready(owner, needs):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_defers_until_the_bytes_are_here(prefetcher: Prefetcher, source: Source) -> None:
    source.open.clear()
    assert not prefetcher.ready("r", [need("a"), need("b")])
    assert prefetcher.get("a") is None
    source.open.set()
    until_ready(prefetcher, "r", [need("a"), need("b")])
    assert prefetcher.get("a") is not None


def test_one_fetch_for_many_owners_and_for_a_key_given_twice(prefetcher: Prefetcher, source: Source) -> None:
    until_ready(prefetcher, "r", [need("a"), need("a")])
    until_ready(prefetcher, "s", [need("a")])
    assert source.asked == ["a"]


def test_held_until_the_last_owner_ends(prefetcher: Prefetcher, source: Source) -> None:
    """C13: the first to finish must not free what the other still needs."""
    until_ready(prefetcher, "r", [need("a", 60)])
    until_ready(prefetcher, "s", [need("a", 60)])
    prefetcher.release("r")
    assert not prefetcher.ready("t", [need("big", 60)]), "no room while s holds a"
    assert prefetcher.get("a") is not None
    prefetcher.release("s")
    until_ready(prefetcher, "t", [need("big", 60)])
    assert prefetcher.get("a") is None, "made room"


def test_kept_while_there_is_room(prefetcher: Prefetcher, source: Source) -> None:
    until_ready(prefetcher, "r", [need("a")])
    prefetcher.release("r")
    until_ready(prefetcher, "s", [need("a")])
    assert source.asked == ["a"]


def test_least_recently_used_goes_first(prefetcher: Prefetcher, source: Source) -> None:
    for key in "abc":
        until_ready(prefetcher, key, [need(key, 30)])
    for key in "cab":
        prefetcher.release(key)
    until_ready(prefetcher, "r", [need("d", 30)])
    assert [key for key in "abcd" if prefetcher.get(key) is not None] == ["a", "b", "d"]


def test_memory_is_bounded(prefetcher: Prefetcher, source: Source) -> None:
    for number in range(50):
        until_ready(prefetcher, f"r{number}", [need(f"k{number}", 30)])
        assert prefetcher.nbytes <= 100
        prefetcher.release(f"r{number}")
    assert prefetcher.owners == 0


def test_a_request_above_the_budget_runs_alone(prefetcher: Prefetcher, source: Source) -> None:
    """C17."""
    until_ready(prefetcher, "small", [need("s")])
    big = [need("x", 90), need("y", 90)]
    assert not prefetcher.ready("big", big)
    prefetcher.release("small")
    until_ready(prefetcher, "big", big)


def test_the_longest_waiting_is_let_in_first(prefetcher: Prefetcher, source: Source) -> None:
    until_ready(prefetcher, "a", [need("a", 50)])
    assert not prefetcher.ready("big", [need("b", 90)])
    assert not prefetcher.ready("small", [need("c", 10)]), "would starve the big one"
    assert prefetcher.ready("a", [need("a", 50)])
    prefetcher.release("big")  # aborted while it waits
    until_ready(prefetcher, "small", [need("c", 10)])


def test_lost_entries_are_told_and_tried_again_later(prefetcher: Prefetcher, source: Source) -> None:
    source.missing.add("a")
    with pytest.raises(Lost) as lost:
        until_ready(prefetcher, "r", [need("a"), need("b")])
    assert lost.value.keys == ("a",)
    prefetcher.release("r")
    source.missing.clear()
    until_ready(prefetcher, "s", [need("a")])
    assert source.asked.count("a") == 2


def test_a_bug_in_the_fetch_is_a_loss(prefetcher: Prefetcher, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Lost):
        until_ready(prefetcher, "r", [need("broken")])
    assert "broken" in caplog.text


def test_aborted_while_fetching(prefetcher: Prefetcher, source: Source) -> None:
    source.open.clear()
    assert not prefetcher.ready("r", [need("a")])
    prefetcher.release("r")
    assert prefetcher.owners == 0
    source.open.set()
    until_ready(prefetcher, "s", [need("a")])


def test_keep_takes_only_what_is_here(prefetcher: Prefetcher, source: Source) -> None:
    until_ready(prefetcher, "r", [need("a", 60)])
    prefetcher.keep("s", ["a", "b"])
    prefetcher.release("r")
    assert source.asked == ["a"]
    assert not prefetcher.ready("t", [need("c", 60)]), "s holds a"
    prefetcher.release("s")


def test_a_request_s_images_travel_together(prefetcher: Prefetcher, source: Source) -> None:
    until_ready(prefetcher, "r", [need("a"), need("b"), need("c")])
    assert source.batches == [["a", "b", "c"]]


def test_batches_are_bounded(source: Source) -> None:
    """One deadline holds for a batch: it must not have to carry any number of bytes."""
    prefetcher = Prefetcher(source.fetch, budget=1 << 40)
    third = BATCH_BYTES // 3
    until_ready(prefetcher, "r", [need("a", third), need("b", third), need("c", third), need("d", 2 * BATCH_BYTES)])
    prefetcher.close()
    assert sorted(source.batches) == [["a", "b", "c"], ["d"]]


def test_what_cannot_be_had_is_settled_and_asked_for_again(prefetcher: Prefetcher, source: Source) -> None:
    """An engine with a tower makes it itself; the next request finds what was saved meanwhile."""
    source.missing.add("a")
    deadline = time.monotonic() + 5
    while not prefetcher.settled("r", [need("a"), need("b")]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert prefetcher.get("a") is None
    assert prefetcher.get("b") is not None
    source.missing.clear()
    until_ready(prefetcher, "s", [need("a")])
    prefetcher.release("r")
    prefetcher.release("s")
    assert prefetcher.owners == 0
