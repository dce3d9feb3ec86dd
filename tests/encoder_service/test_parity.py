"""Our Isaac tower against vLLM's and against transformers' SigLIP2, with the weights of one checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Siglip2VisionConfig, Siglip2VisionModel

from encoder_service.checkpoints import LoadedEncoder, load_encoder
from encoder_service.towers.isaac import IsaacTower
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches, relative_error
from tests.encoder_service.damage import all_tensors
from tests.encoder_service.oracle import isaac_oracle, oracle_embeddings, vllm_context
from tools.checkpoints.isaac import write_isaac

#: the extremes, squares, the learned table's own size (16x16), smaller and larger than it, odd ratios; V6's 277x512 and
#: 512x512 pixels are 32x18 and 32x32
GRIDS = [
    Grid(*sides)
    for sides in (
        (2, 2),
        (2, 128),
        (128, 2),
        (16, 16),
        (4, 4),
        (2, 6),
        (18, 32),
        (32, 18),
        (10, 26),
        (24, 24),
        (32, 32),
        (14, 12),
        (40, 6),
        (6, 58),
        (22, 34),
    )
]
FLOAT32, BFLOAT16 = 1e-5, 2e-2


@pytest.fixture(scope="module", params=["nested", "flat"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A checkpoint and the oracle that holds its weights."""
    checkpoint = write_isaac(
        tmp_path_factory.mktemp("parity"), nested=request.param == "nested", sharded=request.param == "nested", seed=5
    )
    with vllm_context(tmp_path_factory.mktemp("group")):
        yield checkpoint, isaac_oracle(checkpoint)


@pytest.fixture(scope="module")
def loaded(both: tuple[Path, Any]) -> dict[str, LoadedEncoder]:
    return {dtype: load_encoder(both[0], dtype) for dtype in ("float32", "bfloat16")}  # type: ignore[arg-type]


@torch.inference_mode()
def embed_packed(encoder: LoadedEncoder, patches: list[torch.Tensor], grids: list[Grid]) -> list[torch.Tensor]:
    plan = encoder.tower.plan(grids)
    packed = torch.cat(patches).to(next(encoder.tower.parameters()).dtype)
    return list(encoder.tower(packed, plan).split(plan.tokens))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", FLOAT32), ("bfloat16", BFLOAT16)])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.height}x{grid.width}")
def test_alone_equals_vllm(
    both: tuple[Path, Any], loaded: dict[str, LoadedEncoder], grid: Grid, dtype: str, bound: float
) -> None:
    patches = [random_patches(grid, 768)]
    (reference,) = oracle_embeddings(both[1], patches, [grid])
    (ours,) = embed_packed(loaded[dtype], patches, [grid])
    assert ours.shape == reference.shape == (grid.patches // 4, 64)
    assert relative_error(ours, reference) <= bound


@pytest.mark.parametrize(("dtype", "bound"), [("float32", FLOAT32), ("bfloat16", BFLOAT16)])
def test_packed_equals_vllm_image_by_image(
    both: tuple[Path, Any], loaded: dict[str, LoadedEncoder], dtype: str, bound: float
) -> None:
    """V6: neighbours of other sizes in the batch change nothing."""
    patches = [random_patches(grid, 768) for grid in GRIDS]
    reference = oracle_embeddings(both[1], patches, GRIDS)
    ours = embed_packed(loaded[dtype], patches, GRIDS)
    errors = [relative_error(mine, theirs) for mine, theirs in zip(ours, reference, strict=True)]
    assert max(errors) <= bound, dict(zip(GRIDS, errors, strict=True))


@torch.inference_mode()
def test_features_equal_transformers_siglip2_in_a_padded_batch(
    both: tuple[Path, Any], loaded: dict[str, LoadedEncoder]
) -> None:
    """transformers pads and masks where we pack; the rows of real patches agree."""
    prefix = "model.vision_embedding.0."
    weights = {name.removeprefix(prefix): t for name, t in all_tensors(both[0]).items() if name.startswith(prefix)}
    config = Siglip2VisionConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vision_use_head=False
    )
    model = Siglip2VisionModel(config).eval()
    names = set(model.state_dict())
    outer = "vision_model." if any(name.startswith("vision_model.") for name in names) else ""
    problems = model.load_state_dict({outer + name: tensor for name, tensor in weights.items()}, strict=False)
    assert not problems.unexpected_keys
    assert not [name for name in problems.missing_keys if "head" not in name]

    grids = [Grid(4, 4), Grid(2, 12), Grid(10, 6), Grid(16, 16)]
    patches = [random_patches(grid, 768) for grid in grids]
    longest = max(grid.patches for grid in grids)
    pixels, mask = torch.zeros(len(grids), longest, 768), torch.zeros(len(grids), longest, dtype=torch.int64)
    for row, (grid, values) in enumerate(zip(grids, patches, strict=True)):
        pixels[row, : grid.patches], mask[row, : grid.patches] = values, 1
    reference = model(pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=torch.tensor(grids))
    tower = loaded["float32"].tower
    assert isinstance(tower, IsaacTower)
    ours = tower.features(torch.cat(patches), tower.plan(grids)).split([grid.patches for grid in grids])
    for row, (grid, mine) in enumerate(zip(grids, ours, strict=True)):
        assert relative_error(mine, reference.last_hidden_state[row, : grid.patches]) <= FLOAT32
