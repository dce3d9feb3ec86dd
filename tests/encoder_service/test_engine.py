"""The engine with a real Redis: one forward per new picture."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_service import health
from encoder_service.batching import Priority
from encoder_service.device import Patches, embed
from encoder_service.engine import EncoderEngine
from shared.cache import AsyncEmbeddingCache
from shared.config import CacheSettings, ImageSettings, ModelSettings
from shared.errors import LookonceError, Unavailable
from shared.keys import alias_key, bytes_digest
from shared.record_values import Encoding
from shared.records import check_record
from tests.encoder_service.kit import NOWHERE, HeldForwards, Make, embedding, expected, file, idle, pixels, served


async def test_a_new_picture_is_encoded_and_stored(make: Make, checkpoint: Path) -> None:
    engine, picture = await make(), pixels(1)
    item = await engine.encode(file(picture))
    assert item.record is None
    assert not item.cached
    assert item.tokens == item.grid.patches // 4 == item.merged.patches
    assert {"decode", "hash", "preprocess", "queue", "encode", "put"} <= item.timings.keys()
    assert torch.equal(await embedding(engine, item), expected(checkpoint, picture))
    assert await engine._cache.resolve_alias(alias_key(bytes_digest(file(picture), None))) in item.key


async def test_concurrent_requests_for_one_new_picture_make_one_forward(make: Make) -> None:
    """C19, C13."""
    engine, data = await make(), file(pixels(2))
    items = await asyncio.gather(*(engine.encode(data) for _ in range(8)))
    assert len({item.key for item in items}) == 1
    assert engine.stats()["forwards"] == engine.stats()["images"] == 1
    assert sum(not item.cached for item in items) == 1


async def test_two_engines_on_one_redis_make_one_forward(make: Make) -> None:
    first, second = await make(), await make()
    data = file(pixels(3))
    items = await asyncio.gather(*(engine.encode(data) for engine in (first, second) * 3))
    assert len({item.key for item in items}) == 1
    assert first.stats()["forwards"] + second.stats()["forwards"] == 1


async def test_a_restart_finds_what_was_stored(make: Make) -> None:
    first, data = await make(), file(pixels(4))
    item = await first.encode(data)
    await first.stop()
    second = await make()
    again = await second.encode(data)
    assert (again.key, again.cached, again.grid, again.tokens) == (item.key, True, item.grid, item.tokens)
    assert second.stats()["forwards"] == 0
    assert second.stats()["cache_hits"] == 1


async def test_the_same_picture_in_another_file_is_one_entry(make: Make) -> None:
    engine, picture = await make(), pixels(5)
    item = await engine.encode(file(picture, "PNG"))
    other = await engine.encode(file(picture, "BMP"))
    assert other.key == item.key
    assert other.cached
    assert engine.stats()["forwards"] == 1
    assert await engine._cache.resolve_alias(alias_key(bytes_digest(file(picture, "BMP"), None))) in item.key


async def test_the_same_picture_in_two_files_at_once(make: Make) -> None:
    engine, picture = await make(), pixels(6)
    items = await asyncio.gather(*(engine.encode(file(picture, kind)) for kind in ("PNG", "BMP", "TIFF")))
    assert len({item.key for item in items}) == 1
    assert engine.stats()["forwards"] == 1


@pytest.mark.parametrize("kind", ["int8", "fp8"])
async def test_smaller_records_are_read_by_every_engine(make: Make, checkpoint: Path, kind: str) -> None:
    """One engine writes bytes, another that writes raw floats finds them: one key, one forward."""
    writer, reader, picture = await make(records=kind), await make(), pixels(7000 + len(kind))
    item = await writer.encode(file(picture))
    record = await writer._cache.fetch(item.key)
    assert record is not None
    assert check_record(record, item.key).encoding is Encoding[kind.upper()]
    again = await reader.encode(file(picture), inline=True)
    assert (again.key, again.record, reader.stats()["forwards"]) == (item.key, bytes(record), 0)
    truth = expected(checkpoint, picture)
    off = (await embedding(reader, again) - truth).abs()
    assert bool((off <= truth.abs().amax(1, keepdim=True) / (250 if kind == "int8" else 16)).all())


async def test_salts_never_meet(make: Make) -> None:
    """C18: in pairs, the same tenant hits and another one misses."""
    engine, data = await make(), file(pixels(7))
    items = [await engine.encode(data, salt=salt) for salt in ("a", "b", None, "a")]
    assert [item.cached for item in items] == [False, False, False, True]
    assert len({item.key for item in items}) == 3


async def test_equal_bytes_in_another_shape_are_another_picture(make: Make) -> None:
    """C1: 30x150 and 150x30 from the same byte string."""
    engine = await make()
    tall = pixels(8, 30, 150)
    wide = tall.reshape(30, 150, 3)
    one, two = await engine.encode(file(tall)), await engine.encode(file(wide))
    assert one.key != two.key
    assert not two.cached


async def test_two_hundred_mixed_requests_each_get_their_own(make: Make, checkpoint: Path) -> None:
    """A9: nobody is lost and nobody gets another's embedding."""
    engine = await make(max_queue=300, max_batch_patches=1024)
    pictures = [pixels(100 + n, 10 + 7 * (n % 13), 8 + 5 * (n % 17)) for n in range(60)]
    order = np.random.default_rng(0).integers(0, len(pictures), 200)
    items = await asyncio.gather(
        *(engine.encode(file(pictures[n]), priority=Priority(int(n) % 2), inline=bool(n % 3)) for n in order)
    )
    loaded = served(checkpoint)
    for n, item in zip(order, items, strict=True):
        values, grid = loaded.preprocess.patches(torch.from_numpy(pictures[n]))
        assert item.grid == grid
        assert torch.equal(await embedding(engine, item), embed(loaded.tower, [Patches(values, grid)]).embeddings[0])
    stats = engine.stats()
    assert stats["images"] == len(set(order.tolist()))
    assert stats["forwards"] < stats["images"]
    await idle(engine)


async def test_health_compares_bits(make: Make) -> None:
    engine = await make()
    await engine.check_health()
    tower = engine._running.loaded.tower
    with torch.no_grad():
        tower.position_table += 1e-3
    with pytest.raises(LookonceError, match="other bits"):
        await engine.check_health()


async def test_health_does_not_queue_behind_a_long_forward(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make()
    forwards = HeldForwards(monkeypatch)
    task = asyncio.create_task(engine.encode(file(pixels(80))))
    await forwards.begun()
    await asyncio.wait_for(engine.check_health(), 1)
    monkeypatch.setattr(health, "STUCK", 0.0)
    with pytest.raises(Unavailable, match="hang"):
        await engine.check_health()
    forwards.release()
    await task


async def test_nothing_blocks_the_event_loop(make: Make) -> None:
    """H16: large pictures are hashed, decoded and cut beside the loop."""
    engine = await make()
    files = [file(pixels(90 + n, 3000, 2000), "BMP") for n in range(4)]
    pauses: list[float] = []

    async def heartbeat() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            pauses.append(time.perf_counter() - before)

    beat = asyncio.create_task(heartbeat())
    await asyncio.gather(*(engine.encode(data) for data in files))
    beat.cancel()
    assert sorted(pauses)[int(len(pauses) * 0.9)] < 0.25


async def test_names_and_progress(checkpoint: Path) -> None:
    said: list[str] = []
    cache = AsyncEmbeddingCache(CacheSettings(), NOWHERE)
    engine = EncoderEngine(ModelSettings(name="m", checkpoint=checkpoint), ImageSettings(), cache, progress=said.append)
    await engine.start()
    assert len(engine.parameter_names()) == 39
    assert all("vision" in name for name in engine.parameter_names()), engine.parameter_names()
    assert any("39 tensors" in line for line in said)
    assert engine.identity().model == "m"
    await engine.stop()
    await engine.stop()
    await cache.close()


async def test_no_cross_talk_between_models(make: Make) -> None:
    """C12: another model name or dtype on the same Redis never hits."""
    data = file(pixels(95))
    one, two, three = await make(), await make(name="other"), await make(dtype="bfloat16")
    items = [await engine.encode(data) for engine in (one, two, three)]
    assert len({item.key for item in items}) == 3
    assert not any(item.cached for item in items)
