"""The queue's policy, in plain Python."""

from __future__ import annotations

import random

import pytest

from encoder_service.batching import Priority, WaitingRoom
from shared.errors import Busy

BATCH, INTERACTIVE = Priority.BATCH, Priority.INTERACTIVE


def room(max_images: int = 1000, max_patches: int = 100) -> WaitingRoom[None]:
    return WaitingRoom(max_images, max_patches)


def add(queue: WaitingRoom[None], *images: tuple[str, int], priority: Priority = INTERACTIVE) -> None:
    for key, patches in images:
        queue.add(key, patches, priority, None)


def taken(queue: WaitingRoom[None]) -> list[str]:
    return [waiting.key for waiting in queue.take()]


def test_fills_a_batch_up_to_its_patches() -> None:
    queue = room()
    add(queue, *((f"{n}", 30) for n in range(5)))
    assert taken(queue) == ["0", "1", "2"]
    assert taken(queue) == ["3", "4"]
    assert taken(queue) == []


def test_what_does_not_fit_lets_smaller_ones_pass_but_goes_next() -> None:
    queue = room()
    add(queue, ("a", 60), ("b", 60), ("c", 40))
    assert sorted(taken(queue)) == ["a", "c"]
    assert taken(queue) == ["b"]


def test_an_image_above_the_budget_goes_alone() -> None:
    queue = room()
    add(queue, ("huge", 5000), ("small", 10))
    assert [taken(queue), taken(queue)] in ([["huge"], ["small"]], [["small"], ["huge"]])


def test_equal_sizes_are_neighbours() -> None:
    queue = room()
    add(queue, ("a", 10), ("b", 20), ("c", 10), ("d", 20))
    sizes = [waiting.patches for waiting in queue.take()]
    assert sizes == sorted(sizes)


def test_same_class_is_first_come_first_served() -> None:
    queue = room(max_patches=10)
    add(queue, *((f"{n}", 10) for n in range(20)))
    assert [taken(queue)[0] for _ in range(20)] == [f"{n}" for n in range(20)]


def test_a_hundred_large_images_delay_a_small_one_by_one_forward() -> None:
    queue = room()
    add(queue, *((f"large{n}", 100) for n in range(100)))
    assert taken(queue) == ["large0"]
    add(queue, ("small", 4))
    assert "small" in taken(queue)


def test_a_stream_of_small_images_does_not_starve_a_large_one() -> None:
    queue = room()
    add(queue, *((f"s{n}", 10) for n in range(30)), ("large", 95))
    number, forwards = 30, 0
    while "large" not in taken(queue):
        forwards += 1
        add(queue, *((f"s{n}", 10) for n in range(number, number + 10)))  # the stream never lets the queue shrink
        number += 10
        assert forwards < 20
    assert forwards > 0


def test_interactive_goes_before_batch_and_batch_still_advances() -> None:
    queue = room()
    add(queue, *((f"job{n}", 50) for n in range(50)), priority=BATCH)
    taken(queue)
    served = []
    for turn in range(100):
        add(queue, (f"user{turn}a", 50), (f"user{turn}b", 50))
        served += taken(queue)
    users = sum(key.startswith("user") for key in served)
    jobs = len(served) - users
    assert users > 10 * jobs > 0


def test_an_interactive_caller_promotes_a_waiting_batch_image() -> None:
    queue = room(max_patches=50)
    add(queue, *((f"job{n}", 50) for n in range(50)), priority=BATCH)
    queue.promote("job49")
    assert "job49" in taken(queue) + taken(queue)
    queue.promote("unknown")


def test_dropped_images_take_no_room() -> None:
    queue = room()
    add(queue, ("a", 60), ("b", 60), ("c", 40))
    queue.discard("a")
    queue.discard("a")
    assert sorted(taken(queue)) == ["b", "c"]
    assert not len(queue)


def test_a_full_queue_says_when_to_come_back() -> None:
    queue = room(max_images=3)
    queue.note_speed(1000, 1.0)
    places = [queue.place() for _ in range(3)]
    for place in places:
        place.__enter__()
    add(queue, ("a", 3000))
    with pytest.raises(Busy) as refused, queue.place():
        pass
    assert 2 < refused.value.retry_after < 4
    for place in places:
        place.__exit__(None, None, None)
    with queue.place():
        assert queue.places_taken == 1
    assert queue.places_taken == 0


def test_a_place_is_given_back_after_an_error() -> None:
    queue = room(max_images=1)
    for _ in range(3):
        with pytest.raises(KeyError), queue.place():
            raise KeyError
    assert queue.places_taken == 0


def test_random_traffic_serves_everybody_once_within_the_budget() -> None:
    """Invariants over 3,000 arrivals: each image leaves once, batches fit, nobody waits beyond reason."""
    choice = random.Random(3)
    queue = room(max_images=10**6, max_patches=200)
    entered, left, number = {}, {}, 0
    for turn in range(2000):
        for _ in range(choice.choice([0, 1, 1, 2, 3]) if turn < 1500 else 0):
            key = f"{number}"
            add(queue, (key, choice.choice([4, 16, 64, 190, 350])), priority=choice.choice([INTERACTIVE, BATCH]))
            entered[key] = turn
            number += 1
        batch = queue.take()
        assert len(batch) <= 1 or sum(waiting.patches for waiting in batch) <= 200
        for waiting in batch:
            assert waiting.key not in left
            left[waiting.key] = turn
    assert left.keys() == entered.keys()
