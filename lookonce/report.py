"""Tables for people: where an answer's embeddings came from and what each step took."""

from __future__ import annotations

from collections.abc import Sequence

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
    """One row per answer: question, answer, source of its images, milliseconds per stage."""
    table = Table(title="Milliseconds per step", caption="– : this step was not needed", show_lines=False)
    for heading in ("question", "answer", "embedding from"):
        table.add_column(heading, overflow="fold")
    for _, _, heading in STAGES:
        table.add_column(heading, justify="right")
    for question, answer in answers:
        images = answer.report["images"]
        sources = ", ".join({"cache": "Redis", "encoder": "encoder"}[image["source"]] for image in images) or "–"
        table.add_row(
            question, answer.text, sources, *(milliseconds(_seconds(answer, where, name)) for where, name, _ in STAGES)
        )
    return table


def _seconds(answer: Answer, where: str, name: str) -> float | None:
    """The engine's time, or the longest among the images, which go side by side."""
    if where == "engine":
        return answer.report["timings"].get(name)
    return max((image["timings"][name] for image in answer.report["images"] if name in image["timings"]), default=None)
