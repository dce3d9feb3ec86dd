"""Which waiting images go into the next forward. Plain Python: no torch, no clock, no event loop.

Fair queueing by patches. Images form classes by priority and size; each image gets a rank when it arrives, the virtual
time at which its class would finish it if every class had its share of the device. Batches are filled in order of rank:

- a large image that waits delays small ones by one forward at most, since each class advances by itself;
- small ones cannot hold a large one back for ever, since their class advances with every one of them;
- interactive images have :data:`INTERACTIVE_SHARE` times the share of batch jobs, which still advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

from shared.errors import Busy

#: how much more of the device interactive images get than batch jobs when both wait
INTERACTIVE_SHARE = 16.0
#: patches per second that is assumed before the first forward was timed, for ``retry_after``
ASSUMED_SPEED = 1000.0
#: weight of the newest forward in the running estimate of the speed
SPEED_WEIGHT = 0.2
#: how much faster patches must get through for images to be left out of a batch
PACKING_GAIN = 1.05
#: seconds; bounds of ``retry_after``
MIN_RETRY, MAX_RETRY = 0.1, 30.0

Payload = TypeVar("Payload")


class Priority(IntEnum):
    """Who waits for the image."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass
class Waiting(Generic[Payload]):
    """One image in the queue.

    Attributes:
        key: identifies it; one image waits under one key.
        patches: its cost.
        priority: of the most urgent caller.
        rank: virtual finishing time; lower goes first.
        payload: whatever the owner needs.
        passed: whether it was once left out of a batch to save padding; that happens to no image twice.
    """

    key: str
    patches: int
    priority: Priority
    rank: float
    payload: Payload = field(repr=False)
    passed: bool = False


class Size(Protocol):
    """A fixed size that a forward can have."""

    @property
    def patches(self) -> int:
        """At most."""

    @property
    def images(self) -> int:
        """At most."""


class WaitingRoom(Generic[Payload]):
    """Images waiting for a forward.

    Args:
        max_images: images that may be in work at once.
        max_patches: patches of one forward; an image above it goes alone.

    Attributes:
        places_taken: images in work now.
    """

    def __init__(self, max_images: int, max_patches: int) -> None:
        self._max_images = max_images
        self._max_patches = max_patches
        self._waiting: dict[str, Waiting[Payload]] = {}
        self._now = 0.0
        self._finish: dict[tuple[Priority, int], float] = {}
        self._speed = ASSUMED_SPEED
        self._sizes: Sequence[Size] = ()
        self._price: Callable[[int, int], float] = lambda patches, images: float(patches)
        self.places_taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def patches(self) -> int:
        """Sum over the waiting images."""
        return sum(waiting.patches for waiting in self._waiting.values())

    @property
    def full_batch(self) -> bool:
        """Whether the next batch would not gain from waiting for company."""
        return self.patches >= self._max_patches

    def fill(self, patches: int) -> float:
        """Share of the largest batch that so many patches are."""
        return patches / self._max_patches

    def use_sizes(self, sizes: Sequence[Size], price: Callable[[int, int], float]) -> None:
        """Packs for these sizes from now on.

        Args:
            sizes: ascending; forwards have one of them, or their own size.
            price: expected seconds of a forward of so many patches and images, padding included.
        """
        self._sizes, self._price = sizes, price

    def payloads(self) -> Iterator[Payload]:
        """Of the waiting images, in order of arrival."""
        return (waiting.payload for waiting in self._waiting.values())

    @contextmanager
    def place(self) -> Iterator[None]:
        """Holds one of the places for the whole time that an image is in work, from decoding to its embedding.

        Raises:
            Busy: all are taken; says how long the waiting images need at the speed seen lately.
        """
        if self.places_taken >= self._max_images:
            seconds = min(max(self.patches / self._speed, MIN_RETRY), MAX_RETRY)
            raise Busy(f"the encoder has {self._max_images} images in work; try again soon", retry_after=seconds)
        self.places_taken += 1
        try:
            yield
        finally:
            self.places_taken -= 1

    def add(self, key: str, patches: int, priority: Priority, payload: Payload) -> None:
        """Queues an image under a key that is not waiting."""
        assert key not in self._waiting, "one image waits under one key"
        self._waiting[key] = Waiting(key, patches, priority, self._rank(patches, priority), payload)

    def promote(self, key: str) -> None:
        """An interactive caller has joined: a waiting batch image changes class."""
        waiting = self._waiting.get(key)
        if waiting is not None and waiting.priority is Priority.BATCH:
            waiting.priority = Priority.INTERACTIVE
            waiting.rank = min(waiting.rank, self._rank(waiting.patches, Priority.INTERACTIVE))

    def discard(self, key: str) -> None:
        """Drops an image that nobody waits for any more; unknown keys are fine."""
        self._waiting.pop(key, None)

    def take(self) -> list[Waiting[Payload]]:
        """Removes and returns the next batch: the image of lowest rank, then in order whatever still fits.

        With sizes, the batch ends where a size is full if patches then get through clearly faster than with all that
        fits: what is left out goes next. Images of one size end up next to each other, which lets attention treat them
        in one call.
        """
        order = sorted(self._waiting.values(), key=lambda one: one.rank)
        batch = self._best(order) if order else []
        for waiting in batch:
            del self._waiting[waiting.key]
        if not self._waiting:  # an idle device owes nobody anything
            self._finish.clear()
            self._now = 0.0
        elif batch:
            self._now = max(self._now, batch[0].rank)
        return sorted(batch, key=lambda one: one.patches)

    def _best(self, order: list[Waiting[Payload]]) -> list[Waiting[Payload]]:
        """The whole batch that fits, or one that fills a size so much better that leaving some out pays."""
        whole = _greedy(order, self._max_patches, len(order))
        must = {waiting.key for waiting in whole if waiting.passed}
        best, speed = whole, PACKING_GAIN * self._speed_of(whole)
        for size in reversed(self._sizes):  # of equals the largest
            if order[0].patches <= size.patches < self._max_patches:
                batch = _greedy(order, size.patches, size.images)
                if must <= {waiting.key for waiting in batch} and self._speed_of(batch) > speed:
                    best, speed = batch, self._speed_of(batch)
        chosen = {waiting.key for waiting in best}
        for waiting in whole:
            waiting.passed = waiting.passed or waiting.key not in chosen
        return best

    def _speed_of(self, batch: list[Waiting[Payload]]) -> float:
        """Patches per second that a batch is expected to reach."""
        patches = sum(waiting.patches for waiting in batch)
        return patches / max(self._price(patches, len(batch)), 1e-9)

    def note_speed(self, patches: int, seconds: float) -> None:
        """Learns from a finished forward how long a full queue takes."""
        self._speed += SPEED_WEIGHT * (patches / max(seconds, 1e-6) - self._speed)

    def _rank(self, patches: int, priority: Priority) -> float:
        share = INTERACTIVE_SHARE if priority is Priority.INTERACTIVE else 1.0
        lane = (priority, patches.bit_length())
        self._finish[lane] = max(self._now, self._finish.get(lane, 0.0)) + patches / share
        return self._finish[lane]


def _greedy(order: list[Waiting[Payload]], room: int, images: int) -> list[Waiting[Payload]]:
    """The first, and in order whatever still fits."""
    batch: list[Waiting[Payload]] = []
    for waiting in order:
        if not batch or waiting.patches <= room:
            batch.append(waiting)
            room -= waiting.patches
        if room <= 0 or len(batch) == images:
            break
    return batch
