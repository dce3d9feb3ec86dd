"""RADIO as the tower of the Nemotron chat models: tiles, pixel shuffle and projector against vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from encoder_service.checkpoints import load_encoder
from encoder_service.towers.base import Budget, GridError
from encoder_service.towers.radio import RadioTower
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches, relative_error
from tests.encoder_service.damage import all_tensors
from tests.encoder_service.oracle import vllm_context
from tests.encoder_service.oracle_radio import chat_projector, pixels_of, shuffled, vllm_packed, vllm_radio
from tools.checkpoints.radio import Kind, Shape, write_radio

#: one tile; two with a thumbnail; a full dozen with one
STACKS = [Grid(8, 8), Grid(24, 8), Grid(104, 8)]
DYNAMIC = [
    Grid(*sides)
    for sides in (
        (2, 2), (2, 64), (64, 2), (8, 8), (16, 16), (6, 20), (20, 6), (18, 24), (24, 18), (4, 10), (32, 32), (12, 14),
    )
]  # fmt: skip
FLOAT32, BFLOAT16 = 1e-5, 2e-2


@pytest.fixture(scope="module", autouse=True)
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # vLLM compiles its RMSNorm on its own otherwise
    with vllm_context(tmp_path_factory.mktemp("group")), torch.compiler.set_stance("force_eager"):
        yield


def embed(checkpoint: Path, dtype: str, patches: list[torch.Tensor], grids: list[Grid]) -> list[torch.Tensor]:
    tower = load_encoder(checkpoint, dtype).tower  # type: ignore[arg-type]
    plan = tower.plan(grids)
    with torch.inference_mode():
        return list(tower(torch.cat(patches).to(getattr(torch, dtype)), plan).split(plan.tokens))


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("kind", ["llama", "nano"])
@torch.inference_mode()
def test_tiles_equal_vllm(tmp_path: Path, kind: Kind, version: str) -> None:
    """V13: every tile has its own prefix tokens, and none of them reaches the language model."""
    checkpoint = write_radio(tmp_path, kind, Shape(ps_version=version), seed=8)
    vit, project = vllm_radio(checkpoint), chat_projector(checkpoint)
    patches = [random_patches(grid, 192) for grid in STACKS]
    tile = Grid(8, 8)
    for dtype, bound in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        ours = embed(checkpoint, dtype, patches, STACKS)
        for grid, values, mine in zip(STACKS, patches, ours, strict=True):
            pictures = torch.stack([pixels_of(piece, tile, 8) for piece in values.split(64)])
            _, features = vit(pictures)
            reference = project(torch.cat([shuffled(one, tile, kind, version) for one in features]))
            assert mine.shape == reference.shape == (grid.patches // 4, 48)
            assert relative_error(mine, reference) <= bound, (dtype, grid)


@pytest.mark.parametrize("final_norm", [False, True])
@torch.inference_mode()
def test_dynamic_resolution_equals_vllm(tmp_path: Path, final_norm: bool) -> None:
    """V18: the same checkpoint layout with bounds of patches instead of tiles."""
    shape = Shape(bounds=(4, 4096), final_norm=final_norm)
    checkpoint = write_radio(tmp_path, "nano", shape, seed=9)
    vit, project = vllm_radio(checkpoint), chat_projector(checkpoint)
    patches = [random_patches(grid, 192) for grid in DYNAMIC]
    features = vllm_packed(vit, patches, DYNAMIC)
    if final_norm:
        stored = all_tensors(checkpoint)
        norm = "vision_projector.vision_final_layernorm."
        features = [F.layer_norm(one, (64,), stored[f"{norm}weight"], stored[f"{norm}bias"], 1e-6) for one in features]
    for dtype, bound in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        for grid, values, theirs, mine in zip(
            DYNAMIC, patches, features, embed(checkpoint, dtype, patches, DYNAMIC), strict=True
        ):
            reference = project(shuffled(theirs, grid, "nano", "v2"))
            assert mine.shape == reference.shape
            assert relative_error(mine, reference) <= bound, (dtype, grid)
            (alone,) = embed(checkpoint, dtype, [values], [grid])
            assert relative_error(alone, reference) <= bound, (dtype, grid)


@torch.inference_mode()
def test_padding_of_tiles_never_changes_a_real_row(tmp_path: Path) -> None:
    tower = load_encoder(write_radio(tmp_path, "llama"), "float32").tower
    patches = [random_patches(grid, 192) for grid in STACKS[:2]]
    exact = tower(torch.cat(patches), tower.plan(STACKS[:2]))
    budget = Budget(256 + 68, 5)
    plan = tower.plan(STACKS[:2], budget)
    padded = tower(torch.cat([*patches, torch.full((68, 192), 1e30)]), plan)
    assert padded.shape == (81, 48)
    assert plan.cu_seqlens.shape == (324 // 64 + 1,)
    assert relative_error(padded[:64], exact) <= 1e-6


def test_grids_that_are_no_stack_of_tiles_are_refused(tmp_path: Path) -> None:
    tower = load_encoder(write_radio(tmp_path, "llama"), "float32").tower
    assert isinstance(tower, RadioTower)
    for grid in (Grid(8, 16), Grid(12, 8), Grid(4, 4)):
        with pytest.raises(GridError, match=f"{grid.height}x{grid.width}"):
            tower.plan([grid])
