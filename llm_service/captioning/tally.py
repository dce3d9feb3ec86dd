"""What is told to a person on the way: how many, how fast, how long still, and what holds it up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from llm_service.captioning.rows import Outcome

STAGES = ("read", "encode", "answer")
#: over which rate and bottleneck are reckoned, seconds
WINDOW = 30.0
#: a rate over fewer counts from the beginning of the run instead
FEW_SECONDS = 2.0


class Tally:
    """Counts outcomes of one run.

    Args:
        total: rows of the source; None when nobody knows.
        before: rows that earlier runs finished.
        clock: seconds that only go up.
    """

    def __init__(self, total: int | None, before: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.before = before
        self.captioned = self.failed = self.cached = self.duplicates = 0
        self.prompt_tokens = self.completion_tokens = 0
        self._clock = clock
        self._begin = clock()
        # of each second with work in it: when, rows, seconds by stage
        self._recent: deque[tuple[float, int, dict[str, float]]] = deque()

    def add(self, outcome: Outcome) -> None:
        """Counts one row."""
        self.failed += outcome.error is not None
        self.captioned += outcome.error is None
        self.cached += outcome.cached
        self.duplicates += outcome.duplicate
        if not outcome.duplicate:
            self.prompt_tokens += sum(line["prompt_tokens"] for line in outcome.lines)
            self.completion_tokens += sum(line["completion_tokens"] for line in outcome.lines)
        self._remember(outcome)

    def _remember(self, outcome: Outcome) -> None:
        now = self._clock()
        if not self._recent or now - self._recent[-1][0] >= 1:
            self._recent.append((now, 0, dict.fromkeys(STAGES, 0.0)))
        at, rows, seconds = self._recent[-1]
        for stage, spent in outcome.seconds.items():
            seconds[stage] += spent
        self._recent[-1] = (at, rows + 1, seconds)
        while now - self._recent[0][0] > WINDOW:
            self._recent.popleft()

    @property
    def done(self) -> int:
        """Rows of this run."""
        return self.captioned + self.failed

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self._begin

    @property
    def rate(self) -> float:
        """Rows per second lately; 0 while nothing has come."""
        if not self._recent:
            return 0.0
        now, first = self._clock(), self._recent[0][0]
        span = now - (first if now - first > FEW_SECONDS else self._begin)
        return sum(rows for _, rows, _ in self._recent) / span if span > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the present rate; None when nobody can know."""
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.before - self.done) / self.rate

    @property
    def bottleneck(self) -> str | None:
        """The stage that most rows are in: where rows spend their time is where they queue."""
        spent = {stage: sum(seconds[stage] for _, _, seconds in self._recent) for stage in STAGES}
        return max(spent, key=lambda stage: spent[stage]) if any(spent.values()) else None
