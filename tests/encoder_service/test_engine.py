"""The engine with a real Redis: one forward per new picture, whatever happens around it."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_service import batcher, health
from encoder_service.batching import Priority
from encoder_service.checkpoints import load_encoder
from encoder_service.device import Patches, embed
from encoder_service.engine import EncoderEngine
from shared.cache import AsyncEmbeddingCache
from shared.config import CacheSettings, EncoderSettings, ImageSettings, ModelSettings
from shared.errors import BadImage, Busy, LookonceError, Unavailable
from shared.items import VisionItem
from shared.keys import alias_key, bytes_digest, image_digest
from shared.local_redis import LocalRedis
from shared.records import decode_record

LIMITS = ImageSettings()
NOWHERE = "unix:///nonexistent/socket"


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRedis]:
    server = LocalRedis(tmp_path_factory.mktemp("redis") / "r", 128)
    server.start()
    yield server
    server.stop()


Make = Callable[..., Any]


@pytest.fixture
async def make(checkpoint: Path, redis_server: LocalRedis) -> AsyncIterator[Make]:
    """Starts engines and ends them with the test; keyword arguments go to the encoder's settings."""
    ends: list[Callable[[], Any]] = []

    async def engine(*, url: str | None = None, lease: float = 30.0, name: str = "m", **encoder: Any) -> EncoderEngine:
        cache = AsyncEmbeddingCache(CacheSettings(timeout=1.0, lease=lease), url or redis_server.url)
        model = ModelSettings(name=name, checkpoint=checkpoint, encoder=EncoderSettings(threads=1, **encoder))
        made = EncoderEngine(model, LIMITS, cache)
        await made.start()
        ends.extend([cache.close, made.stop])
        return made

    yield engine
    for end in reversed(ends):
        await end()


def pixels(seed: int, width: int = 40, height: int = 30) -> np.ndarray:
    """A picture that no other test has seen: seeds are drawn from the clock once per session."""
    return np.random.default_rng([seed, SESSION]).integers(0, 256, (height, width, 3), dtype=np.uint8)


SESSION = time.time_ns()


def file(picture: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind)
    return buffer.getvalue()


async def embedding(engine: EncoderEngine, item: VisionItem) -> torch.Tensor:
    """Of an item, from its record or from the cache."""
    record = item.record
    if record is None:
        record = await engine._cache.fetch(item.key)
    assert record is not None
    _, values = decode_record(record, item.key)
    return values


def expected(checkpoint: Path, picture: np.ndarray) -> torch.Tensor:
    """The same picture without engine, queue or cache."""
    loaded = load_encoder(checkpoint, "float32")
    values, grid = loaded.preprocess.patches(torch.from_numpy(picture))
    return embed(loaded.tower, [Patches(values, grid)]).embeddings[0]


class HeldForwards:
    """Stops forwards before they begin until :meth:`release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.error = error

        def held(tower: Any, images: list[Patches]) -> Any:
            self.sizes.append(len(images))
            self.gate.wait(20)
            if self.error:
                raise self.error
            return embed(tower, images)

        monkeypatch.setattr(batcher, "embed", held)

    def release(self) -> None:
        self.gate.set()

    async def begun(self, count: int = 1) -> None:
        await until(lambda: len(self.sizes) >= count)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Polls; fails when it does not become true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this did not happen in time"
        await asyncio.sleep(0.003)


async def idle(engine: EncoderEngine) -> None:
    """Waits until nothing is in work; fails when something stays."""
    names = ("in_work", "waiting", "waiting_patches", "pixels_held")
    await until(lambda: not any(engine.stats()[name] for name in names))


# One picture, one forward


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
    items = await asyncio.gather(*(engine.encode(file(picture, kind)) for kind in ("PNG", "BMP", "PPM")))
    assert len({item.key for item in items}) == 1
    assert engine.stats()["forwards"] == 1


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
    loaded = load_encoder(checkpoint, "float32")
    for n, item in zip(order, items, strict=True):
        values, grid = loaded.preprocess.patches(torch.from_numpy(pictures[n]))
        assert item.grid == grid
        assert torch.equal(await embedding(engine, item), embed(loaded.tower, [Patches(values, grid)]).embeddings[0])
    stats = engine.stats()
    assert stats["images"] == len(set(order.tolist()))
    assert stats["forwards"] < stats["images"]
    await idle(engine)


# When the cache does not help


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


# Failures


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
    monkeypatch.setattr(batcher, "embed", poisoned)
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
    monkeypatch.setattr(batcher, "embed", embed)
    forwards.release()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, LookonceError) for result in results) == 1
    assert sum(isinstance(result, VisionItem) for result in results) == 5
    assert engine.stats()["forwards"] == 1
    await idle(engine)


async def test_one_image_that_fails_does_not_take_its_batch_along(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make(batch_wait_ms=300.0)
    pictures = [pixels(30 + n, 16 + 16 * n, 16) for n in range(3)]
    bad = engine._running.loaded.preprocess.rule.grid(32, 16)

    def failing(tower: Any, images: list[Patches]) -> Any:
        if any(image.grid == bad for image in images):
            raise RuntimeError("this grid does not work")
        return embed(tower, images)

    monkeypatch.setattr(batcher, "embed", failing)
    results = await asyncio.gather(*(engine.encode(file(p)) for p in pictures), return_exceptions=True)
    assert [isinstance(result, VisionItem) for result in results] == [True, False, True]


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


# Callers that leave


async def test_an_image_that_nobody_waits_for_is_dropped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make(max_batch_patches=1)
    forwards = HeldForwards(monkeypatch)
    running = asyncio.create_task(engine.encode(file(pixels(60))))
    await forwards.begun()
    left = [asyncio.create_task(engine.encode(file(pixels(61)))) for _ in range(2)]
    stayed = asyncio.create_task(engine.encode(file(pixels(62))))
    shared = [asyncio.create_task(engine.encode(file(pixels(63)))) for _ in range(2)]
    await until(lambda: engine.stats()["waiting"] >= 3)
    for task in (*left, shared[0]):
        task.cancel()
    await asyncio.gather(*left, shared[0], return_exceptions=True)
    forwards.release()
    await asyncio.gather(running, stayed, shared[1])
    assert engine.stats()["images"] == 3
    assert engine.stats()["cancelled"] == 1
    await idle(engine)
    assert not (await engine.encode(file(pixels(61)))).cached


async def test_callers_that_leave_at_random_moments_leave_nothing_behind(make: Make) -> None:
    """C16, A4: places, pixels and leases return to where they began."""
    engine = await make(max_queue=1000)
    chance = np.random.default_rng(5)

    async def leave_early(n: int) -> None:
        task = asyncio.create_task(engine.encode(file(pixels(1000 + n % 80))))
        await asyncio.sleep(float(chance.random()) * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(leave_early(n) for n in range(300)))
    await idle(engine)
    items = await asyncio.wait_for(asyncio.gather(*(engine.encode(file(pixels(1000 + n))) for n in range(20))), 30)
    assert len({item.key for item in items}) == 20
    await idle(engine)


async def test_an_interactive_caller_hurries_a_batch_image(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make(max_batch_patches=1)
    forwards = HeldForwards(monkeypatch)
    first = asyncio.create_task(engine.encode(file(pixels(70))))
    await forwards.begun()
    jobs = [asyncio.create_task(engine.encode(file(pixels(71 + n)), priority=Priority.BATCH)) for n in range(8)]
    await until(lambda: engine.stats()["waiting"] >= 8)
    user = asyncio.create_task(engine.encode(file(pixels(78))))  # the last of the batch
    await asyncio.sleep(0.1)
    done: list[str] = []
    for name, task in [("user", user), *((f"job{n}", job) for n, job in enumerate(jobs))]:
        task.add_done_callback(lambda _, name=name: done.append(name))
    forwards.release()
    await asyncio.gather(first, user, *jobs)
    assert done.index("user") <= 2
    assert engine.stats()["images"] == 9


# Health and the rest


async def test_health_compares_bits(make: Make) -> None:
    engine = await make()
    await engine.check_health()
    tower = engine._running.loaded.tower
    with torch.no_grad():
        tower.project_down.weight[0, 0] += 1e-3
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
    engine = EncoderEngine(ModelSettings(name="m", checkpoint=checkpoint), LIMITS, cache, progress=said.append)
    await engine.start()
    assert "blocks.0.attention.qkv.weight" in engine.parameter_names()
    assert not any("text" in name or "lm_head" in name for name in engine.parameter_names())
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
