"""An hour of mixed load, with the memory of every process of the service: which of them grow?

python -m benchmarks.soak --minutes 60

First the service stands idle, so that growth which needs no load (Ray's own) shows by itself. Then comes the load; its
first part is warm-up, in which caches fill to their bounds and allocators to their peaks. Prints a table with a slope
and a word for every process and store, and draws a plot. Exit code 1: something of the service grew, or a request
failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from benchmarks.soak.load import Load
from benchmarks.soak.memory import MIB, processes, stores
from benchmarks.soak.server import Server, serving
from benchmarks.soak.verdict import POINTS, Samples, Verdict, judge
from benchmarks.svg import Panel, TimeLine, time_line

ROOT = Path(__file__).parent.parent.parent
#: what each panel of the plot adds up, by the first words of what was sampled
PANELS = {
    "service, own MiB": ("engine", "language", "encoder", "ingress", "serve"),
    "Ray, own MiB": ("ray ServeController", "ray gcs", "ray raylet", "ray dashboard", "ray DashboardAgent"),
    "stores, MiB": ("redis entries", "redis", "local tier", "/dev/shm"),
}


@dataclass
class Recording:
    """What was seen.

    Attributes:
        own, fair: (seconds, bytes) of every process, USS and PSS; of stores both are what they hold.
        phases: name, begin and end in seconds.
    """

    own: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    fair: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    answered: list[tuple[float, float]] = field(default_factory=list)
    failed: list[tuple[float, float]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return time.monotonic() - self.started

    def look(self, server: Server, load: Load) -> None:
        at = round(self.now(), 1)
        for name, used in processes(server.pid).items():
            self.own[name].append((at, used.own))
            self.fair[name].append((at, used.fair))
        for name, size in stores(server.cache_url).items():
            self.own[name].append((at, size))
            self.fair[name].append((at, size))
        self.answered.append((at, sum(load.tally.answered.values())))
        self.failed.append((at, len(load.tally.faults)))

    async def watch(self, server: Server, load: Load, every: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.to_thread(self.look, server, load)
            await asyncio.sleep(every)


async def record(server: Server, options: argparse.Namespace) -> tuple[Recording, Load]:
    recording = Recording()
    load = Load(server.url, server.model, options.clients, options.pause)
    watching = asyncio.create_task(recording.watch(server, load, options.every))
    warm_up = options.minutes * 60 * options.warm_up
    steps = [("idle", options.idle * 60, False), ("warm-up", warm_up, True)]
    steps.append(("load", options.minutes * 60 - warm_up, True))
    for name, seconds, loaded in steps:
        begin = recording.now()
        await (load.run(seconds) if loaded else asyncio.sleep(seconds))
        recording.phases.append((name, begin, recording.now()))
    watching.cancel()
    return recording, load


def judged(recording: Recording, phase: str, limit: float) -> dict[str, tuple[Verdict, Verdict]]:
    """USS's and PSS's verdict on everything that was there in a phase."""
    (begin, end), found = next((a, b) for name, a, b in recording.phases if name == phase), {}
    if phase == "idle":
        begin += (end - begin) / 4  # what starting left behind is let go of
    for name in recording.own:
        own, fair = ([s for s in kind[name] if begin <= s[0] <= end] for kind in (recording.own, recording.fair))
        if own:
            found[name] = judge(own, limit), judge(fair, limit)
    return found


def table(found: Mapping[str, tuple[Verdict, Verdict]]) -> str:
    lines = [
        "| process | own (USS), first → last, MiB | USS, MiB/h | … second half | PSS, MiB/h | USS is |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, (own, fair) in sorted(found.items(), key=lambda item: (item[0].startswith("ray "), item[0])):
        lines.append(
            f"| {name} | {own.first:.1f} → {own.last:.1f} | {own.slope:+.1f} | {own.late:+.1f} "
            f"| {fair.slope:+.1f} | {own.word} |"
        )
    return "\n".join(lines)


def thin(samples: Samples) -> Samples:
    """As many of them as a plot shows, evenly."""
    return samples[:: max(1, len(samples) // POINTS)]


def plotted(recording: Recording) -> str:
    """Sums over the processes of a role; those of Ray that are not named are few and small."""
    panels = []
    for title, roles in PANELS.items():
        lines = {}
        for role in roles:
            totals: dict[float, float] = defaultdict(float)
            for name, samples in recording.own.items():
                if name == role or name.rpartition(" ")[0] == role:
                    for at, value in samples:
                        totals[at] += value / MIB
            if totals:
                lines[role] = thin(sorted(totals.items()))
        panels.append(Panel(title, lines))
    panels.append(Panel("requests", {"answered": thin(recording.answered), "failed": thin(recording.failed)}))
    return time_line(TimeLine("Memory over time under mixed load", panels, recording.phases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="of load")
    parser.add_argument("--idle", type=float, default=5, help="minutes without load before it")
    parser.add_argument("--warm-up", type=float, default=0.25, help="share of the load that is not judged")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between requests of one client")
    parser.add_argument("--every", type=float, default=5, help="seconds between samples")
    parser.add_argument("--limit", type=float, default=8, help="MiB an hour that count as flat")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "soak.svg")
    parser.add_argument("--out", type=Path, help="samples and verdicts as JSON")
    options = parser.parse_args()
    with serving() as server:
        recording, load = asyncio.run(record(server, options))
        status = httpx.get(f"{server.url}/readyz", timeout=30, trust_env=False).status_code
    found = {phase: judged(recording, phase, options.limit) for phase in ("idle", "load")}
    for phase, verdicts in found.items():
        print(f"\n{phase}:\n\n{table(verdicts)}")
    answered = ", ".join(f"{count} {kind}" for kind, count in sorted(load.tally.answered.items()))
    print(
        f"\nanswered: {answered}; failed: {len(load.tally.faults)} {load.tally.faults[:3]}; ready at the end: {status}"
    )
    options.plot.write_text(plotted(recording))
    if options.out:
        given = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        words = {
            phase: {name: [asdict(v) for v in pair] for name, pair in verdicts.items()}
            for phase, verdicts in found.items()
        }
        body = {"options": given, "phases": recording.phases, "verdicts": words, "own": recording.own}
        options.out.write_text(json.dumps(body) + "\n")
    grew = {name for name, (own, _) in found["load"].items() if own.word == "grows"}
    grew.discard("/dev/shm")  # other programs' too
    theirs = {name for name in grew if name.startswith("ray ")}
    print(f"grew: {', '.join(sorted(grew - theirs)) or 'nothing of the service'}")
    print(f"grew of Ray: {', '.join(sorted(theirs)) or 'nothing'}")
    sys.exit(1 if grew - theirs or load.tally.faults else 0)


if __name__ == "__main__":
    main()
