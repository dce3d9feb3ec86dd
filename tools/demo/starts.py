"""Where the tower's training starts: positions as waves, and attention heads that look at a neighbouring patch.

A transformer that starts from noise spends most of a short training on finding out that neighbours matter. Here every
head starts as one tap of a convolution: positions are sines and cosines in a few channels of the residual stream, keys
read them as they are, queries read them turned by the wanted offset, so that the product peaks at that offset. All of
it is trained on afterwards like any other weight.
"""

from __future__ import annotations

import math

import torch

from encoder_service.towers.isaac import IsaacBlock, IsaacTower
from encoder_service.towers.pixtral import PixtralBlock, PixtralTower

Offset = tuple[int, int]

#: where the heads of each block look at first, in patches (down, right)
OFFSETS: tuple[tuple[Offset, ...], ...] = (
    ((0, -1), (0, 1), (-1, 0), (1, 0)),
    ((-1, -1), (1, 1), (1, -1), (-1, 1)),
    ((0, -2), (0, 2), (-2, 0), (2, 0)),
    ((0, 0), (0, 0), (0, 0), (0, 0)),
)
#: how sharply each block's heads look there at first
SHARPNESS = (2.6, 2.6, 2.0, 1.4)
AMPLITUDE = 1.0
#: the same for rotated queries and keys
ROTARY_SHARPNESS = 1.4
#: wavelengths, in patches
LONGEST, SHORTEST = 40.0, 3.0


def _frequencies(number: int) -> torch.Tensor:
    steps = torch.linspace(0, 1, number)
    return 2 * math.pi / (LONGEST ** (1 - steps) * SHORTEST**steps)


def _waves(places: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """``[N]`` → ``[N, 2 · frequencies]``: all cosines, then all sines."""
    angles = places[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _turn(offset: Offset, frequencies: torch.Tensor) -> torch.Tensor:
    """The matrix that turns the waves of a place into those of the place ``offset`` further."""
    number = len(frequencies)
    out = torch.zeros(4 * number, 4 * number)
    for axis, shift in enumerate(offset):
        cosines, sines = (slice(start, start + number) for start in (2 * axis * number, (2 * axis + 1) * number))
        cos, sin = (shift * frequencies).cos().diag(), (shift * frequencies).sin().diag()
        out[cosines, cosines], out[cosines, sines] = cos, -sin
        out[sines, cosines], out[sines, sines] = sin, cos
    return out


@torch.no_grad()
def start_as_convolution(tower: IsaacTower) -> None:
    """Sets position table and attention of a new tower; one head's size of channels carries the position."""
    side, width = tower.config.position_side, tower.config.width
    channels = width // tower.config.heads
    frequencies = _frequencies(channels // 4)
    places = torch.arange(side, dtype=torch.float32)
    waves = AMPLITUDE * _waves(places, frequencies)
    down, right = (part.expand(side, side, -1) for part in (waves[:, None], waves[None]))
    tower.position_table.normal_(std=0.02)
    tower.position_table[:, :channels] = torch.cat([down, right], dim=-1).flatten(0, 1)
    for block, offsets, sharpness in zip(tower.blocks, OFFSETS, SHARPNESS, strict=False):
        assert isinstance(block, IsaacBlock)
        query, key, _ = block.attention.qkv.weight.view(3, tower.config.heads, channels, width)
        query.mul_(0.3)
        key.mul_(0.3)
        for head, offset in enumerate(offsets):
            query[head, :, :channels] = sharpness * _turn(offset, frequencies)
            key[head, :, :channels] = sharpness * torch.eye(channels)


@torch.no_grad()
def start_looking_around(tower: PixtralTower) -> None:
    """Sets patch weights and attention of a new tower with rotary positions.

    A head's queries are its keys, turned as far as the rotation turns between a patch and the one at the wanted offset:
    where patches are alike, the product peaks there.
    """
    torch.nn.init.normal_(tower.patch_weight, std=tower.patch_dim**-0.5)
    heads, width = tower.config.heads, tower.config.width
    size = width // heads
    frequencies = tower.config.rope_theta ** -(torch.arange(0, size, 2) / size)
    for block, offsets in zip(tower.blocks, OFFSETS, strict=False):
        assert isinstance(block, PixtralBlock)
        query, key, _ = block.attention.qkv.weight.view(3, heads, size, width)
        for head, (down, right) in enumerate(offsets):
            rows = torch.nn.init.orthogonal_(torch.empty(size, width)) * ROTARY_SHARPNESS
            key[head] = rows
            angles = torch.cat([down * frequencies[0::2], right * frequencies[1::2]])[:, None]
            first, second = rows.chunk(2)
            turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
            query[head] = torch.cat(turned)
