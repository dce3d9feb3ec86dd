"""lookonce beside a monolithic ``vllm serve``: one table, and its figures as JSON.

python -m benchmarks.e2e [--quick] [--only distinct,zipf] [--out FOLDER]

Both sides run on the same cores with the same number of threads per engine, over the same checkpoint (an Isaac with a
tower of 12 layers x 768 and a language model of 8 layers x 512, random weights), and are asked in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.e2e import burst, report
from benchmarks.e2e.checkpoint import write_small
from benchmarks.e2e.load import Client
from benchmarks.e2e.measure import in_turns
from benchmarks.e2e.prompts import Prompts
from benchmarks.e2e.restart import Restart, restart
from benchmarks.e2e.servers import CACHE_MIB, Machine, monolithic, ours, started
from benchmarks.e2e.workloads import QUICK, Scale, workloads
from shared.local_redis import LocalRedis

PARTS = ("load", "bfloat16", "restart", "burst")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few requests of every workload: a smoke test")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to run, of: %(default)s")
    parser.add_argument("--only", default="", help="workloads whose name holds one of these words, by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", default="", help="CPU numbers, by commas; the first two that there are")
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    parser.add_argument("--side", type=int, default=512, help="of the pictures, pixels")
    parser.add_argument("--compiled", action="store_true", help="compile language models on both sides")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "lookonce-e2e")
    parser.add_argument("--plots", type=Path, help="folder for the plots (docs/images)")
    parser.add_argument("--report-only", action="store_true", help="tables and plots from the figures in --out")
    return parser.parse_args()


class Run:
    """Everything that one invocation measures."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.scale = QUICK if chosen.quick else Scale()
        cores = tuple(map(int, chosen.cores.split(","))) if chosen.cores else tuple(sorted(os.sched_getaffinity(0)))[:2]
        self.machine = Machine(cores, chosen.threads, chosen.compiled)
        self.folder: Path = chosen.out
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "figures.json"
        kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.figures = kept if chosen.report_only else kept | {"machine": asdict(self.machine)}

    def save(self) -> None:
        """What was measured so far, so that a run that is cut short was not for nothing."""
        (self.folder / "figures.json").write_text(json.dumps(self.figures, indent=1))

    def load(self, redis: LocalRedis, parts: set[str]) -> None:
        """The workloads, the bfloat16 tower, and the restart."""
        checkpoint = write_small(self.folder / "small")
        prompts = Prompts(checkpoint, self.chosen.side, answer=16)
        stock = monolithic(checkpoint, "float32", self.machine, self.folder)
        same = ours("lookonce", checkpoint, "float32", "float32", self.machine, self.folder, redis)
        words = [word for word in self.chosen.only.split(",") if word]
        chosen = [w for w in workloads(prompts, self.scale) if not words or any(word in w.name for word in words)]
        rounds = range(1, self.chosen.rounds + 1)
        with started(stock, same):
            if "load" in parts:
                for workload in chosen:
                    rows = asyncio.run(in_turns([stock, same], workload, rounds))
                    others = [row for row in self.figures.get("rows", []) if row["workload"] != workload.name]
                    self.figures["rows"] = others + [row.to_json() for row in rows]
                    self.save()
            if "restart" in parts:
                restarts: list[Restart] = []
                for server in (stock, same):
                    restarts.append(asyncio.run(restart(server, prompts, 4 if self.chosen.quick else 10)))
                    self.figures["restarts"] = [asdict(one) for one in restarts]
                    self.save()
            if "bfloat16" in parts:
                same.stop()
                half = ours("lookonce bfloat16", checkpoint, "bfloat16", "float32", self.machine, self.folder, redis)
                with started(half):
                    rows = asyncio.run(in_turns([stock, half], chosen[0], rounds))
                self.figures["bfloat16"] = [row.to_json() for row in rows]
                self.save()

    def burst(self, redis: LocalRedis) -> None:
        """200 at once, one side after the other."""
        asks = burst.burst_asks(50 if self.chosen.quick else 200)
        checkpoint = burst.CHECKPOINT.resolve()
        machine = Machine(self.machine.cores, self.machine.threads, self.machine.compiled, context=2048)
        found = []
        for server in (
            ours("lookonce demo", checkpoint, "float32", "float32", machine, self.folder, redis),
            monolithic(checkpoint, "float32", machine, self.folder),
        ):
            with started(server):

                async def once(url: str = server.url, name: str = server.name) -> burst.Burst:
                    async with Client(url, "bench") as client:
                        return await burst.burst(client, name, asks)

                found.append(asdict(asyncio.run(once())))
            self.figures["bursts"] = found
            self.save()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with us
    chosen = options()
    run = Run(chosen)
    if not chosen.report_only:
        parts = set(chosen.parts.split(","))
        if unknown := parts - set(PARTS):
            raise SystemExit(f"no such part: {', '.join(sorted(unknown))}; there is: {', '.join(PARTS)}")
        redis = LocalRedis(run.folder / "redis", CACHE_MIB)
        redis.start()
        try:
            if parts - {"burst"}:
                run.load(redis, parts)
            if "burst" in parts:
                run.burst(redis)
        finally:
            redis.stop()
    print(report.tables(run.figures))
    if chosen.plots:
        report.write_plots(run.figures, chosen.plots)


if __name__ == "__main__":
    main()
