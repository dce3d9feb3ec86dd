"""Packing for fixed sizes: the least padding without leaving anybody behind."""

from __future__ import annotations

import random
from collections.abc import Callable

from encoder_service.batching import Priority, WaitingRoom
from encoder_service.replay.budgets import ladder, smallest_fit
from encoder_service.replay.costs import CostBook
from encoder_service.towers.base import Budget

BUDGETS = (Budget(16, 4), Budget(32, 8), Budget(64, 16), Budget(128, 32))


def padded(patches: int, images: int) -> float:
    """The price where only replay is possible."""
    budget = smallest_fit(BUDGETS, patches, images)
    return float(budget.patches if budget else patches)


def room(price: Callable[[int, int], float] = padded) -> WaitingRoom[None]:
    queue: WaitingRoom[None] = WaitingRoom(1000, 128)
    queue.use_sizes(BUDGETS, price)
    return queue


def add(queue: WaitingRoom[None], *patches: int) -> None:
    for number, count in enumerate(patches):
        queue.add(f"{number}", count, Priority.INTERACTIVE, None)


def take(queue: WaitingRoom[None]) -> list[int]:
    return [waiting.patches for waiting in queue.take()]


def test_a_batch_ends_where_a_budget_is_full() -> None:
    """72 patches would pay for 128; 64 and 8 pay for 64 and 16."""
    queue = room()
    add(queue, *[8] * 9)
    assert sum(take(queue)) == 64
    assert take(queue) == [8]


def test_all_go_together_when_splitting_gains_little() -> None:
    queue = room()
    add(queue, *[4] * 31)
    assert len(take(queue)) == 31


def test_at_the_price_of_an_eager_forward_nothing_is_split() -> None:
    queue = room(lambda patches, images: float(patches))
    add(queue, *[8] * 9)
    assert len(take(queue)) == 9


def test_an_image_is_left_out_for_padding_once_at_most() -> None:
    """The latency bound: what was passed over goes with the next batch, whatever that costs in padding."""
    queue = room()
    add(queue, *[8] * 9)
    left = {f"{number}" for number in range(9)} - {waiting.key for waiting in queue.take()}
    for number in range(3):
        queue.add(f"new{number}", 20, Priority.INTERACTIVE, None)
    assert left <= {waiting.key for waiting in queue.take()}


def test_a_budget_takes_no_more_images_than_it_was_made_for() -> None:
    queue = room()
    add(queue, *[1] * 40)
    sizes = []
    while len(queue):
        batch = take(queue)
        sizes.append(len(batch))
        assert smallest_fit(BUDGETS, sum(batch), len(batch)) or len(batch) == 40
    assert sum(sizes) == 40


def test_padding_of_a_realistic_mix_is_below_a_tenth() -> None:
    """64 callers who each send a picture when their last is done: thumbnails, photos, pages, in Isaac's patches."""
    budgets = ladder((), 256, 16384, 2)
    costs = CostBook(budgets)
    for budget in budgets:  # a tower whose fixed cost is that of 200 patches, eager twice that
        costs.note_replay(budget, (budget.patches + 200) / 1e4)
        costs.note_eager(budget.patches, 1, (budget.patches + 400) / 1e4)
    queue: WaitingRoom[None] = WaitingRoom(1000, 16384)
    queue.use_sizes(budgets, costs.price)
    rng, number, used, run = random.Random(8), 0, 0, 0
    for _ in range(400):
        while len(queue) < 64:
            patches = rng.choice([256, 256, 320, 576, 1024, 1024, 1200, 1764, 2304, 3600, 6144])
            queue.add(f"{number}", patches, Priority(number % 2), None)
            number += 1
        batch = queue.take()
        patches = sum(waiting.patches for waiting in batch)
        chosen = costs.choose(patches, len(batch))
        used, run = used + patches, run + (chosen.patches if chosen else patches)
    assert (run - used) / run < 0.10


def test_random_traffic_with_budgets_serves_everybody_once() -> None:
    rng, queue = random.Random(9), room()
    entered: dict[str, int] = {}
    left: dict[str, int] = {}
    for turn in range(1500):
        for _ in range(rng.choice([0, 1, 2, 4]) if turn < 1000 else 0):
            key = f"{len(entered)}"
            queue.add(key, rng.choice([1, 4, 9, 16, 40, 128, 200]), Priority(rng.randrange(2)), None)
            entered[key] = turn
        first = min(queue._waiting.values(), key=lambda one: one.rank, default=None)
        batch = queue.take()
        assert first is None or first in batch
        for waiting in batch:
            assert waiting.key not in left
            left[waiting.key] = turn
    assert left.keys() == entered.keys()
