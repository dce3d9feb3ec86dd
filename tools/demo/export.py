"""Writes the trained demo model as a checkpoint in Isaac's Hugging Face layout, with samples.

python -m tools.demo.export --run runs/demo --out models/demo
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.demo import tokenizer
from tools.demo.model import LANGUAGE, TOWER, DemoModel
from tools.demo.pictures import RULE, draw
from tools.demo.questions import caption

SAMPLES = 6
SAMPLE_SEED = 7_000
#: in a sample picture
FEWEST_THINGS = 3
MAX_POSITIONS = 4096
BLOCK_NAMES = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attention.out": "self_attn.out_proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}


def checkpoint_tensors(model: DemoModel) -> dict[str, torch.Tensor]:
    """All tensors under the names that Isaac checkpoints use; q, k and v split."""
    out: dict[str, torch.Tensor] = {}
    prefix = "model.vision_embedding.0"
    for name, tensor in model.tower.state_dict().items():
        if name == "position_table":
            out[f"{prefix}.embeddings.position_embedding.weight"] = tensor
        elif name.startswith("patch_embedding."):
            out[f"{prefix}.embeddings.{name}"] = tensor
        elif name.startswith("norm."):
            out[f"{prefix}.post_layernorm.{name.removeprefix('norm.')}"] = tensor
        elif name == "project_up.weight":
            out["model.vision_embedding.1.weight"] = tensor
        elif name == "project_down.weight":
            out["model.vision_embedding.3.weight"] = tensor
        else:
            _, number, rest = name.split(".", 2)
            layer, (module, kind) = f"{prefix}.encoder.layers.{number}", rest.rsplit(".", 1)
            if module == "attention.qkv":
                for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                    out[f"{layer}.self_attn.{letter}_proj.{kind}"] = part
            else:
                out[f"{layer}.{BLOCK_NAMES[module]}.{kind}"] = tensor
    out |= model.language.state_dict()
    return {name: tensor.to(torch.bfloat16).contiguous().clone() for name, tensor in out.items()}


def config() -> dict[str, object]:
    """``config.json``."""
    text = {
        "vocab_size": LANGUAGE.vocabulary,
        "hidden_size": LANGUAGE.width,
        "intermediate_size": LANGUAGE.hidden,
        "num_hidden_layers": LANGUAGE.layers,
        "num_attention_heads": LANGUAGE.heads,
        "num_key_value_heads": LANGUAGE.key_heads,
        "head_dim": LANGUAGE.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": LANGUAGE.norm_eps,
        "rope_theta": LANGUAGE.rope_theta,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": list(LANGUAGE.mrope_section),
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    vision = {
        "model_type": "pixel_shuffle_siglip2",
        "hidden_size": TOWER.width,
        "intermediate_size": TOWER.hidden,
        "num_hidden_layers": TOWER.layers,
        "num_attention_heads": TOWER.heads,
        "num_channels": 3,
        "num_patches": TOWER.position_side**2,
        "patch_size": TOWER.patch_size,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": TOWER.norm_eps,
        "pixel_shuffle_scale_factor": TOWER.merge,
    }
    return {
        "architectures": ["IsaacForConditionalGeneration"],
        "model_type": "isaac",
        **text,
        "vision_config": vision,
        "video_patch_size": TOWER.patch_size,
        "pixel_shuffle_scale": TOWER.merge,
        "vision_min_num_patches": RULE.min_patches,
        "vision_max_num_patches": RULE.max_patches,
        "max_sequence_length": MAX_POSITIONS,
        "vision_token": "<image>",
    }


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
    (options.out / "config.json").write_text(json.dumps(config(), indent=1) + "\n")
    fast = tokenizer.save(options.out)
    end, pad = fast.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False}
    (options.out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    write_samples(options.out / "samples")
    size = sum(path.stat().st_size for path in options.out.glob("*")) / 1e6
    print(f"{options.out}: {size:.1f} MB")


if __name__ == "__main__":
    main()
