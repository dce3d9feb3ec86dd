"""Plots as hand-written SVG: bars in groups, lines over logarithmic axes, and time lines. No plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#7a869a", "#1f6feb", "#d29922", "#3fb950", "#db61a2")
WIDTH, LABELS, BAR, GAP, TOP = 860, 260, 14, 12, 56
STYLE = "font-family:system-ui,sans-serif;font-size:12px"


@dataclass(frozen=True)
class Bars:
    """Bars in groups.

    Attributes:
        title, unit: above the plot, and behind every number.
        groups: names from top to bottom.
        series: values of every side, one a group.
    """

    title: str
    unit: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Lines:
    """Lines over two logarithmic axes.

    Attributes:
        title: above the plot.
        across, up: names of the axes.
        series: points of every line.
    """

    title: str
    across: str
    up: str
    series: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Panel:
    """Steps over time, from zero.

    Attributes:
        title: above the panel.
        series: (seconds, value) of every line, in order of time.
    """

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class TimeLine:
    """Panels above each other over one axis of time.

    Attributes:
        title: above the plot.
        panels: from top to bottom.
        phases: name, first and last second of stretches that are shaded.
    """

    title: str
    panels: Sequence[Panel]
    phases: Sequence[tuple[str, float, float]]


def time_line(plot: TimeLine) -> str:
    """The SVG text; a value holds until the next one."""
    left, right, height, gap, top = 60, WIDTH - 20, 110, 46, TOP + 20
    end = max(at for panel in plot.panels for line in panel.series.values() for at, _ in line)
    bottom = top + len(plot.panels) * (height + gap) - gap

    def across(seconds: float) -> float:
        return left + (right - left) * min(seconds, end) / end

    parts = [_text(12, 22, plot.title, "font-weight:600;font-size:15px")]
    for name, begin, until in plot.phases:
        x, width = across(begin), across(until) - across(begin)
        parts.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{bottom - top}" fill="#f0f4fa"/>')
        parts.append(_text(x + 4, 44, name, "fill:#57606a"))
    for number, panel in enumerate(plot.panels):
        parts += _steps(panel, across, left, right, top + number * (height + gap), height)
    for seconds in range(0, int(end) + 1, 60):
        parts.append(_text(across(seconds), bottom + 18, f"{seconds} s", "text-anchor:middle;fill:#57606a"))
    return _document(bottom + 32, parts)


def _steps(
    panel: Panel, across: Callable[[float], float], left: float, right: float, top: float, height: float
) -> list[str]:
    highest = max((value for line in panel.series.values() for _, value in line), default=1.0) or 1.0
    parts = [_text(left, top - 8, panel.title, "font-weight:600"), *_legend(list(panel.series), top - 8, left + 150)]
    for value in (0.0, highest):
        y = top + height * (1 - value / highest)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(_text(left - 6, y + 4, _short(value), "text-anchor:end"))
    for number, line in enumerate(panel.series.values()):
        places = [(across(at), top + height * (1 - value / highest)) for at, value in line]
        corners = [(x, before) for (x, _), (_, before) in zip(places[1:], places[:-1], strict=True)]
        path = [places[0], *(point for pair in zip(corners, places[1:], strict=True) for point in pair)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"/>')
    return parts


def bar_chart(bars: Bars) -> str:
    """The SVG text; bars are as long as their values, from zero."""
    step = BAR * len(bars.series) + GAP
    height = TOP + step * len(bars.groups) + GAP
    finite = [value for values in bars.series.values() for value in values if math.isfinite(value)]
    scale = (WIDTH - LABELS - 90) / (max(finite, default=1.0) or 1.0)
    parts = [_text(12, 22, bars.title, "font-weight:600;font-size:15px"), *_legend(list(bars.series), 40)]
    for place, group in enumerate(bars.groups):
        top = TOP + place * step
        parts.append(_text(LABELS - 8, top + BAR * len(bars.series) / 2 + 4, group, "text-anchor:end"))
        for number, values in enumerate(bars.series.values()):
            if not math.isfinite(values[place]):
                continue
            y, length = top + number * BAR, values[place] * scale
            parts.append(
                f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{COLOURS[number]}"/>'
            )
            parts.append(
                _text(LABELS + length + 6, y + BAR - 4, f"{_short(values[place])} {bars.unit}", "fill:#57606a")
            )
    return _document(height, parts)


def line_chart(lines: Lines) -> str:
    """The SVG text; a grid line at every power of ten."""
    left, right, top, bottom = 80, WIDTH - 20, TOP + 10, 400
    points = [point for series in lines.series.values() for point in series]
    x_low, x_high = _decades([x for x, _ in points])
    y_low, y_high = _decades([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * (math.log10(x) - x_low) / (x_high - x_low),
            bottom - (bottom - top) * (math.log10(y) - y_low) / (y_high - y_low),
        )

    parts = [_text(12, 22, lines.title, "font-weight:600;font-size:15px"), *_legend(list(lines.series), 40)]
    for power in range(x_low, x_high + 1):
        x, _ = place(10.0**power, 10.0**y_low)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#d0d7de"/>')
        parts.append(_text(x, bottom + 16, _short(10.0**power), "text-anchor:middle"))
    for power in range(y_low, y_high + 1):
        _, y = place(10.0**x_low, 10.0**power)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(_text(left - 6, y + 4, _short(10.0**power), "text-anchor:end"))
    parts.append(_text((left + right) / 2, bottom + 34, lines.across, "text-anchor:middle"))
    parts.append(_text(left, top - 6, lines.up, ""))
    for number, series in enumerate(lines.series.values()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in series))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"/>')
    return _document(bottom + 48, parts)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _legend(names: Sequence[str], y: float, x: float = 12.0) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        parts.append(f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{COLOURS[number]}"/>')
        parts.append(_text(x + 15, y, name, ""))
        x += 34 + 7 * len(name)
    return parts


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}">{escape(text)}</text>'


def _short(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _document(height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" style="{STYLE}">\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )
