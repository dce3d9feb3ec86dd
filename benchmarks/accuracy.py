"""Accuracy of the demo model through the whole service (HTTP, Ray, Redis, vLLM) on freshly drawn held-out pictures.

python -m benchmarks.accuracy --pictures 500 [--url http://127.0.0.1:8000] [--tower int8] [--records int8]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from lookonce.client import Client
from lookonce.service import running
from shared.config import ModelSettings, load_settings
from tools.demo import questions
from tools.demo.evaluate import cell_accuracy
from tools.demo.pictures import Scene, draw
from tools.demo.questions import KIND_NAMES, Question

#: pictures that no other command draws
FIRST_SEED = 9_000_000
PARALLEL = 16


def as_url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def asked_about(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """One question of every single-image kind that fits the scene."""
    where = questions.where(rng, scene)
    several = [questions.describe(rng, scene), questions.at(rng, scene), questions.count(rng, scene)]
    return several + ([where] if where is not None else [])


async def measure(url: str, pictures: int) -> dict[str, list[float]]:
    """1.0 or 0.0 for every answer, by kind; shares of right cells under ``cells``."""
    rng = np.random.default_rng(FIRST_SEED)
    drawn = [draw(FIRST_SEED + index, "held-out") for index in range(pictures)]
    work = [([index], question) for index, (_, scene) in enumerate(drawn) for question in asked_about(rng, scene)]
    work += [
        ([index, index + 1], questions.which(rng, drawn[index][1], drawn[index + 1][1]))
        for index in range(0, pictures - 1, 2)
    ]
    urls = [as_url(picture) for picture, _ in drawn]
    scores: dict[str, list[float]] = defaultdict(list)
    gate = asyncio.Semaphore(PARALLEL)
    async with Client(url) as client:
        model = await client.model()

        async def one(images: list[int], question: Question) -> None:
            async with gate:
                answer = await client.ask(model, [urls[i] for i in images], question.text, max_tokens=96)
            scores[question.kind].append(float(answer.text == question.answer))
            if question.kind == "describe":
                scores["cells"].append(cell_accuracy(answer.text, question.answer))

        await asyncio.gather(*(one(images, question) for images, question in work))
    return scores


def report(scores: dict[str, list[float]], seconds: float) -> None:
    """Prints a Markdown table."""
    everything = [score for kind in KIND_NAMES for score in scores[kind]]
    print("| kind | questions | right |\n|---|---:|---:|")
    for kind in KIND_NAMES:
        print(f"| {kind} | {len(scores[kind])} | {100 * np.mean(scores[kind]):.1f} % |")
    print(f"| **all** | {len(everything)} | **{100 * np.mean(everything):.1f} %** |")
    print(f"| cells (of describe) | | **{100 * np.mean(scores['cells']):.1f} %** |")
    print(f"\n{len(everything) / seconds:.1f} answers/s")


def with_encoder(model: ModelSettings, **update: str) -> ModelSettings:
    """The same model with other settings of its encoder."""
    return model.model_copy(update={"encoder": model.encoder.model_copy(update=update)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--url", help="a running service; without it one is started")
    parser.add_argument("--tower", choices=["none", "int8"], help="quantization of the tower, instead of the file's")
    parser.add_argument("--records", choices=["raw", "int8", "fp8"], help="encoding, instead of the file's")
    options = parser.parse_args()

    def run(url: str) -> None:
        begin = time.perf_counter()
        scores = asyncio.run(measure(url, options.pictures))
        report(scores, time.perf_counter() - begin)

    if options.url:
        run(options.url)
        return
    settings = load_settings(options.config)
    chosen = {"quantization": options.tower, "records": options.records}
    models = tuple(
        with_encoder(model, **{name: value for name, value in chosen.items() if value}) for model in settings.models
    )
    settings = settings.model_copy(update={"http": settings.http.model_copy(update={"port": 0}), "models": models})
    with running(settings, print) as url:
        run(url)


if __name__ == "__main__":
    main()
