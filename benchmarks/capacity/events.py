"""Time, and cores that tasks share."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[], None]


class Clock:
    """Simulated time: actions happen in the order of their times, equal times in the order of their planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._plan: list[tuple[float, int, Action]] = []

    def after(self, seconds: float, action: Action) -> None:
        """Plans an action."""
        heapq.heappush(self._plan, (self.now + seconds, next(self._numbers), action))

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._plan:
            self.now, _, action = heapq.heappop(self._plan)
            action()


@dataclass(eq=False)
class _Task:
    left: float
    threads: float
    done: Action
    speed: float = 0.0


class Host:
    """Cores that the tasks on them share evenly, none getting more than it has threads.

    Args:
        clock: the time.
        cores: how many.

    Attributes:
        spent: core seconds used so far.
    """

    def __init__(self, clock: Clock, cores: float) -> None:
        self._clock = clock
        self._cores = cores
        self._tasks: list[_Task] = []
        self._since = 0.0
        self._version = 0
        self.spent = 0.0

    def run(self, seconds: float, threads: float, done: Action) -> None:
        """Starts a task.

        Args:
            seconds: that it takes when it has all the cores it can use.
            threads: cores that it can use.
            done: called at its end.
        """
        self._advance()
        self._tasks.append(_Task(seconds * threads, threads, done))
        self._share()

    def _advance(self) -> None:
        passed = self._clock.now - self._since
        self._since = self._clock.now
        for task in self._tasks:
            task.left -= passed * task.speed
            self.spent += passed * task.speed

    def _share(self) -> None:
        """Those that want least are served first; what they leave is shared by the rest."""
        free, waiting = self._cores, sorted(self._tasks, key=lambda task: task.threads)
        for place, task in enumerate(waiting):
            task.speed = min(task.threads, free / (len(waiting) - place))
            free -= task.speed
        self._version += 1
        if self._tasks:
            version = self._version
            soonest = min(max(task.left, 0.0) / task.speed for task in self._tasks)
            self._clock.after(soonest, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:  # the shares have changed since this was planned
            return
        self._advance()
        first = min(self._tasks, key=lambda task: task.left / task.speed)
        self._tasks.remove(first)
        self._share()
        first.done()
