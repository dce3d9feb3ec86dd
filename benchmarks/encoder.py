"""The encoder's ways to run one set of pictures of mixed size: each alone, packed, and replayed in a fixed size.

python -m benchmarks.encoder --dtype float32 --threads 1 [--backend compiled]

All sides run in turns, so that a busy machine slows all of them. Prints medians, ratios, and shares of the GEMM peak
that was measured between them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from encoder_service.device import Patches, embed
from encoder_service.replay import Replay, make_backend, warm_up
from encoder_service.towers.base import Budget
from encoder_service.towers.int8 import to_int8
from encoder_service.towers.isaac import IsaacTower, IsaacTowerConfig
from encoder_service.towers.packed import PackedLinear, can_pack, pack_weights
from shared.sizing import NaflexRule

#: pictures, width × height in pixels: thumbnails, photos of both ways round, a page
PICTURES = ((224, 224), (224, 224), (320, 240), (512, 512), (640, 480), (480, 640), (224, 224), (768, 512))
SIZES = {
    "small": IsaacTowerConfig(128, 4, 4, 384, 16, 16, 2, 192),
    "mid": IsaacTowerConfig(384, 6, 6, 1536, 16, 16, 2, 1024),
    "true": IsaacTowerConfig(1152, 27, 16, 4304, 16, 16, 2, 2048),
}


def make_tower(config: IsaacTowerConfig, dtype: torch.dtype, *, int8: bool = False, packed: bool = True) -> IsaacTower:
    torch.manual_seed(0)
    tower = IsaacTower(config)
    for parameter in tower.parameters():
        nn.init.normal_(parameter, std=0.02)
    tower = tower.to(dtype).eval().requires_grad_(False)
    if int8:
        to_int8(tower)
    if packed:
        pack_weights(tower)
    return tower


def make_images(tower: IsaacTower) -> list[Patches]:
    rule, dtype = NaflexRule(min_patches=None), tower.position_table.dtype
    grids = [rule.grid(width, height) for width, height in PICTURES]
    return [Patches((torch.rand(grid.patches, tower.patch_dim) * 2 - 1).to(dtype), grid) for grid in grids]


def operations(tower: IsaacTower, images: list[Patches]) -> float:
    """Floating point operations of the pictures alone: matrix products and attention."""
    total = 0.0

    def count(layer: nn.Linear, args: Any, output: torch.Tensor) -> None:
        nonlocal total
        total += 2.0 * output.numel() * layer.in_features

    hooks = [layer.register_forward_hook(count) for layer in tower.modules() if isinstance(layer, nn.Linear)]
    for _, grid in images:  # by the plan's own size: no padding is counted
        plan = tower.plan([grid])
        with torch.inference_mode():
            tower(torch.zeros(grid.patches, tower.patch_dim, dtype=tower.position_table.dtype), plan)
        total += 4.0 * grid.patches**2 * tower.config.width * tower.config.layers
    for hook in hooks:
        hook.remove()
    return total


def product(config: IsaacTowerConfig, dtype: torch.dtype) -> nn.Module:
    """A linear layer of the tower's own shape, as fast as there is one here."""
    linear = nn.Linear(config.width, config.hidden).to(dtype).requires_grad_(False)
    return PackedLinear(linear) if can_pack(dtype) else linear


def gemm_rate(layer: nn.Module, config: IsaacTowerConfig, rows: int, dtype: torch.dtype) -> float:
    """Operations per second of :func:`product`."""
    x = torch.randn(rows, config.width).to(dtype)
    with torch.inference_mode():
        begin = time.perf_counter()
        layer(x)
        return 2.0 * rows * config.width * config.hidden / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backend", choices=("eager", "compiled"), default="compiled")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    config, dtype = SIZES[options.size], getattr(torch, options.dtype)
    plain, tower = make_tower(config, dtype, packed=False), make_tower(config, dtype)
    images = make_images(tower)
    used = sum(image.grid.patches for image in images)
    budget = Budget(-(-used // 512) * 512, 16)
    replay = Replay(
        tower if options.backend == "eager" else plain, [budget], make_backend(options.backend, torch.device("cpu"))
    )
    (capture,) = warm_up(replay, [image.grid for image in images])
    layer, work = product(config, dtype), operations(plain, images)
    print(
        f"{options.size} tower, {options.dtype}, {options.threads} thread(s): {len(images)} pictures, {used} patches, "
        f"{work / 1e9:.1f} GFLOP; budget {capture}\n"
    )

    sides: dict[str, Callable[[], object]] = {
        "each alone": lambda: [embed(tower, [image]) for image in images],
        "packed": lambda: embed(tower, images),
        f"replayed ({options.backend})": lambda: replay.embed(images, path=budget),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    shares: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.repeats):
        for name, side in sides.items():
            before = gemm_rate(layer, config, used, dtype)
            begin = time.perf_counter()
            side()
            taken = time.perf_counter() - begin
            after = gemm_rate(layer, config, used, dtype)
            seconds[name].append(taken)
            shares[name].append(work / taken / max(before, after))
    base = statistics.median(seconds["each alone"])
    print("| way | median s | images/s | patches/s | against each alone | share of GEMM rate |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"| {name} | {median:.3f} | {len(images) / median:.1f} | {used / median:.0f} | {base / median:.2f}× | "
            f"{statistics.median(shares[name]):.2f} |"
        )
    print(f"\npadding of the replay: {(budget.patches - used) / budget.patches:.1%}")


if __name__ == "__main__":
    main()
