"""What forwards cost, learnt from those that ran, and the choice that follows. Plain Python.

A replay costs the same however full its budget is, an eager forward by its patches. So a batch that fills its budget
poorly may be cheaper without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from encoder_service.replay.budgets import smallest_fit
from encoder_service.towers.base import Budget

#: weight of the newest forward in the running estimates
NEWEST = 0.2
#: every so many choices of one budget, the path that looks a little worse runs, so that its estimate stays true
RETRY_EVERY = 50
#: how much worse is "a little"
RETRY_WITHIN = 2.0


@dataclass
class Cost:
    """Estimates for the batches whose smallest budget is this one; None before the first forward.

    Attributes:
        replay: seconds of one replay.
        eager: seconds per patch of an eager forward.
        choices: how often a path was chosen.
    """

    replay: float | None = None
    eager: float | None = None
    choices: int = 0


class CostBook:
    """Costs per budget.

    Args:
        budgets: ascending.
        floor: patches that an eager forward runs with at least.
    """

    def __init__(self, budgets: Sequence[Budget], floor: int = 0) -> None:
        self.budgets = tuple(budgets)
        self._floor = floor
        self._costs: dict[Budget | None, Cost] = {budget: Cost() for budget in (*self.budgets, None)}

    def of(self, budget: Budget | None) -> Cost:
        """Of one budget; None stands for batches that fit none."""
        return self._costs[budget]

    def note_replay(self, budget: Budget, seconds: float) -> None:
        """A replay ran."""
        cost = self._costs[budget]
        cost.replay = _blend(cost.replay, seconds)

    def note_eager(self, patches: int, images: int, seconds: float) -> None:
        """An eager forward over a batch ran."""
        cost = self._costs[smallest_fit(self.budgets, patches, images)]
        cost.eager = _blend(cost.eager, seconds / max(patches, self._floor, 1))

    def choose(self, patches: int, images: int) -> Budget | None:
        """The budget to replay for a batch, or None for the eager path."""
        budget = smallest_fit(self.budgets, patches, images)
        if budget is None:
            return None
        cost = self._costs[budget]
        cost.choices += 1
        eager = self._eager(cost, patches)
        if cost.replay is None or eager is None:
            return budget
        best, other = (budget, None) if cost.replay <= eager else (None, budget)
        close = max(cost.replay, eager) <= RETRY_WITHIN * min(cost.replay, eager)
        return other if close and cost.choices % RETRY_EVERY == 0 else best

    def price(self, patches: int, images: int) -> float:
        """Expected seconds of a batch on its better path; only ratios count before anything was measured."""
        budget = smallest_fit(self.budgets, patches, images)
        cost = self._costs[budget]
        known = [seconds for seconds in (cost.replay, self._eager(cost, patches)) if seconds is not None]
        if known:
            return min(known)
        return self._unmeasured(budget.patches if budget else max(patches, self._floor))

    def _unmeasured(self, patches: int) -> float:
        """By the nearest estimate per patch that there is."""
        for budget, cost in reversed(self._costs.items()):
            if cost.eager is not None:
                return cost.eager * patches
            if cost.replay is not None and budget is not None:
                return cost.replay / budget.patches * patches
        return float(patches)

    def _eager(self, cost: Cost, patches: int) -> float | None:
        return None if cost.eager is None else cost.eager * max(patches, self._floor)


def _blend(former: float | None, seconds: float) -> float:
    return seconds if former is None else former + NEWEST * (seconds - former)
