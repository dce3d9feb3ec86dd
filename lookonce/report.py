"""Tables for people: where an answer's embeddings came from and what each step took."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from lookonce.client import Answer

#: steps in the order in which a request goes through them: (where it is timed, its name there, column heading)
STAGES = (
    ("image", "fetch", "fetch"),
    ("image", "hash", "hash"),
    ("image", "lookup", "look up"),
    ("image", "decode", "decode"),
    ("image", "preprocess", "patches"),
    ("image", "queue", "queue"),
    ("image", "encode", "encode"),
    ("image", "put", "put"),
    ("engine", "queue", "cache get"),  # the engine defers a request until its embeddings are here
    ("engine", "prefill", "prefill"),
    ("engine", "decode", "answer"),
)


def milliseconds(seconds: float | None) -> str:
    """``12.3``, or a dash for a stage that did not happen."""
    return "–" if seconds is None else f"{1000 * seconds:.1f}"


def answer_table(answers: Sequence[tuple[str, Answer]]) -> Table:
    """A column per question: its answer, the source of its images, milliseconds per step."""
    table = Table(title="Milliseconds per step", caption="– : this step was not needed")
    table.add_column("question")
    for question, _ in answers:
        table.add_column(question, overflow="fold", justify="right")
    given = [answer for _, answer in answers]
    table.add_row("answer", *(escape(answer.text) for answer in given))
    table.add_row("embedding from", *(_sources(answer) for answer in given), end_section=True)
    for where, name, heading in STAGES:
        table.add_row(heading, *(milliseconds(_seconds(answer, where, name)) for answer in given))
    return table


def _sources(answer: Answer) -> str:
    names = {"cache": "Redis", "encoder": "encoder"}
    return ", ".join(names[image["source"]] for image in answer.report["images"]) or "–"


def _seconds(answer: Answer, where: str, name: str) -> float | None:
    """The engine's time, or the longest among the images, which go side by side."""
    if where == "engine":
        return answer.report["timings"].get(name)
    return max((image["timings"][name] for image in answer.report["images"] if name in image["timings"]), default=None)
