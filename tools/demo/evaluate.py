"""Exact answers of the demo model on held-out pictures, without the service.

An answer is exact under greedy decoding if and only if every token of it, the end token included, is the likeliest one
after the true tokens before it; so one forward per batch measures what token-by-token decoding would. Only captions
that are not exact are decoded token by token, to count their right cells.

    python -m tools.demo.evaluate --pictures 500 [--positions 1d] [--fault no-breaks] [--tower int8] [--records int8]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shared.keys import Namespace
from shared.record_values import Encoding
from shared.records import decode_record, encode_record
from shared.sizing import Grid
from tools.demo import questions, tokenizer
from tools.demo.batches import BatchMaker, Pictures, ask_all, draw_pictures

if TYPE_CHECKING:
    from tools.demo.model import DemoModel

BATCH = 16
LONGEST_ANSWER = 64
#: kinds of question whose answer is about a place
PLACE_KINDS = ("at", "where")


@torch.inference_mode()
def exact_answers(
    model: DemoModel,
    maker: BatchMaker,
    pictures: int,
    seed: int,
    *,
    decode: bool = False,
    encoding: Encoding = Encoding.RAW,
) -> dict[str, float]:
    """Shares of right answers on fresh held-out pictures.

    Args:
        model: in any mode; left in training mode.
        maker: with the positions to use.
        pictures: how many, rounded up to whole batches.
        seed: of pictures and questions.
        decode: decode wrong captions token by token, instead of counting cells after the true tokens before them.
        encoding: of the records that embeddings go through on their way to the language model.

    Returns:
        By kind of question the share of exact answers; ``cells``: cells named right in captions; ``places``: exact
        answers to questions about places; ``all``: exact answers to all questions.
    """
    model.eval()
    rng = np.random.default_rng(seed)
    right: dict[str, list[float]] = defaultdict(list)
    for _ in range(0, pictures, BATCH):
        drawn = Pictures.of(draw_pictures(rng, BATCH, "held-out"), model.design.preprocess)
        embeddings = through_record(model.embed(drawn), encoding)
        pairs = list(zip(drawn.scenes[::2], drawn.scenes[1::2], strict=True))
        batches = [
            maker.shared_prefix(drawn, 1, [ask_all(rng, scene) for scene in drawn.scenes]),
            maker.shared_prefix(drawn, 2, [[questions.which(rng, *pair)] for pair in pairs]),
        ]
        for batch in batches:
            hidden = model.language(batch.ids, embeddings, batch.is_image, batch.positions, batch.mask)
            best = model.language.lm_head(hidden).argmax(-1)
            for row, first, last, question in batch.spans:
                guesses, truth = best[row, first:last], batch.labels[row, first:last]
                exact = torch.equal(guesses, truth)
                right[question.kind].append(float(exact))
                if question.kind == "describe":
                    said = maker.decode(guesses.tolist())
                    if decode and not exact:
                        image = embeddings.view(BATCH, -1, embeddings.shape[-1])[row]
                        said = answer(model, maker, image, drawn.merged, question.text)
                    right["cells"].append(cell_accuracy(said, question.answer))
    model.train()
    figures = {kind: float(np.mean(right[kind])) for kind in (*questions.KIND_NAMES, "cells")}
    figures["places"] = float(np.mean([value for kind in PLACE_KINDS for value in right[kind]]))
    figures["all"] = float(np.mean([value for kind in questions.KIND_NAMES for value in right[kind]]))
    return figures


def through_record(embeddings: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """What is left of embeddings ``[tokens, width]`` after a stay in the cache."""
    key = Namespace("demo", "0" * 64, "0" * 64).embedding_key("0" * 64)
    return decode_record(encode_record(key, embeddings, Grid(1, len(embeddings)), 1, encoding), key)[1]


def answer(model: DemoModel, maker: BatchMaker, image: torch.Tensor, merged: Grid, text: str) -> str:
    """Greedy answer, token by token, to a question about one image.

    Args:
        model: the model.
        maker: with the positions to use.
        image: its embeddings ``[tokens, width]``.
        merged: its grid in tokens.
        text: the question.
    """
    ids, places, delta = maker.prompt(merged, text)
    end, prompt = maker.end, len(ids)
    while len(ids) - prompt < LONGEST_ANSWER and (len(ids) == prompt or ids[-1] != end):
        tokens = torch.tensor([ids])
        more = np.broadcast_to(np.arange(prompt, len(ids)) + delta, (3, len(ids) - prompt))
        lines = torch.from_numpy(np.concatenate([places, more], axis=1))[:, None]
        mask = torch.ones(1, len(ids), len(ids), dtype=torch.bool).tril()
        hidden = model.language(tokens, image, tokens == maker.image, lines, mask)
        ids.append(int(model.language.lm_head(hidden[0, -1]).argmax()))
    return maker.decode(ids[prompt:])


def cell_accuracy(said: str, truth: str) -> float:
    """Share of the cells of a caption that are named right, by row and column."""
    guesses, cells = _cells(said), _cells(truth)
    return sum(guesses.get(place) == cell for place, cell in cells.items()) / len(cells)


def _cells(caption: str) -> dict[tuple[int, int], str]:
    rows = caption.rstrip(".").split(". ")
    return {(r, c): cell for r, row in enumerate(rows) for c, cell in enumerate(row.split(": ")[-1].split(", "))}


def main() -> None:
    from encoder_service.towers.int8 import to_int8
    from encoder_service.towers.pixtral import PixtralTower
    from tools.demo.faults import FAULTS
    from tools.demo.model import DemoModel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--checkpoint", type=Path, help="an exported checkpoint instead of a run's state")
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--positions", choices=["mrope", "1d"], default="mrope")
    parser.add_argument("--tower", choices=["float32", "int8"], default="float32", help="precision of its layers")
    parser.add_argument("--records", choices=["raw", "int8", "fp8"], default="raw")
    parser.add_argument("--fault", choices=sorted(FAULTS), help="of a server of Pixtral models")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = DemoModel.from_checkpoint(options.checkpoint) if options.checkpoint else DemoModel.from_run(options.run)
    design = model.design
    if options.fault:
        if not isinstance(model.tower, PixtralTower):
            parser.error("--fault is for the Pixtral demo; the Isaac demo has --positions 1d")
        design = FAULTS[options.fault](design, model.tower)
    if options.tower == "int8":
        to_int8(model.tower)
    maker = BatchMaker(tokenizer.build(model.design), design, flat_positions=options.positions == "1d")
    encoding = Encoding[options.records.upper()]
    figures = exact_answers(model, maker, options.pictures, options.seed, decode=True, encoding=encoding)
    for kind, value in figures.items():
        print(f"{kind:10s} {100 * value:5.1f} %")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
