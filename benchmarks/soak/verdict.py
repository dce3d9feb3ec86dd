"""Whether memory grows: the median slope of a process after its warm-up, and a word for it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
#: points of which slopes are taken; more are thinned out evenly
POINTS = 200
#: fewer say nothing
LEAST = 6
#: growth in all that is no leak, however short the time: an allocator's next few pages, MiB
SLACK_MIB = 2.0

#: (seconds, bytes)
Samples = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Verdict:
    """What became of one process.

    Attributes:
        word: ``flat``, ``settles`` (grew in the first half of the time alone), ``grows``, ``shrinks`` or ``brief``.
        slope: MiB an hour, median over all pairs of samples, of the whole time.
        late: the same of its second half.
        first, last: medians of the first and last tenth, MiB.
    """

    word: str
    slope: float
    late: float
    first: float
    last: float


def slope(samples: Samples) -> float:
    """Bytes a second, the median over all pairs of samples: a single step or peak does not move it."""
    step = max(1, len(samples) // POINTS)
    thin = samples[::step]
    pairs = itertools.combinations(thin, 2)
    return statistics.median((b - a) / (t - s) for (s, a), (t, b) in pairs if t > s)


def judge(samples: Samples, limit: float) -> Verdict:
    """The verdict on one process.

    Args:
        samples: after the warm-up, in order of time.
        limit: MiB an hour that still count as flat, as does whatever grew by less than :data:`SLACK_MIB`.
    """
    values = [value / MIB for _, value in samples]
    if len(samples) < LEAST:
        return Verdict("brief", 0.0, 0.0, values[0] if values else 0.0, values[-1] if values else 0.0)
    tenth = max(1, len(values) // 10)
    first, last = statistics.median(values[:tenth]), statistics.median(values[-tenth:])
    whole = slope(samples) * 3600 / MIB
    late = slope(samples[len(samples) // 2 :]) * 3600 / MIB
    hours = (samples[-1][0] - samples[0][0]) / 3600
    word = "shrinks" if whole * hours < -max(limit * hours, SLACK_MIB) else "flat"
    if whole * hours > max(limit * hours, SLACK_MIB):
        word = "grows" if late > limit else "settles"
    return Verdict(word, whole, late, first, last)
