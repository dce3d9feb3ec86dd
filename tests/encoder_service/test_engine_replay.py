"""The engine with forwards of fixed size: ready after warm-up, right embeddings, and everything in the metrics."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from prometheus_client import REGISTRY

from encoder_service.batcher import Batcher, Entry
from encoder_service.batching import Priority, WaitingRoom
from encoder_service.device import DeviceThread, Patches, embed
from encoder_service.engine import EncoderEngine
from encoder_service.replay import Replay, make_backend, warm_up
from encoder_service.stats import EncoderStats
from encoder_service.towers.base import Budget
from shared.cache import AsyncEmbeddingCache
from shared.config import CacheSettings, EncoderSettings, ImageSettings, ModelSettings
from shared.errors import ConfigError
from shared.sizing import Grid
from tests.encoder_service.conftest import random_patches
from tests.encoder_service.kit import NOWHERE, Make, embedding, expected, file, pixels
from tests.encoder_service.test_replay import SQUARES, random_tower

EAGER = {"backend": "eager", "budgets": (256, 512, 1024)}


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"lookonce_{name}", labels) or 0.0


async def test_pictures_through_budgets_and_past_them(make: Make, checkpoint: Path) -> None:
    """V1, V4: any order of sizes, batches that fill a budget and one that fits none."""
    engine = await make(name="fixed", replay=EAGER, max_batch_patches=1024)
    pictures = [pixels(500 + n, 16 + 9 * (n % 7), 12 + 11 * (n % 5)) for n in range(24)]
    items = await asyncio.gather(*(engine.encode(file(picture)) for picture in pictures))
    for picture, item in zip(pictures, items, strict=True):
        assert torch.equal(await embedding(engine, item), expected(checkpoint, picture))
    await engine.check_health()


async def test_ready_after_all_budgets_with_progress_and_metrics(checkpoint: Path) -> None:
    said: list[str] = []
    cache = AsyncEmbeddingCache(CacheSettings(), NOWHERE)
    settings = EncoderSettings(threads=1, replay=EAGER, max_batch_patches=1024)
    model = ModelSettings(name="warm", checkpoint=checkpoint, encoder=settings)
    engine = EncoderEngine(model, ImageSettings(), cache, progress=said.append)
    await engine.start()
    lines = "\n".join(said)
    assert "Warming up 3 budgets (eager): 256, 512, 1024 patches" in lines
    for patches in (256, 512, 1024):
        assert f"Budget of {patches} patches" in lines
        assert metric("encoder_warmup_seconds", model="warm", budget=str(patches)) > 0
        for path in ("replay", "eager"):
            assert metric("encoder_budget_seconds", model="warm", budget=str(patches), path=path) > 0
    assert "ready on cpu" in said[-1]
    assert engine.stats()["warmup_seconds"] > 0
    assert engine.stats()["forwards"] == 0

    item = await engine.encode(file(pixels(530)))
    stats = engine.stats()
    path = "replay" if stats["replays"] else "eager"
    assert stats["tokens"] == item.tokens
    assert metric("encoder_forwards_total", model="warm", path=path) == 1
    assert metric("encoder_forward_seconds_total", model="warm", path=path) > 0
    assert stats["gemm_share"] > 0
    assert metric("encoder_operations_per_patch", model="warm") > 0 < metric("encoder_gemm_rate", model="warm")
    assert 0 < metric("encoder_host_seconds_total", model="warm") < stats["encode_seconds"]
    assert metric("encoded_tokens_total", model="warm") == item.tokens
    assert metric("encoded_patches_total", model="warm") == item.grid.patches
    assert metric("encoder_padding_patches_total", model="warm") == stats["padding_patches"]
    assert metric("encoder_queue_seconds_count", model="warm") == 1
    assert metric("encoder_batch_fill_sum", model="warm") == pytest.approx(item.grid.patches / 1024)
    await engine.stop()
    await cache.close()


async def test_a_budget_that_cannot_be_stops_the_start(make: Make) -> None:
    with pytest.raises(ConfigError, match="258 patches must be divisible by 4"):
        await make(replay={"budgets": (258,)})


@pytest.mark.parametrize("depth", [1, 2])
async def test_batches_ahead_of_the_device_are_full_ones(depth: int) -> None:
    """With two under way, the second is put together during the first; a batch with room waits for company."""
    tower, budget = random_tower(), Budget(64, 16)
    device, host = DeviceThread(1), DeviceThread(1)
    replay = await device.run(lambda: Replay(tower, [budget], make_backend("eager", torch.device("cpu")), depth=depth))
    await device.run(lambda: warm_up(replay, SQUARES))
    room: WaitingRoom[Entry] = WaitingRoom(100, 64)
    batcher = Batcher("ahead", replay, device, host, room, 0.0, EncoderStats())
    held = threading.Event()
    blocker = asyncio.create_task(device.run(held.wait))
    images = [Patches(random_patches(Grid(4, 4), 48, seed), Grid(4, 4)) for seed in range(10)]
    tasks = [asyncio.create_task(batcher.submit(f"{n}", image, Priority.BATCH)) for n, image in enumerate(images)]
    await asyncio.sleep(0.3)
    assert len(room) == (6 if depth == 1 else 2)
    held.set()
    results = await asyncio.gather(*tasks)
    for image, result in zip(images, results, strict=True):
        assert torch.equal(result.values, embed(tower, [image]).embeddings[0])
    await blocker
    await batcher.stop()
    device.stop()
    host.stop()


@pytest.mark.slow
async def test_ten_thousand_requests_from_64_threads_each_get_their_own() -> None:
    """None lost, none mixed up, and memory is flat from the first quarter on."""
    tower, budgets = random_tower(), (Budget(64, 8), Budget(256, 32))
    device, host, stats = DeviceThread(1), DeviceThread(1), EncoderStats()
    replay = await device.run(lambda: Replay(tower, budgets, make_backend("eager", torch.device("cpu")), depth=2))
    await device.run(lambda: warm_up(replay, SQUARES))
    room: WaitingRoom[Entry] = WaitingRoom(1000, 256)
    room.use_sizes(budgets, replay.costs.price)
    batcher, loop = Batcher("crowd", replay, device, host, room, 0.001, stats), asyncio.get_running_loop()
    grids = [Grid(2 * h, 2 * w) for h in range(1, 5) for w in range(1, 5)]
    images = [Patches(random_patches(grids[n % 16], 48, n), grids[n % 16]) for n in range(200)]
    alone = [(await device.run(lambda image=image: embed(tower, [image]))).embeddings[0] for image in images]
    memory: list[int] = []

    def caller(thread: int) -> int:
        rng, right = random.Random(thread), 0
        for turn in range(157):
            n = rng.randrange(200)
            waiting = batcher.submit(f"{thread}:{turn}", images[n], Priority(turn % 2))
            right += torch.equal(asyncio.run_coroutine_threadsafe(waiting, loop).result(60).values, alone[n])
            if thread == 0 and turn % 13 == 0:
                memory.append(psutil.Process().memory_info().rss)
        return right

    with ThreadPoolExecutor(64) as threads:
        right = await asyncio.gather(*(loop.run_in_executor(threads, caller, thread) for thread in range(64)))
    assert sum(right) == stats.images == 64 * 157
    assert stats.forwards < stats.images / 4
    assert max(memory) - memory[len(memory) // 4] < 20 << 20
    await batcher.stop()
    device.stop()
    host.stop()
