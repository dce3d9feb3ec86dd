"""Tables for people: where an answer's embeddings came from and what each step took."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lookonce.client import Answer

#: stages in the order in which a request goes through them: (name in the report, column heading)
STAGES = (
    ("fetch", "fetch"),
    ("hash", "hash"),
    ("lookup", "look up"),
    ("decode", "decode"),
    ("preprocess", "patches"),
    ("queue", "queue"),
    ("encode", "encode"),
    ("put", "put"),
    ("load", "cache get"),
    ("prefill", "prefill"),
    ("decode_tokens", "answer"),
)


def milliseconds(seconds: float | None) -> str:
    """``12.3``, or a dash for a stage that did not happen."""
    return "–" if seconds is None else f"{1000 * seconds:.1f}"


def answer_table(answers: Sequence[tuple[str, Answer]]) -> Table:
    """One row per answer: question, answer, source of its images, milliseconds per stage."""
    table = Table(title="Milliseconds per step", caption="– : this step was not needed", show_lines=False)
    for heading in ("question", "answer", "embedding from"):
        table.add_column(heading, overflow="fold")
    for _, heading in STAGES:
        table.add_column(heading, justify="right")
    for question, answer in answers:
        images = answer.report["images"]
        sources = ", ".join({"cache": "Redis", "encoder": "encoder"}[image["source"]] for image in images) or "–"
        table.add_row(question, answer.text, sources, *(milliseconds(_stage(answer, name)) for name, _ in STAGES))
    return table


def _stage(answer: Answer, name: str) -> float | None:
    """Longest time among the images (they run side by side), or the engine's."""
    times = [image["timings"][name] for image in answer.report["images"] if name in image["timings"]]
    engine = answer.report["timings"].get(name)
    return max(times) if times else engine
