"""Small towers, checkpoints, Redis servers and engines that several tests share."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.engine import EncoderEngine
from encoder_service.towers.isaac import IsaacTower, IsaacTowerConfig
from shared.cache import AsyncEmbeddingCache
from shared.config import CacheSettings, EncoderSettings, ImageSettings, ModelSettings
from shared.local_redis import LocalRedis
from shared.sizing import Grid
from tests.encoder_service.kit import Make
from tools.checkpoints.isaac import write_isaac


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint in the new, nested layout."""
    return write_isaac(tmp_path_factory.mktemp("isaac"), nested=True)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A sharded checkpoint to damage."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """The same in one file, old layout."""
    return write_isaac(tmp_path / "single", nested=False, sharded=False)


@pytest.fixture(scope="session")
def small_tower() -> IsaacTower:
    """Random weights of a size at which every kernel is of the usual kind."""
    torch.manual_seed(0)
    tower = IsaacTower(IsaacTowerConfig(96, 3, 3, 192, 4, 8, 2, 80))
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return tower.eval().requires_grad_(False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread for the test: the least rows of a forward depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_patches(grid: Grid, patch_dim: int, seed: int = 0) -> torch.Tensor:
    """Patches as preprocessing gives them: values in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed + 1000 * grid.height + grid.width)
    return torch.rand(grid.patches, patch_dim, generator=generator) * 2 - 1


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRedis]:
    server = LocalRedis(tmp_path_factory.mktemp("redis") / "r", 128)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def make(checkpoint: Path, redis_server: LocalRedis) -> AsyncIterator[Make]:
    """Starts engines and ends them with the test; keyword arguments go to the encoder's settings."""
    ends: list[Callable[[], Any]] = []

    async def engine(
        *, url: str | None = None, lease: float = 30.0, timeout: float = 1.0, name: str = "m", **encoder: Any
    ) -> EncoderEngine:
        cache = AsyncEmbeddingCache(CacheSettings(timeout=timeout, lease=lease), url or redis_server.url)
        model = ModelSettings(name=name, checkpoint=checkpoint, encoder=EncoderSettings(threads=1, **encoder))
        made = EncoderEngine(model, ImageSettings(), cache)
        await made.start()
        ends.extend([cache.close, made.stop])
        return made

    yield engine
    for end in reversed(ends):
        await end()
