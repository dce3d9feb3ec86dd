"""How a captioning job shows itself while it runs: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from llm_service.captioning.tally import Tally

#: between two lines outside a terminal, seconds
LINE_SECONDS = 10.0
#: between two looks of the bar
BAR_SECONDS = 0.2


def duration(seconds: float) -> str:
    """``1:02:03``, or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def note(tally: Tally) -> str:
    """Rate, time left, cache hits, errors, bottleneck."""
    parts = [f"{tally.rate:.1f} images/s"]
    if (left := tally.seconds_left) is not None:
        parts.append(f"{duration(left)} left")
    parts.append(f"{tally.cached} from the cache")
    if tally.duplicates:
        parts.append(f"{tally.duplicates} duplicates")
    parts.append(f"{tally.failed} failed")
    if (stage := tally.bottleneck) is not None:
        parts.append(f"rows wait for: {stage}")
    return ", ".join(parts)


@contextmanager
def progress(console: Console) -> Iterator[tuple[Callable[[Tally], None], Callable[[str], None]]]:
    """What to call after every row, and what to call with sentences."""
    columns = (TextColumn("captions"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("", total=None, note="")
    last = 0.0

    def say(sentence: str) -> None:
        console.print(f"[dim]·[/] {sentence}", highlight=False)

    def watch(tally: Tally) -> None:
        nonlocal last
        done = tally.before + tally.done
        now = time.monotonic()
        if now - last < (LINE_SECONDS if bar.disable else BAR_SECONDS) and done != tally.total:
            return
        last = now
        if bar.disable:
            console.print(f"{done}/{tally.total or '?'} captions, {note(tally)}", highlight=False, soft_wrap=True)
        else:
            bar.update(task, completed=done, total=tally.total, note=note(tally))

    with bar:
        yield watch, say
