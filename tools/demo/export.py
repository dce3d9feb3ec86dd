"""Writes a trained demo model as a checkpoint in its family's Hugging Face layout, with samples.

python -m tools.demo.export --run runs/demo --out models/demo
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from safetensors.torch import save_file

from tools.demo import tokenizer
from tools.demo.configs import isaac_config, pixtral_config, pixtral_processor
from tools.demo.design import ISAAC
from tools.demo.model import DemoModel
from tools.demo.pictures import draw
from tools.demo.questions import caption
from tools.demo.tensors import checkpoint_tensors

SAMPLES = 6
SAMPLE_SEED = 7_000
#: in a sample picture
FEWEST_THINGS = 3


def write_samples(folder: Path) -> None:
    """Held-out pictures with their true captions."""
    folder.mkdir(exist_ok=True)
    captions: dict[str, str] = {}
    for seed in itertools.count(SAMPLE_SEED):
        if len(captions) == SAMPLES:
            break
        picture, scene = draw(seed, "held-out")
        if len(scene.things) >= FEWEST_THINGS:
            name = f"{len(captions)}.png"
            picture.save(folder / name, optimize=True)
            captions[name] = caption(scene)
    (folder / "samples.json").write_text(json.dumps({"captions": captions}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, default=Path("models/demo"))
    options = parser.parse_args()
    model = DemoModel.from_run(options.run)
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(model), options.out / "model.safetensors", metadata={"format": "pt"})
    (options.out / "model.safetensors").chmod(0o644)
    fast = tokenizer.save(options.out, model.design)
    if model.design is ISAAC:
        files = {"config.json": isaac_config()}
    else:
        files = {"config.json": pixtral_config(fast.convert_tokens_to_ids("[IMG]")), **pixtral_processor()}
    end, pad = fast.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False}
    files["generation_config.json"] = generation
    for name, tree in files.items():
        (options.out / name).write_text(json.dumps(tree, indent=1) + "\n")
    if model.design is ISAAC:  # one set of samples serves all
        write_samples(options.out / "samples")
    size = sum(path.stat().st_size for path in options.out.glob("*")) / 1e6
    print(f"{options.out}: {size:.1f} MB")


if __name__ == "__main__":
    main()
