"""Packed attention: no leak between sequences, silence in the padding, one graph for the compiler."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F

from encoder_service.towers.attention_cuda import attend_masked
from encoder_service.towers.base import Budget, GridError, sequence_bounds
from encoder_service.towers.isaac import IsaacTower
from encoder_service.towers.layers import merge_index, packed_attention
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches

LENGTHS = [5, 5, 12, 1, 0, 7, 7, 7]


def qkv(rows: int, *, grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(rows, 2, 16, requires_grad=grad) for _ in range(3)]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The definition: one full attention with a block-diagonal mask."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = owner[:, None] == owner[None, :]
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize("lengths", [LENGTHS, [9], [4, 4, 4], [0, 0, 3]])
def test_equals_masked_attention(lengths: list[int]) -> None:
    q, k, v = qkv(sum(lengths))
    out = packed_attention(q, k, v, sequence_bounds(lengths, len(lengths)), max(lengths))
    torch.testing.assert_close(out, dense(q, k, v, lengths))


def test_padding_rows_come_back_zero_even_when_poisoned() -> None:
    """V1: what lies after the last sequence neither reaches a real row nor comes out."""
    lengths, padding = LENGTHS, 11
    used = sum(lengths)
    q, k, v = qkv(used + padding)
    for x in (q, k, v):
        x[used:] = float("nan")
    bounds = sequence_bounds(lengths, len(lengths) + 3)
    out = packed_attention(q, k, v, bounds, used + padding)
    assert torch.equal(out[used:], torch.zeros(padding, 2, 16))
    clean = packed_attention(q[:used], k[:used], v[:used], sequence_bounds(lengths, len(lengths)), 12)
    assert torch.equal(out[:used], clean)


def test_the_masked_form_for_cuda_is_the_same() -> None:
    """V1: padding rows of NaN, zero-length sequences in the middle and at the end."""
    lengths, used, padding = LENGTHS, sum(LENGTHS), 11
    q, k, v = qkv(used + padding)
    expected = dense(q[:used], k[:used], v[:used], lengths)
    for x in (q, k, v):
        x[used:] = float("nan")
    out = attend_masked(q, k, v, sequence_bounds(lengths, len(lengths) + 3))
    torch.testing.assert_close(out[:used], expected)
    assert torch.equal(out[used:], torch.zeros(padding, 2, 16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_cuda(dtype: torch.dtype) -> None:
    used, padding = sum(LENGTHS), 11
    q, k, v = (x.to("cuda", dtype) for x in qkv(used + padding))
    expected = dense(q[:used].cpu().float(), k[:used].cpu().float(), v[:used].cpu().float(), LENGTHS)
    for x in (q, k, v):
        x[used:] = float("nan")
    out = packed_attention(q, k, v, sequence_bounds(LENGTHS, len(LENGTHS) + 3).cuda(), used + padding).cpu().float()
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out[:used], expected, atol=bound, rtol=bound)
    assert torch.equal(out[used:], torch.zeros(padding, 2, 16))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_an_empty_batch_is_all_padding(lengths: list[int]) -> None:
    """V7: warm-up and idle ranks run on nothing."""
    q, k, v = qkv(4)
    assert torch.equal(packed_attention(q, k, v, sequence_bounds(lengths, 2), 0), torch.zeros_like(q))


def test_the_operator_is_well_formed() -> None:
    q, k, v = qkv(sum(LENGTHS) + 2)
    operator = torch.ops.lookonce.packed_attention.default
    torch.library.opcheck(operator, (q, k, v, sequence_bounds(LENGTHS, len(LENGTHS)), 12))


def test_gradients_equal_masked_attention() -> None:
    lengths = [length for length in LENGTHS if length]
    packed, masked = qkv(sum(lengths), grad=True), qkv(sum(lengths), grad=True)
    packed_attention(*packed, sequence_bounds(lengths, len(lengths)), 12).square().sum().backward()  # type: ignore[misc, call-arg]
    dense(*masked, lengths).square().sum().backward()  # type: ignore[misc, call-arg]
    for mine, theirs in zip(packed, masked, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_blocks_become_tokens_row_by_row() -> None:
    index = merge_index([Grid(2, 4), Grid(4, 2)], 2, tokens=6)
    assert index.tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]


@torch.inference_mode()
def test_a_padded_plan_gives_the_same_bits(small_tower: IsaacTower) -> None:
    """Shapes come from the budget alone, and poison in the padding reaches no token."""
    grids = [Grid(8, 8), Grid(4, 16), Grid(12, 6)]
    patches = torch.cat([random_patches(grid, 48) for grid in grids])
    plain = small_tower(patches, small_tower.plan(grids))
    budget = Budget(patches=320, images=6)
    plan = small_tower.plan(grids, budget)
    assert plan.cu_seqlens.shape == (7,)
    assert plan.max_seqlen == 320
    padded = torch.full((320, 48), float("nan"))
    padded[: len(patches)] = patches
    out = small_tower(padded, plan)
    assert out.shape == (80, 80)
    assert torch.equal(out[: sum(plan.tokens)], plain)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("grids", "budget", "words"),
    [
        ([Grid(3, 4)], None, "3x4 .* merge factor 2"),
        ([Grid(0, 4)], None, "0x4 is empty"),
        ([Grid(4, 4)], Budget(12, 1), "1 images with 16 patches exceed .* 12 patches"),
        ([Grid(2, 2), Grid(2, 2)], Budget(64, 1), "2 images .* exceed the budget of 1 images"),
        ([Grid(2, 2)], Budget(10, 1), "10 patches is not divisible by 4"),
    ],
)
def test_grids_that_cannot_be_are_refused(
    small_tower: IsaacTower, grids: list[Grid], budget: Budget | None, words: str
) -> None:
    with pytest.raises(GridError, match=words):
        small_tower.plan(grids, budget)


@torch.inference_mode()
def test_no_image_at_all(small_tower: IsaacTower) -> None:
    plan = small_tower.plan([])
    assert small_tower(torch.empty(0, 48), plan).shape == (0, 80)
    plan = small_tower.plan([], Budget(16, 2))
    assert small_tower(torch.zeros(16, 48), plan).shape == (4, 80)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@torch.inference_mode()
def test_one_graph_for_the_compiler(small_tower: IsaacTower) -> None:
    """V7: compiled and eager agree, and nothing in forward breaks the graph."""
    budget = Budget(128, 4)
    compiled = torch.compile(small_tower, fullgraph=True, dynamic=False)
    for grids in ([Grid(8, 8)], [Grid(4, 4), Grid(8, 12)], [Grid(2, 2)] * 4):
        plan = small_tower.plan(grids, budget)
        patches = torch.zeros(128, 48)
        used = sum(grid.patches for grid in grids)
        patches[:used] = torch.cat([random_patches(grid, 48) for grid in grids])
        tokens = sum(plan.tokens)
        torch.testing.assert_close(
            compiled(patches, plan)[:tokens], small_tower(patches, plan)[:tokens], atol=1e-4, rtol=1e-4
        )


def test_cached_positions_follow_the_weights(small_tower: IsaacTower) -> None:
    """A plan after training, loading or conversion does not use the former table."""
    tower, grid = copy.deepcopy(small_tower), Grid(4, 6)
    before = tower.plan([grid]).extras["positions"]
    with torch.no_grad():
        tower.position_table.add_(1)
    assert torch.allclose(tower.plan([grid]).extras["positions"], before + 1, atol=1e-5)
    assert tower.to(torch.bfloat16).plan([grid]).extras["positions"].dtype is torch.bfloat16
