"""Captioning jobs beside what they are made of: each pool driven alone, and a plain script around vLLM's ``LLM``.

python -m benchmarks.captioning --files 500 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import redis

from llm_service.captioning.question import Question
from llm_service.captioning.rows import Row
from llm_service.sampling import SamplingOptions
from lookonce.backends import local
from lookonce.caption import Job, run
from lookonce.service import service
from shared.config import Settings, load_settings
from tools.demo.folder import draw_folder

FIRST, SECOND = "Describe the picture.", "What is at row 1 column 1?"
SAMPLING = SamplingOptions(temperature=0, max_tokens=96)
#: requests in flight when a pool is driven alone
FULL = 64


async def all_of(work: Sequence[Callable[[], Awaitable[object]]]) -> None:
    gate = asyncio.Semaphore(FULL)

    async def one(task: Callable[[], Awaitable[object]]) -> None:
        async with gate:
            await task()

    await asyncio.gather(*(one(task) for task in work))


async def pools_alone(settings: Settings, cache_url: str, files: Sequence[Path]) -> dict[str, float]:
    """Seconds of each pool for all files at full batch, with an empty cache before the encoder's."""
    from llm_service.captioning.desks import PoolDesk
    from lookonce.application import model_service
    from shared.cache import AsyncEmbeddingCache
    from shared.fetch import ImageFetcher

    cache, fetcher = AsyncEmbeddingCache(settings.cache, cache_url), ImageFetcher(settings.images)
    desk = PoolDesk(model_service(settings, settings.models[0], cache, fetcher))  # type: ignore[arg-type]
    question = Question.parse([FIRST], None, SAMPLING)
    datas = [path.read_bytes() for path in files]
    chats = [[question.messages(Row("", ""), FIRST)]] * len(datas)
    seen: list[object] = [None] * len(datas)

    async def look(place: int) -> None:
        seen[place] = await desk.look(datas[place], chats[place], SAMPLING)

    times = {}
    begin = time.perf_counter()
    await all_of([lambda place=place: look(place) for place in range(len(datas))])  # type: ignore[misc]
    times["encoder pool alone"] = time.perf_counter() - begin
    begin = time.perf_counter()
    await all_of([lambda item=item: desk.answer(item) for item in seen])  # type: ignore[misc]
    times["language pool alone"] = time.perf_counter() - begin
    await fetcher.aclose()
    await cache.close()
    return times


def plain_script(checkpoint: Path, folder: Path) -> None:
    """What people write: vLLM's offline class, every picture in one list; prints seconds for two prompts."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(checkpoint),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=32,
        enforce_eager=True,
        mm_processor_kwargs={"min_num_patches": 144},
    )
    sampling = SamplingParams(temperature=0, max_tokens=96)
    files = sorted(folder.rglob("*.png"))
    for prompt in (FIRST, SECOND):
        begin = time.perf_counter()
        chats = []
        for path in files:
            with Image.open(path) as picture:
                content = [
                    {"type": "image_pil", "image_pil": picture.convert("RGB")},
                    {"type": "text", "text": prompt},
                ]
            chats.append([{"role": "user", "content": content}])
        answers = llm.chat(chats, sampling, use_tqdm=False)
        assert len(answers) == len(files)
        print(json.dumps({"prompt": prompt, "seconds": time.perf_counter() - begin}), flush=True)


def job(folder: Path, out: Path, prompt: str, settings: Settings, pools: object) -> float:
    shutil.rmtree(out, ignore_errors=True)
    summary = run(Job(str(folder), out, (prompt,), sampling=SAMPLING), settings, pools=pools)  # type: ignore[arg-type]
    assert summary.failed == 0, list(summary.failures())
    return summary.tally.seconds


def measure(settings: Settings, files: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by what ran, in turns."""
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as place, service(settings, print) as pools:
        folder, out = Path(place) / "pictures", Path(place) / "out"
        draw_folder(folder, files, duplicates=0.0, broken=0.0)
        paths = sorted(folder.rglob("*.png"))
        job(folder, out, FIRST, settings, pools)  # warms everything up
        for number in range(rounds):
            redis.Redis.from_url(pools.cache_url).flushall()
            found["job, all distinct"].append(job(folder, out, FIRST, settings, pools))
            found["job, second prompt"].append(job(folder, out, SECOND, settings, pools))
            redis.Redis.from_url(pools.cache_url).flushall()
            for name, seconds in asyncio.run(pools_alone(settings, pools.cache_url, paths)).items():
                found[name].append(seconds)
            words = ["--plain", str(settings.models[0].checkpoint), str(folder)]
            plain = subprocess.run(
                [sys.executable, "-m", "benchmarks.captioning", *words], capture_output=True, text=True, check=True
            )
            lines = [json.loads(line) for line in plain.stdout.splitlines() if line.startswith("{")]
            found["plain vLLM, all distinct"].append(lines[0]["seconds"])
            found["plain vLLM, second prompt"].append(lines[1]["seconds"])
            print(f"round {number + 1}:", {name: round(values[-1], 1) for name, values in found.items()}, flush=True)
    return found


def report(found: dict[str, list[float]], files: int) -> None:
    median = {name: statistics.median(seconds) for name, seconds in found.items()}
    print("\n| what | median s | images/s |\n|---|---:|---:|")
    for name, seconds in median.items():
        print(f"| {name} | {seconds:.1f} | {files / seconds:.1f} |")
    pairs = {
        "job against the slower pool alone": ("encoder pool alone", "job, all distinct"),
        "job against plain vLLM, all distinct": ("plain vLLM, all distinct", "job, all distinct"),
        "job against plain vLLM, second prompt": ("plain vLLM, second prompt", "job, second prompt"),
        "second prompt against the first": ("job, all distinct", "job, second prompt"),
    }
    if median["language pool alone"] > median["encoder pool alone"]:
        pairs["job against the slower pool alone"] = ("language pool alone", "job, all distinct")
    for name, (theirs, ours) in pairs.items():
        ratios = [a / b for a, b in zip(found[theirs], found[ours], strict=True)]
        print(f"\n{name}: {statistics.median(ratios):.2f}× (of the rounds: {', '.join(f'{r:.2f}' for r in ratios)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--plain", nargs=2, type=Path, metavar=("CHECKPOINT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain_script(*options.plain)
        return
    settings = load_settings(options.config)
    settings = settings.model_copy(update={"http": settings.http.model_copy(update={"port": 0})})
    local(None, settings, None)  # refuses models that cannot caption
    report(measure(settings, options.files, options.rounds), options.files)


if __name__ == "__main__":
    main()
