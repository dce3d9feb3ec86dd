"""Cost of the way to the engine: text-only requests to our service and to ``vllm serve``, in turns.

python -m benchmarks.ingress [--requests 200]

Both sides have the demo's language model in float32, the same context and number of sequences, no compilation, and are
warm. A request is a short chat, answered by one token or by sixteen, whole or streamed; one client, then eight at
once. Requests to both sides take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from lookonce.listening import free_port
from lookonce.service import running
from shared.config import load_settings
from tools.stock_server import stock_server

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "models" / "demo"
CONTEXT, SEQUENCES = 2048, 32
MODEL = "lookonce-demo"
WARM = 20
#: tokens of the answer, streamed or not, clients at once
CASES = [(1, False, 1), (16, False, 1), (16, True, 1), (16, True, 8)]


@contextmanager
def ours() -> Iterator[str]:
    """Base URL of our service with the demo configuration."""
    settings = load_settings(ROOT / "configs" / "demo.yaml")
    (model,) = settings.models
    language = model.language.model_copy(update={"max_model_len": CONTEXT, "max_num_seqs": SEQUENCES})
    models = (model.model_copy(update={"language": language}),)
    http = settings.http.model_copy(update={"port": free_port()})
    with running(settings.model_copy(update={"models": models, "http": http})) as url:
        yield url


def request(client: httpx.Client, url: str, tokens: int, stream: bool, number: int) -> float:
    """Seconds of one request, all of its answer read; no two prompts are the same."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Request {number}: what is at row 1 column 2?"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    begin = time.perf_counter()
    answer = client.post(f"{url}/v1/chat/completions", json=body)
    seconds = time.perf_counter() - begin
    answer.raise_for_status()
    return seconds


def measure(urls: dict[str, str], requests: int, tokens: int, stream: bool, clients: int) -> dict[str, list[float]]:
    """Seconds of every request by side; rounds of ``clients`` requests take turns."""
    with httpx.Client(timeout=120, trust_env=False) as client, ThreadPoolExecutor(clients) as pool:
        found: dict[str, list[float]] = {side: [] for side in urls}
        for start in range(0, requests + WARM, clients):
            for side, url in urls.items():
                ask = partial(request, client, url, tokens, stream)
                seconds = list(pool.map(ask, range(start, start + clients)))
                if start >= WARM:
                    found[side] += seconds
        return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    requests = parser.parse_args().requests
    settings = ("--max-num-seqs", str(SEQUENCES))
    with (
        tempfile.TemporaryDirectory(prefix="lookonce-bench-") as folder,
        stock_server(CHECKPOINT, MODEL, CONTEXT, Path(folder) / "vllm.log", *settings) as stock,
        ours() as mine,
    ):
        print("| tokens | streamed | clients | vllm serve p50, ms | lookonce p50, ms | difference, ms | ratio of p50 |")
        print("|---:|---|---:|---:|---:|---:|---:|")
        for tokens, stream, clients in CASES:
            found = measure({"vllm": stock, "ours": mine}, requests, tokens, stream, clients)
            theirs, our = (statistics.median(found[side]) * 1e3 for side in ("vllm", "ours"))
            row = [tokens, "yes" if stream else "no", clients, f"{theirs:.1f}", f"{our:.1f}", f"{our - theirs:+.1f}"]
            print(f"| {' | '.join(map(str, row))} | {our / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
