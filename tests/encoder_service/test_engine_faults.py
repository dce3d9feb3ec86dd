"""The engine when Redis, a file or a forward fails: time is lost, never a request, never a wrong answer."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from encoder_service import engine as engine_module
from encoder_service.device import Patches, embed
from encoder_service.replay import runner
from shared.errors import BadImage, Busy, ImageTooLarge, LookonceError, Unavailable
from shared.items import VisionItem
from shared.keys import image_digest
from shared.local_redis import LocalRedis
from tests.encoder_service.kit import NOWHERE, HeldForwards, Make, embedding, expected, file, idle, pixels


async def test_without_redis_the_record_travels_inline(make: Make, checkpoint: Path) -> None:
    engine, picture = await make(url=NOWHERE), pixels(10)
    item = await engine.encode(file(picture))
    assert item.record is not None
    assert torch.equal(await embedding(engine, item), expected(checkpoint, picture))
    assert engine.stats()["not_stored"] == 1
    again = await engine.encode(file(picture))
    assert again.record == item.record


async def test_inline_gives_the_record_of_new_and_known_pictures(make: Make) -> None:
    engine, data = await make(), file(pixels(11))
    new = await engine.encode(data, inline=True)
    known = await engine.encode(data, inline=True)
    assert new.record is not None
    assert bytes(known.record or b"") == bytes(new.record)
    assert (new.cached, known.cached) == (False, True)
    assert engine.stats()["forwards"] == 1


async def test_described_but_not_delivered_is_encoded_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, data = await make(), file(pixels(12))
    item = await engine.encode(data)

    async def nothing(key: str) -> None:
        return None

    monkeypatch.setattr(engine._cache, "fetch", nothing)
    again = await engine.encode(data, inline=True)
    assert again.key == item.key
    assert again.record is not None
    assert engine.stats()["forwards"] == 2


async def test_a_dead_owners_lease_is_taken_over(make: Make) -> None:
    """A10: an encoder that claimed and died costs the lease's time, not the request."""
    engine, picture = await make(lease=0.5), pixels(13)
    key = engine.identity().embedding_key(image_digest(picture))
    assert await engine._cache.claim(key, "an encoder that died")
    item = await asyncio.wait_for(engine.encode(file(picture)), 20)
    assert item.key == key
    assert not item.cached
    assert engine.stats()["takeovers"] >= 1


async def test_a_lease_whose_owner_delivers_is_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, data = await make(), await make(), file(pixels(14))
    forwards = HeldForwards(monkeypatch)
    one = asyncio.create_task(first.encode(data))
    await forwards.begun()
    two = asyncio.create_task(second.encode(data))
    await asyncio.sleep(0.2)
    assert second.stats()["pixels_held"] == 0
    forwards.release()
    assert (await one).key == (await two).key
    assert (await two).cached
    assert second.stats()["forwards"] == 0


async def test_an_encode_longer_than_its_lease_is_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner lives, so its lease is renewed: nobody takes over."""
    first, second, data = await make(lease=0.5), await make(lease=0.5), file(pixels(15))
    forwards = HeldForwards(monkeypatch)
    one = asyncio.create_task(first.encode(data))
    await forwards.begun()
    two = asyncio.create_task(second.encode(data))
    await asyncio.sleep(2)
    forwards.release()
    assert (await one).key == (await two).key
    assert (await two).cached
    assert (second.stats()["takeovers"], second.stats()["forwards"]) == (0, 0)


async def test_bad_files_are_refused_and_nothing_stays(make: Make) -> None:
    """D8."""
    engine, good = await make(), file(pixels(20))
    for data in (b"", b"no picture", good[: len(good) // 2], b"<html></html>"):
        with pytest.raises(BadImage):
            await engine.encode(data)
    await idle(engine)
    assert (await engine.encode(good)).tokens
    results = await asyncio.gather(*(engine.encode(good[:-30]) for _ in range(4)), return_exceptions=True)
    assert all(isinstance(result, BadImage) for result in results)


async def test_more_pixels_than_the_ceiling_are_refused_from_the_header(make: Make) -> None:
    """V8: 8000x8000 is above Isaac's 60 megapixels; no memory is spent on it."""
    engine = await make()
    buffer = io.BytesIO()
    Image.new("1", (8000, 8000)).save(buffer, "PNG")
    with pytest.raises(ImageTooLarge):
        await engine.encode(buffer.getvalue())
    await idle(engine)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 2), (3, 3), (1, 500), (500, 1)])
async def test_the_tiniest_pictures(make: Make, width: int, height: int) -> None:
    """V8, D11: rows and promised tokens agree for every size."""
    engine = await make()
    item = await engine.encode(file(pixels(26, width, height)))
    assert item.tokens == engine._running.loaded.preprocess.rule.tokens(width, height)
    assert len(await embedding(engine, item)) == item.tokens


async def test_values_that_are_not_finite_are_an_error_and_never_stored(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V1; only the image at fault fails."""
    engine = await make(batch_wait_ms=300.0)
    good, bad = pixels(21), pixels(22)

    def poisoned(tower: Any, images: list[Patches]) -> Any:
        result = embed(tower, images)
        for image, values in zip(images, result.embeddings, strict=True):
            if torch.equal(image.values, poison):
                with torch.inference_mode():
                    values[0, 0] = float("nan")
        return result

    poison, _ = engine._running.loaded.preprocess.patches(torch.from_numpy(bad))
    monkeypatch.setattr(runner, "embed", poisoned)
    results = await asyncio.gather(*(engine.encode(file(p)) for p in (good, bad)), return_exceptions=True)
    assert isinstance(results[0], VisionItem)
    assert isinstance(results[1], LookonceError)
    assert "NaN" in str(results[1])
    key = engine.identity().embedding_key(image_digest(bad))
    assert await engine._cache.describe(key) is None
    assert engine.stats()["not_finite"] == 1
    monkeypatch.undo()
    assert not (await engine.encode(file(bad))).cached


async def test_callers_that_joined_a_failed_run_try_once_more(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """C19: the failure reaches the one that started it; the rest share one more try."""
    engine, data = await make(), file(pixels(23))
    forwards = HeldForwards(monkeypatch, RuntimeError("out of memory"))
    tasks = [asyncio.create_task(engine.encode(data)) for _ in range(6)]
    await forwards.begun()
    await asyncio.sleep(0.05)
    monkeypatch.setattr(runner, "embed", embed)
    forwards.release()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, LookonceError) for result in results) == 1
    assert sum(isinstance(result, VisionItem) for result in results) == 5
    assert engine.stats()["forwards"] == 1
    await idle(engine)


@pytest.mark.parametrize("error", [RuntimeError("this grid does not work"), KeyError("bug"), MemoryError()])
async def test_one_image_that_fails_does_not_take_its_batch_along(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = await make(batch_wait_ms=300.0)
    pictures = [pixels(30 + n, 16 + 16 * n, 16) for n in range(3)]
    bad = engine._running.loaded.preprocess.rule.grid(32, 16)

    def failing(tower: Any, images: list[Patches]) -> Any:
        if any(image.grid == bad for image in images):
            raise error
        return embed(tower, images)

    monkeypatch.setattr(runner, "embed", failing)
    results = await asyncio.gather(*(engine.encode(file(p)) for p in pictures), return_exceptions=True)
    assert [isinstance(result, VisionItem) for result in results] == [True, False, True]
    assert isinstance(results[1], LookonceError)
    await engine.check_health()


async def test_a_full_engine_answers_busy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make(max_queue=2)
    forwards = HeldForwards(monkeypatch)
    tasks = [asyncio.create_task(engine.encode(file(pixels(40 + n)))) for n in range(2)]
    await forwards.begun()
    with pytest.raises(Busy) as refused:
        await engine.encode(file(pixels(49)))
    assert refused.value.retry_after > 0
    forwards.release()
    await asyncio.gather(*tasks)
    await engine.encode(file(pixels(49)))
    await idle(engine)


async def test_stop_answers_everybody_and_start_is_required(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make()
    forwards = HeldForwards(monkeypatch)
    tasks = [asyncio.create_task(engine.encode(file(pixels(50 + n % 3)))) for n in range(6)]
    await forwards.begun()
    stopping = asyncio.create_task(engine.stop())
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    forwards.release()
    await stopping
    assert all(isinstance(result, Unavailable) for result in results), results
    for call in (engine.encode(b""), engine.check_health()):
        with pytest.raises(Unavailable):
            await call
    with pytest.raises(Unavailable):
        engine.identity()


async def test_redis_that_dies_and_comes_back(make: Make, tmp_path: Path) -> None:
    """R5: while it is away records travel inline; afterwards the cache works again without a restart."""
    server = LocalRedis(tmp_path / "own", 32)
    server.start()
    engine = await make(url=server.url)
    assert (await engine.encode(file(pixels(15)))).record is None
    server.stop()
    away = await asyncio.gather(*(engine.encode(file(pixels(16 + n))) for n in range(3)))
    assert all(item.record is not None for item in away)
    server.start()
    try:
        numbers = iter(range(200, 1000))
        deadline = time.monotonic() + 10
        while (await engine.encode(file(pixels(next(numbers))))).record is not None:
            assert time.monotonic() < deadline, "the cache was not used again"
            await asyncio.sleep(0.2)
        assert not (await engine.encode(file(pixels(15)))).cached  # the new server is empty
    finally:
        server.stop()


async def test_a_damaged_entry_is_encoded_again(make: Make) -> None:
    """R10."""
    engine, data = await make(), file(pixels(17))
    item = await engine.encode(data)
    record = bytearray(await engine._cache.fetch(item.key))
    record[40] ^= 1
    await engine._cache.put(item.key, bytes(record))
    again = await engine.encode(data)
    assert not again.cached
    assert await engine._cache.fetch(item.key)


async def test_a_frozen_redis_costs_bounded_time(make: Make, tmp_path: Path) -> None:
    """R5: SIGSTOP; every operation has its deadline, and after a few of them the circuit opens."""
    server = LocalRedis(tmp_path / "frozen", 32)
    server.start()
    engine = await make(url=server.url, timeout=0.2)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        item = await engine.encode(file(pixels(18)))
        assert item.record is not None
        assert time.monotonic() - begin < 5
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.stop()


class Stacked(torch.nn.Module):
    """A tower whose output keeps the grid: ``[images, rows, columns, width]``."""

    def __init__(self, tower: torch.nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "tower" else getattr(self.tower, name)

    def forward(self, patches: torch.Tensor, plan: Any) -> torch.Tensor:
        rows = self.tower(patches, plan)
        return rows.view(1, 1, *rows.shape)


async def test_a_tower_whose_output_has_another_shape_does_not_start(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V18: never flattened by guess."""
    load = engine_module.load_encoder

    def stacked(*arguments: Any) -> Any:
        loaded = load(*arguments)
        return dataclasses.replace(loaded, tower=Stacked(loaded.tower))

    monkeypatch.setattr(engine_module, "load_encoder", stacked)
    with pytest.raises(LookonceError, match=r"Stacked gave values of shape \[1, 1, \d+, \d+\].*one row a token"):
        await make()
