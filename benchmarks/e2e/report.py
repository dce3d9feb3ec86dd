"""Figures to Markdown tables and plots."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.svg import Bars, bar_chart

Figures = dict[str, Any]
MONOLITHIC = "vllm serve"
MIB = 1 << 20

HEAD = (
    "| workload | side | requests (failed) | requests/s | TTFT ms | inter-token p50 / p99 ms | CPU s a request "
    "| memory MiB | requests/s ours : theirs |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


def tables(figures: Figures) -> str:
    """All tables that there are figures for."""
    machine = figures["machine"]
    parts = [
        f"Cores {machine['cores']}, {machine['threads']} threads per engine, language models "
        f"{'compiled' if machine['compiled'] else 'not compiled'} on both sides."
    ]
    if "rows" in figures:
        parts.append(_load_table(figures["rows"]))
        parts.append(_cached(figures["rows"]))
    if "bfloat16" in figures:
        parts.append("Our tower in bfloat16, the language model as before:\n\n" + _load_table(figures["bfloat16"]))
    if "restarts" in figures:
        parts.append(_restarts(figures["restarts"]))
    if "bursts" in figures:
        parts.append(_bursts(figures["bursts"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _load_table(rows: list[Figures]) -> str:
    lines = [HEAD]
    for row in rows:
        ratio = "" if row["side"] == MONOLITHIC else f"{row['rate'] / _other(rows, row)['rate']:.2f}×"
        lines.append(
            f"| {row['workload']} | {row['side']} | {row['requests']} ({row['failed']}) | {row['rate']:.3f} "
            f"| {1000 * row['ttft']:.0f} | {1000 * row['gap_p50']:.0f} / {1000 * row['gap_p99']:.0f} "
            f"| {row['cpu']:.2f} | {row['memory'] / MIB:.0f} | {ratio} |"
        )
    return "\n".join(lines)


def _other(rows: list[Figures], row: Figures) -> Figures:
    return next(one for one in rows if one["workload"] == row["workload"] and one["side"] == MONOLITHIC)


def _cached(rows: list[Figures]) -> str:
    """What a cached picture adds to the first token of a text of the same length."""
    lines = ["| one client | text TTFT ms | cached picture TTFT ms | it adds |", "|---|---:|---:|---:|"]
    for row in rows:
        kinds = row["ttft_by_kind"]
        if row["workload"].startswith("cached"):
            text, image = kinds["text"], kinds["image"]
            lines.append(
                f"| {row['side']} | {1000 * text:.0f} | {1000 * image:.0f} | {100 * (image / text - 1):+.1f} % |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def _restarts(restarts: list[Figures]) -> str:
    lines = [
        "| after a cold restart | ready s | first answer s after the start | TTFT of the first answers, median ms |",
        "|---|---:|---:|---:|",
    ]
    for one in restarts:
        lines.append(f"| {one['side']} | {one['ready']:.1f} | {one['first']:.1f} | {1000 * median(one['ttft']):.0f} |")
    return "\n".join(lines)


def _bursts(bursts: list[Figures]) -> str:
    lines = ["| at once | sent | answered | right | seconds |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {b['side']} | {b['sent']} | {b['answered']} | {b['right']} | {b['seconds']:.0f} |" for b in bursts]
    return "\n".join(lines)


def write_plots(figures: Figures, folder: Path) -> None:
    """One SVG file a question."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = figures.get("rows", [])
    sides = sorted({row["side"] for row in rows}, key=lambda side: side != MONOLITHIC)
    for name, title, unit, value in (
        ("rate", "Requests per second", "1/s", lambda row: row["rate"]),
        ("ttft", "Time to first token, median", "ms", lambda row: 1000 * row["ttft"]),
        ("gaps", "Time between tokens, 99th percentile", "ms", lambda row: 1000 * row["gap_p99"]),
        ("cpu", "Processor time of one request", "s", lambda row: row["cpu"]),
    ):
        groups = list(dict.fromkeys(row["workload"] for row in rows))
        series = {
            side: [
                next(value(row) for row in rows if (row["workload"], row["side"]) == (group, side)) for group in groups
            ]
            for side in sides
        }
        if groups:
            (folder / f"e2e-{name}.svg").write_text(bar_chart(Bars(title, unit, groups, series)))
