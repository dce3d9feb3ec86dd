"""A recorded load: clients come one by one, stay, and go; first with new pictures, then with long answers.

python -m benchmarks.autoscaling --clients 50

Each pool should grow and shrink by itself, within its bounds: pictures move the encoder pool only, long answers the
language pool only, and no request fails. What was seen every second goes into a JSON file and a plot. Exit code 1: it
was otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.svg import Panel, TimeLine, time_line
from lookonce.service import running
from shared.config import Settings, load_settings

ROOT = Path(__file__).parent.parent
POOLS = ("encoder", "language")
#: pictures that long answers are about; encoded before the load begins
KNOWN = 8


@dataclass
class Phase:
    """One wave of clients, and what became of their requests.

    Attributes:
        name: of the wave.
        moves: the pool that should grow.
        begin, end: seconds since the start of the recording.
        seconds: latency of every answered request.
        faults: a sentence for every other.
    """

    name: str
    moves: str
    begin: float = 0.0
    end: float = 0.0
    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass
class Recorder:
    """Looks at the service every second."""

    http: httpx.AsyncClient
    started: float = field(default_factory=time.monotonic)
    clients: int = 0
    in_flight: int = 0
    answered: int = 0
    failed: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)

    def now(self) -> float:
        return time.monotonic() - self.started

    async def record(self) -> None:
        """Until it is cancelled."""
        for tick in itertools.count():
            await asyncio.sleep(max(0.0, tick - self.now()))
            self.rows.append(await self._look())

    async def _look(self) -> dict[str, float]:
        at = self.now()
        status, metrics = await asyncio.gather(self.http.get("/v1/status"), self.http.get("/metrics"))
        row: dict[str, float] = {"at": round(at, 2), "clients": self.clients, "in_flight": self.in_flight}
        row |= {"answered": self.answered, "failed": self.failed}
        (model,) = status.json()["models"]
        for pool in POOLS:
            for state in ("RUNNING", "STARTING", "STOPPING"):
                row[f"{pool}_{state.lower()}"] = model[pool]["replicas"].get(state, 0)
        row["encoder_patches_waiting"] = model["encoder"]["stats"].get("waiting_patches", 0)
        found = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}
        for family in text_string_to_metric_families(metrics.text):
            for sample in family.samples:
                if sample.name in found:
                    found[sample.name] += sample.value
        return row | {name.removeprefix("vllm:num_requests_"): value for name, value in found.items()}

    async def ask(self, body: dict[str, Any], phase: Phase) -> None:
        """One request, whose outcome goes into the phase."""
        begin = time.monotonic()
        self.in_flight += 1
        try:
            response = await self.http.post("/v1/chat/completions", json=body)
            if response.status_code == httpx.codes.OK:
                self.answered += 1
                phase.seconds.append(time.monotonic() - begin)
                return
            fault = f"{response.status_code}: {response.text[:200]}"
        except httpx.HTTPError as error:
            fault = f"{type(error).__name__}: {error}"
        finally:
            self.in_flight -= 1
        self.failed += 1
        phase.faults.append(fault)

    async def wave(
        self, phase: Phase, questions: Iterator[dict[str, Any]], clients: int, ramp: float, hold: float
    ) -> None:
        """Clients come over ``ramp`` seconds, ask without a pause until ``hold`` more have passed, and go."""
        phase.begin, stop = self.now(), self.now() + ramp + hold

        async def client(number: int) -> None:
            await asyncio.sleep(ramp * number / max(1, clients - 1))
            self.clients += 1
            while self.now() < stop:
                await self.ask(next(questions), phase)
            self.clients -= 1

        await asyncio.gather(*(client(number) for number in range(clients)))
        phase.end = self.now()

    async def quiet(self, seconds: float, least: dict[str, int]) -> None:
        """Until the pools are as small as they may be, ``seconds`` at most, and a moment longer."""
        deadline = self.now() + seconds
        while self.now() < deadline:
            last = self.rows[-1]
            if all(
                last[f"{pool}_running"] == least[pool] and not last[f"{pool}_stopping"] + last[f"{pool}_starting"]
                for pool in POOLS
            ):
                break
            await asyncio.sleep(1)
        await asyncio.sleep(5)


def question(model: str, seed: int, side: int, **more: Any) -> dict[str, Any]:
    """A chat request about a picture that this seed alone gives: quick to draw, so that the clients cost little."""
    pixels = np.full((side, side, 3), 200, np.uint8)
    pixels[: side // 2, : side // 2] = np.random.default_rng(seed).integers(0, 256, 3, dtype=np.uint8)
    pixels[-1, -8:] = np.frombuffer(seed.to_bytes(8, "big"), np.uint8)[:, None]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Describe the picture."}]
    return {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0} | more


def scaled(config: Path, options: argparse.Namespace) -> Settings:
    """The configuration's first model with pools that may grow."""
    settings = load_settings(config)
    bounds = {
        "min_replicas": 1,
        "max_replicas": options.max_replicas,
        "upscale_delay": 1.0,
        "downscale_delay": options.downscale_delay,
        "load_window": 5.0,
    }
    model = settings.models[0]
    model = model.model_copy(
        update={
            "encoder": model.encoder.model_copy(update=bounds | {"target_patches": options.target_patches}),
            "language": model.language.model_copy(update=bounds | {"target_ongoing": options.target_ongoing}),
        }
    )
    http = settings.http.model_copy(update={"port": 0, "request_timeout": 600.0})
    return settings.model_copy(update={"models": (model,), "http": http})


async def record(url: str, model: str, options: argparse.Namespace) -> tuple[Recorder, list[Phase]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=660, limits=limits, trust_env=False) as http:
        known = [question(model, seed, 256, max_tokens=options.tokens, ignore_eos=True) for seed in range(KNOWN)]
        warm = Phase("warm-up", "")
        recorder = Recorder(http)
        for body in known:
            await recorder.ask(body | {"max_tokens": 1}, warm)
        recorder = Recorder(http)
        seen = asyncio.create_task(recorder.record())
        await asyncio.sleep(5)
        least = dict.fromkeys(POOLS, 1)
        phases = [Phase("new pictures", "encoder"), Phase("long answers", "language")]
        seeds = itertools.count(1000)
        questions: list[Iterator[dict[str, Any]]] = [
            (question(model, seed, options.side, max_tokens=1) for seed in seeds),
            itertools.cycle(known),
        ]
        for phase, asked in zip(phases, questions, strict=True):
            await recorder.wave(phase, asked, options.clients, options.ramp, options.hold)
            await recorder.quiet(options.idle, least)
        seen.cancel()
        return recorder, phases


def findings(recorder: Recorder, phases: list[Phase], bound: int) -> list[str]:
    """What was otherwise than it should be."""
    wrong = [f"{len(phase.faults)} requests failed: {phase.faults[0]}" for phase in phases if phase.faults]
    for number, phase in enumerate(phases):
        until = phases[number + 1].begin if number + 1 < len(phases) else recorder.now()
        rows = [row for row in recorder.rows if phase.begin <= row["at"] < until]
        for pool in POOLS:
            counts = [row[f"{pool}_running"] for row in rows]
            most = bound if pool == phase.moves else 1
            if max(counts) != most:
                wrong.append(f"{phase.name}: {max(counts):g} {pool} replicas at most, not {most}")
            if counts[-1] != 1:
                wrong.append(f"{phase.name}: {counts[-1]:g} {pool} replicas are left")
    return wrong


def plotted(recorder: Recorder, phases: list[Phase]) -> str:
    def line(*names: str) -> Callable[[], list[tuple[float, float]]]:
        return lambda: [(row["at"], sum(row[name] for name in names)) for row in recorder.rows]

    panels = [
        ("clients", {"clients": line("clients"), "requests in flight": line("in_flight")}),
        ("replicas", {f"{pool} replicas": line(f"{pool}_running") for pool in POOLS}),
        ("encoder", {"patches waiting in one replica": line("encoder_patches_waiting")}),
        ("language", {"sequences running": line("running"), "waiting": line("waiting")}),
        ("requests", {"answered": line("answered"), "failed": line("failed")}),
    ]
    drawn = [Panel(title, {name: make() for name, make in lines.items()}) for title, lines in panels]
    shaded = [(phase.name, phase.begin, phase.end) for phase in phases]
    return time_line(TimeLine("Each pool scales by its own signal", drawn, shaded))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.yaml")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--ramp", type=float, default=40, help="seconds over which clients come")
    parser.add_argument("--hold", type=float, default=60, help="seconds with all of them")
    parser.add_argument("--idle", type=float, default=90, help="seconds after a wave, at most")
    parser.add_argument("--side", type=int, default=768, help="of new pictures, pixels")
    parser.add_argument("--tokens", type=int, default=400, help="of long answers")
    parser.add_argument("--max-replicas", type=int, default=3, help="of each pool")
    parser.add_argument("--target-patches", type=int, default=16384)
    parser.add_argument("--target-ongoing", type=float, default=12)
    parser.add_argument("--downscale-delay", type=float, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "autoscaling.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "autoscaling.svg")
    options = parser.parse_args()
    settings = scaled(options.config, options)
    with running(settings, print) as url:
        recorder, phases = asyncio.run(record(url, settings.models[0].name, options))
    wrong = findings(recorder, phases, options.max_replicas)
    for phase in phases:
        times = statistics.quantiles(phase.seconds, n=100) if len(phase.seconds) > 1 else [0.0] * 99
        print(
            f"{phase.name}: {len(phase.seconds)} answered, {len(phase.faults)} failed; "
            f"p50 {times[49]:.2f} s, p99 {times[98]:.2f} s"
        )
    given = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    body = {"options": given, "phases": [asdict(phase) for phase in phases], "seconds": recorder.rows, "wrong": wrong}
    options.out.write_text(json.dumps(body) + "\n")
    options.plot.write_text(plotted(recorder, phases))
    print("\n".join(wrong) or "each pool moved by itself, within its bounds; no request failed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
