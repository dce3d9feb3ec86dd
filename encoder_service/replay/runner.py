"""Runs batches: puts them together on the host, then replays a budget's program or goes the eager way."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from encoder_service.device import Embedded, Patches, embed, smallest_batch
from encoder_service.replay.backends import Backend, Program
from encoder_service.replay.budgets import smallest_fit
from encoder_service.replay.buffers import StaticBuffers
from encoder_service.replay.costs import CostBook
from encoder_service.replay.slots import Slot, make_slots
from encoder_service.towers.base import Budget, Plan, Tower

#: a budget to replay, None for the eager way, or whatever the measured costs say
Choice: TypeAlias = Budget | Literal["measured"] | None


@dataclass(frozen=True)
class Staged:
    """A batch that is ready for the device.

    Attributes:
        images: what it holds; the eager path reads them from here.
        budget: whose program will run; None for the eager path.
        plan, slot: of a replay.
        seconds: of the host's part.
    """

    images: Sequence[Patches]
    budget: Budget | None
    plan: Plan | None
    slot: Slot | None
    seconds: float


class Replay:
    """A tower with fixed batch sizes. Without budgets every batch goes the eager way, at its own size.

    :meth:`stage` may run in one thread while :meth:`launch` runs in another; each of them in one thread only.

    Args:
        tower: in evaluation mode, on its device.
        budgets: ascending; none switches replay off.
        backend: makes the programs.
        depth: batches under way at once, from staged to launched.

    Attributes:
        costs: what the choice of a path rests on.
        depth: as given.
    """

    def __init__(self, tower: Tower, budgets: Sequence[Budget], backend: Backend, *, depth: int = 1) -> None:
        self.tower = tower
        self.budgets = tuple(budgets)
        self.backend = backend
        self.depth = depth
        self._device = next(tower.parameters()).device
        self.costs = CostBook(self.budgets, smallest_batch(tower))
        self._programs: dict[Budget, Program] = {}
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self.static: StaticBuffers | None = None
        if self.budgets:
            self.static = StaticBuffers(tower, self.budgets, self._device)
            for slot in make_slots(depth, self.static, tower, self.budgets):
                self._free.put(slot)

    def prepare(self, budget: Budget, images: Sequence[Patches]) -> None:
        """Compiles or captures one budget on a batch that fits it."""
        assert self.static is not None, "there are no budgets"
        self.static.inputs(budget).write(images, self._plan(images, budget))
        with torch.inference_mode():
            self._programs[budget] = self.backend.prepare(
                self.tower, self.static.inputs(budget), self.static.output(budget)
            )

    def fitting(self, patches: int, images: int) -> Budget | None:
        """The smallest budget that takes the batch; None when none does."""
        return smallest_fit(self.budgets, patches, images)

    def stage(self, images: Sequence[Patches], *, path: Choice = "measured") -> Staged:
        """The host's part: choice of the path, plan, copies; waits while :attr:`depth` batches are under way.

        Args:
            images: at least one.
            path: a budget, None for the eager way, or by default what the measured costs say.

        Raises:
            GridError: a grid that the tower cannot take.
        """
        begin = time.perf_counter()
        used = sum(image.grid.patches for image in images)
        budget = self.costs.choose(used, len(images)) if path == "measured" else path
        if budget not in self._programs:
            return Staged(images, None, None, None, time.perf_counter() - begin)
        plan = self._plan(images, budget)
        slot = self._free.get()
        try:
            slot.host(budget).write(images, plan)
            slot.send(budget)
        except BaseException:
            self._free.put(slot)
            raise
        return Staged(images, budget, plan, slot, time.perf_counter() - begin)

    def launch(self, staged: Staged) -> Embedded:
        """The device's part; learns from the time that it took.

        Returns:
            Rows in memory of their own, on the host.
        """
        used = sum(image.grid.patches for image in staged.images)
        if staged.budget is None or staged.plan is None or staged.slot is None:
            result = embed(self.tower, staged.images)
            self.costs.note_eager(used, len(staged.images), result.seconds)
            return result
        begin = time.perf_counter()
        try:
            with torch.inference_mode():
                staged.slot.fill(staged.budget)
                self._programs[staged.budget]()
                rows = staged.slot.fetch(sum(staged.plan.tokens))
        finally:
            self.abandon(staged)
        seconds = time.perf_counter() - begin
        self.costs.note_replay(staged.budget, seconds)
        return Embedded(
            list(torch.split(rows, staged.plan.tokens)),
            staged.budget.patches - used,
            seconds + staged.seconds,
            staged.budget,
            staged.seconds,
        )

    def abandon(self, staged: Staged) -> None:
        """Gives the slot back; for a batch that will not be launched."""
        if staged.slot is not None:
            self._free.put(staged.slot)

    def embed(self, images: Sequence[Patches], *, path: Choice = "measured") -> Embedded:
        """Both parts at once, in the device's thread."""
        return self.launch(self.stage(images, path=path))

    def _plan(self, images: Sequence[Patches], budget: Budget) -> Plan:
        return self.tower.plan([image.grid for image in images], budget)
