"""What a tower's precision costs: ours in float32, bfloat16 and int8 beside vLLM's in float32, same weights.

python -m benchmarks.precision --size true --layers 4 --threads 1

The sides run in turns on packs of equal pictures. Prints medians, ratios, and cosines of our embeddings to float32's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.encoder import SIZES, make_tower
from encoder_service.device import Patches, embed
from encoder_service.towers.isaac import IsaacTower
from shared.sizing import Grid

#: patch grid and number of pictures: 224², 512² and 1024² with patches of 16
PACKS = {"224²": (Grid(14, 14), 4), "512²": (Grid(32, 32), 1), "1024²": (Grid(64, 64), 1)}


def peer(tower: IsaacTower) -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]:
    """vLLM's blocks with the tower's weights: ``(x [1, P, width], cu_seqlens, max_seqlen)`` → the same shape."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.isaac import Siglip2Encoder

    c = tower.config
    config: Any = SimpleNamespace(
        hidden_size=c.width,
        intermediate_size=c.hidden,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        layer_norm_eps=c.norm_eps,
        hidden_act=c.activation,
        attention_dropout=0.0,
    )
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        encoder = Siglip2Encoder(config, prefix="encoder").float().eval()
    named = dict(encoder.named_parameters())
    names = {
        "layer_norm1": "norm1",
        "layer_norm2": "norm2",
        "self_attn.qkv_proj": "attention.qkv",
        "self_attn.out_proj": "attention.out",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
    }
    with torch.no_grad():
        for number, block in enumerate(tower.blocks):
            for theirs, ours in names.items():
                for kind in ("weight", "bias"):
                    named.pop(f"layers.{number}.{theirs}.{kind}").copy_(block.get_submodule(ours).get_parameter(kind))
    assert not named, f"weights left alone: {sorted(named)}"
    for layer in encoder.modules():
        if (method := getattr(layer, "quant_method", None)) is not None:
            method.process_weights_after_loading(layer)

    def run(x: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
        out: torch.Tensor = encoder(inputs_embeds=x, cu_seqlens=bounds, max_seqlen=torch.tensor(longest))
        return out

    return run


def blocks(tower: IsaacTower, x: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
    for block in tower.blocks:
        x = block(x, bounds, longest)
    return x


def run_in_turns(
    exact: IsaacTower,
    theirs: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    towers: dict[str, IsaacTower],
    grid: Grid,
    count: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds of every side, once both float32 sides are known to agree."""
    bounds, longest = torch.arange(count + 1, dtype=torch.int32) * grid.patches, grid.patches
    x = torch.randn(grid.patches * count, exact.config.width)
    sides: dict[str, Callable[[], torch.Tensor]] = {"vLLM float32": lambda: theirs(x[None], bounds, longest)[0]}
    for side, tower in towers.items():
        sides[side] = partial(blocks, tower, x.to(tower.position_table.dtype), bounds, longest)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with torch.inference_mode():
        torch.testing.assert_close(sides["vLLM float32"](), sides["float32"]())
        for _ in range(repeats):
            for side, work in sides.items():
                begin = time.perf_counter()
                work()
                seconds[side].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="true")
    parser.add_argument("--layers", type=int, default=4, help="blocks; all blocks cost the same")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = replace(SIZES[options.size], layers=options.layers)
    exact = make_tower(config, torch.float32, packed=False)
    towers = {
        "float32": make_tower(config, torch.float32),
        "bfloat16": make_tower(config, torch.bfloat16),
        "int8": make_tower(config, torch.bfloat16, int8=True),
    }
    theirs = peer(exact)
    print(f"{options.size} tower, {options.layers} blocks, {options.threads} thread(s), medians of {options.repeats}\n")
    print("| pictures | side | median s | vLLM float32 / side | cosine, least |")
    print("|---|---|---:|---:|---:|")
    for name, (grid, count) in PACKS.items():
        seconds = run_in_turns(exact, theirs, towers, grid, count, options.repeats)
        images = [Patches(torch.rand(grid.patches, exact.patch_dim) * 2 - 1, grid)]
        wanted = embed(exact, images).embeddings[0]
        base = statistics.median(seconds["vLLM float32"])
        for side, times in seconds.items():
            cosine = "" if side not in towers else f"{_cosine(towers[side], images, wanted):.5f}"
            median = statistics.median(times)
            print(f"| {count} of {name} | {side} | {median:.3f} | {base / median:.2f}× | {cosine} |", flush=True)


def _cosine(tower: IsaacTower, images: list[Patches], wanted: torch.Tensor) -> float:
    cast = [Patches(image.values.to(tower.position_table.dtype), image.grid) for image in images]
    return float(F.cosine_similarity(embed(tower, cast).embeddings[0].float(), wanted).min())


if __name__ == "__main__":
    main()
