"""What ``lookonce demo`` shows: captions of sample pictures, then two questions about one of them."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lookonce.client import Answer, Client, data_url
from lookonce.report import answer_table


async def show(url: str, samples: Path, out: Console) -> None:
    """Runs the demo against a service.

    Args:
        url: base URL of the service.
        samples: folder with pictures and ``samples.json``: file name → what is truly in it.
        out: where to print.
    """
    truths: dict[str, str] = json.loads((samples / "samples.json").read_text())["captions"]
    async with Client(url) as client:
        model = await client.model()
        table = Table(title="Captions")
        for heading in ("picture", "the model says", "true", "embedding from"):
            table.add_column(heading, overflow="fold")
        answers: list[tuple[str, Answer]] = []
        for name, truth in truths.items():
            answer = await client.ask(model, [data_url(samples / name)], "Describe the picture.", max_tokens=96)
            source = "Redis" if answer.report["images"][0]["source"] == "cache" else "encoder"
            table.add_row(name, answer.text, "yes" if answer.text == truth else f"no: {truth}", source)
            answers = answers or [("Describe the picture.", answer)]
        out.print(table)
        first = data_url(samples / next(iter(truths)))
        for question in ("What is at row 1 column 1?", "Where is the purple star?"):
            answers.append((question, await client.ask(model, [first], question, max_tokens=32)))
    out.print(answer_table(answers))
    name = next(iter(truths))
    out.print(f"Three questions about {name}: the first had it encoded, the others took its embedding from Redis.")
