"""Our Pixtral tower against vLLM's and transformers', with the weights of one checkpoint folder per layout.

Where the two differ (the epsilon before the patch merger, of which the published checkpoints make nothing) the layout's
author wins: transformers for its own, vLLM, which has no other, for Mistral's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from encoder_service.checkpoints import LoadedEncoder, load_encoder
from encoder_service.towers.base import Budget
from encoder_service.towers.pixtral import PixtralTower
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches, relative_error
from tests.encoder_service.oracle import vllm_context
from tests.encoder_service.oracle_pixtral import Oracle, picture, transformers_hf, vllm_hf, vllm_native
from tools.checkpoints.pixtral import KINDS, LAYERS, LONGEST, PATCH, Kind, write_pixtral

SIDE = LONGEST // PATCH
#: one cell, the longest strips, the largest picture, squares, odd ratios; multiples of 2 for the merger
GRIDS = [
    Grid(*sides)
    for sides in (
        (2, 2), (2, SIDE), (SIDE, 2), (SIDE, SIDE), (4, 4), (2, 6), (6, 2), (18, 30),
        (30, 18), (10, 26), (24, 24), (14, 12), (22, 8), (4, 20),
    )
]  # fmt: skip
#: what only a tower without a merger takes
ODD_GRIDS = [Grid(1, 1), Grid(1, SIDE), Grid(SIDE, 1), Grid(3, 5), Grid(17, 11)]
FLOAT32, BFLOAT16 = 1e-5, 2e-2
DTYPES = [("float32", FLOAT32), ("bfloat16", BFLOAT16)]


class Bench(NamedTuple):
    """A checkpoint in both dtypes next to the oracles that hold its weights."""

    kind: Kind
    encoders: dict[str, LoadedEncoder]
    oracles: dict[str, Oracle]
    checkpoint: Path

    @property
    def grids(self) -> list[Grid]:
        return GRIDS if self.kind in ("native-merger", "mistral3") else GRIDS + ODD_GRIDS

    def expected(self, patches: list[torch.Tensor], grids: list[Grid]) -> dict[str, list[torch.Tensor]]:
        pictures = [picture(values, grid, PATCH) for values, grid in zip(patches, grids, strict=True)]
        return {name: oracle(pictures) for name, oracle in self.oracles.items()}


VARIANTS = [(kind, new) for kind in KINDS for new in (False, True) if not (new and kind.startswith("native"))]


@pytest.fixture(scope="module", params=VARIANTS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    kind, new_names = request.param
    folder = tmp_path_factory.mktemp("pixtral")
    checkpoint = write_pixtral(folder / "checkpoint", kind, seed=3, sharded=new_names, new_names=new_names)
    encoders = {dtype: load_encoder(checkpoint, dtype) for dtype in ("float32", "bfloat16")}  # type: ignore[arg-type]
    with vllm_context(tmp_path_factory.mktemp("group")):
        if kind.startswith("native"):
            oracles = {"vllm": vllm_native(checkpoint)}
        else:
            oracles = {"vllm": vllm_hf(checkpoint), "transformers": transformers_hf(checkpoint)}
        yield Bench(kind, encoders, oracles, checkpoint)


@torch.inference_mode()
def embed_packed(encoder: LoadedEncoder, patches: list[torch.Tensor], grids: list[Grid]) -> list[torch.Tensor]:
    plan = encoder.tower.plan(grids)
    packed = torch.cat(patches).to(next(encoder.tower.parameters()).dtype)
    return list(encoder.tower(packed, plan).split(plan.tokens))


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_alone_equals_the_oracles(bench: Bench, dtype: str, bound: float) -> None:
    worst = {}
    for grid in bench.grids:
        patches = [random_patches(grid, 3 * PATCH**2)]
        (ours,) = embed_packed(bench.encoders[dtype], patches, [grid])
        for name, (theirs,) in bench.expected(patches, [grid]).items():
            assert ours.shape == theirs.shape, (grid, name)
            worst[name, grid] = relative_error(ours, theirs)
    assert max(worst.values()) <= bound, worst


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_packed_equals_the_oracles_image_by_image(bench: Bench, dtype: str, bound: float) -> None:
    """V6: neighbours of other sizes in the batch change nothing."""
    grids = bench.grids
    patches = [random_patches(grid, 3 * PATCH**2) for grid in grids]
    ours = embed_packed(bench.encoders[dtype], patches, grids)
    for name, theirs in bench.expected(patches, grids).items():
        errors = [relative_error(mine, other) for mine, other in zip(ours, theirs, strict=True)]
        assert max(errors) <= bound, (name, dict(zip(grids, errors, strict=True)))


def test_the_comparison_would_notice_a_transposed_picture(bench: Bench) -> None:
    """Rows and columns turn with different frequencies; random weights alone must show it."""
    grid, turned = Grid(4, 6), Grid(6, 4)
    patches = random_patches(grid, 3 * PATCH**2)
    (ours,) = embed_packed(bench.encoders["float32"], [patches], [turned])
    for (theirs,) in bench.expected([patches], [grid]).values():
        assert relative_error(ours, theirs) > 0.01


@torch.inference_mode()
def test_a_padded_plan_gives_the_same_bits(bench: Bench) -> None:
    """Shapes come from the budget alone, and poison in the padding reaches no token."""
    tower = bench.encoders["float32"].tower
    grids = [Grid(8, 8), Grid(4, 16), Grid(12, 6)]
    patches = torch.cat([random_patches(grid, tower.patch_dim) for grid in grids])
    plain = tower(patches, tower.plan(grids))
    plan = tower.plan(grids, Budget(patches=320, images=6))
    assert (plan.cu_seqlens.shape, plan.max_seqlen, plan.extras["cos"].shape[0]) == ((7,), 320, 320)
    padded = torch.full((320, tower.patch_dim), float("nan"))
    padded[: len(patches)] = patches
    out = tower(padded, plan)
    assert out.shape == (320 // tower.merge**2, tower.width)
    assert torch.equal(out[: sum(plan.tokens)], plain)


def test_both_layouts_of_one_model_share_their_embeddings(tmp_path: Path) -> None:
    """Pairs and halves are one order after loading, so the fingerprints agree to the bit, whatever the names."""
    for pair in (("native", "llava"), ("native-merger", "mistral3")):
        prints = {
            load_encoder(write_pixtral(tmp_path / f"{kind}{new}", kind, new_names=new), "float32").fingerprints.tower
            for kind in pair
            for new in (False, True)
        }
        assert len(prints) == 1


@pytest.mark.parametrize("layer", [0, 1, 2, -2, -3, [1, -1], [-1, 0, 2]])
def test_feature_layers(tmp_path: Path, layer: int | list[int]) -> None:
    """Only the blocks that are needed are built and read; several layers stand side by side."""
    checkpoint = write_pixtral(tmp_path / "c", "llava", feature_layer=layer)
    encoder = load_encoder(checkpoint, "float32")
    numbers = [n if n >= 0 else LAYERS + 1 + n for n in (layer if isinstance(layer, list) else [layer])]
    assert isinstance(encoder.tower, PixtralTower)
    assert len(encoder.tower.blocks) == max(numbers)
    read = {name for names in encoder.read.values() for name in names}
    assert not any(f"transformer.layers.{max(numbers)}." in name for name in read)
    grids = [Grid(4, 6), Grid(3, 3)]
    patches = [random_patches(grid, 3 * PATCH**2) for grid in grids]
    pictures = [picture(values, grid, PATCH) for values, grid in zip(patches, grids, strict=True)]
    ours = embed_packed(encoder, patches, grids)
    for mine, theirs in zip(ours, transformers_hf(checkpoint)(pictures), strict=True):
        assert relative_error(mine, theirs) <= FLOAT32


def test_the_norm_before_the_merger_has_the_text_models_epsilon(tmp_path: Path) -> None:
    """transformers' rule; vLLM has 1e-5 whatever the file says."""
    checkpoint = write_pixtral(tmp_path / "c", "mistral3")
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 0.5
    (checkpoint / "config.json").write_text(json.dumps(config))
    grid = Grid(4, 6)
    patches = random_patches(grid, 3 * PATCH**2)
    (ours,) = embed_packed(load_encoder(checkpoint, "float32"), [patches], [grid])
    (theirs,) = transformers_hf(checkpoint)([picture(patches, grid, PATCH)])
    assert relative_error(ours, theirs) <= FLOAT32
