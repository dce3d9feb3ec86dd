"""Budgets and the choice between replay and the eager path, in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from encoder_service.replay.budgets import MAX_IMAGES, ladder, smallest_fit, smallest_useful
from encoder_service.replay.costs import RETRY_EVERY, CostBook
from encoder_service.towers.base import Budget
from shared.config import EncoderSettings
from shared.errors import ConfigError
from shared.sizing import NaflexRule


def sizes(budgets: tuple[Budget, ...]) -> list[int]:
    return [budget.patches for budget in budgets]


def test_powers_of_two_between_the_smallest_image_and_the_largest_batch() -> None:
    assert sizes(ladder((), 256, 4096, 2)) == [256, 512, 1024, 2048, 4096]
    assert sizes(ladder((), 256, 5000, 2)) == [256, 512, 1024, 2048, 4096, 5000]
    assert sizes(ladder((), 300, 1024, 2)) == [300, 512, 1024]
    assert sizes(ladder((), 256, 256, 2)) == [256]
    assert sizes(ladder((), 256, 100, 2)) == [100]
    assert sizes(ladder((), 16, 100, 3)) == [18, 36, 72, 99]


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("smallest", [1, 9, 64, 300])
@pytest.mark.parametrize("largest", [36, 1000, 16384])
def test_every_budget_forms_whole_tokens_and_takes_an_image(merge: int, smallest: int, largest: int) -> None:
    budgets = ladder((), smallest, largest, merge)
    assert budgets == tuple(sorted(set(budgets)))
    assert budgets[-1].patches == largest // merge**2 * merge**2
    for budget in budgets:
        assert budget.patches % merge**2 == 0
        assert 1 <= budget.images <= MAX_IMAGES


def test_explicit_budgets_are_taken_as_they_are() -> None:
    assert ladder((512, 64, 512), 64, 512, 2) == (Budget(64, 1), Budget(512, 8))


@pytest.mark.parametrize(("explicit", "floor"), [((6,), 0), ((1024,), 0), ((32,), 64)])
def test_explicit_budgets_that_cannot_be_are_refused(explicit: tuple[int, ...], floor: int) -> None:
    with pytest.raises(ConfigError, match="divisible by 4"):
        ladder(explicit, 64, 512, 2, floor)


@pytest.mark.parametrize(
    ("replay", "words"),
    [
        ({"backend": "cuda-graph"}, "needs a CUDA device"),
        ({"backend": "jit"}, "eager"),
        ({"budget": [1]}, "Extra inputs"),
        ({"budgets": [0]}, "greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(replay: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EncoderSettings.model_validate({"replay": replay})


def test_the_smallest_useful_image_follows_the_familys_rule() -> None:
    assert smallest_useful(NaflexRule()) == 256
    assert smallest_useful(NaflexRule(min_patches=None)) == 16


def test_one_patch_above_an_edge_takes_the_next_budget() -> None:
    """V1, V4: a budget edge, too many images, and nothing that fits."""
    budgets = (Budget(64, 2), Budget(128, 4))
    assert smallest_fit(budgets, 64, 2) == budgets[0]
    assert smallest_fit(budgets, 65, 1) == budgets[1]
    assert smallest_fit(budgets, 10, 3) == budgets[1]
    assert smallest_fit(budgets, 129, 1) is None
    assert smallest_fit(budgets, 10, 5) is None


def test_padding_that_costs_more_than_it_saves_is_not_paid() -> None:
    """A replay at 3 s beats eager at 10 ms a patch from 300 patches on."""
    book = CostBook([Budget(256, 4), Budget(512, 8)])
    book.note_replay(Budget(512, 8), 3.0)
    book.note_eager(400, 1, 4.0)
    assert book.choose(299, 1) is None
    assert book.choose(301, 1) == Budget(512, 8)
    assert book.choose(513, 1) is None
    assert book.price(500, 1) == 3.0
    assert book.price(280, 1) == pytest.approx(2.8)


def test_before_anything_is_measured_what_fits_is_replayed() -> None:
    book = CostBook([Budget(256, 4)])
    assert book.choose(10, 1) == Budget(256, 4)
    assert book.choose(300, 1) is None
    assert book.price(10, 1) == 256


def test_an_estimate_that_was_wrong_once_mends() -> None:
    """A replay that was slow for once during warm-up is tried again when it is only a little worse."""
    budget = Budget(256, 4)
    book = CostBook([budget])
    book.note_replay(budget, 1.5)
    book.note_eager(200, 1, 1.0)
    chosen = []
    for _ in range(20 * RETRY_EVERY):
        chosen.append(book.choose(200, 1))
        if chosen[-1] == budget:
            book.note_replay(budget, 0.5)
        else:
            book.note_eager(200, 1, 1.0)
    assert chosen[0] is None
    assert chosen[-2] == budget


def test_a_path_that_is_far_worse_is_never_tried_again() -> None:
    budget = Budget(256, 4)
    book = CostBook([budget])
    book.note_replay(budget, 9.0)
    book.note_eager(200, 1, 1.0)
    assert {book.choose(200, 1) for _ in range(3 * RETRY_EVERY)} == {None}
