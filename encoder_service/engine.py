"""The encoder engine: from the bytes of an image file to an embedding record in the cache. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from encoder_service.batcher import Batcher, Entry
from encoder_service.batching import Priority, WaitingRoom
from encoder_service.checkpoints import LoadedEncoder, load_encoder
from encoder_service.device import DeviceThread, use_torch_threads
from encoder_service.health import HealthProbe
from encoder_service.pictures import PictureReader
from encoder_service.pipeline import Pipeline
from encoder_service.replay import Capture, Replay, make_replay, usual_grids, warm_up
from encoder_service.stats import EncoderStats
from encoder_service.store import Store
from encoder_service.towers.packed import pack_weights
from encoder_service.utilisation import Work, measure_work
from shared.cache import AsyncEmbeddingCache
from shared.config import ImageSettings, ModelSettings
from shared.errors import Unavailable
from shared.items import VisionItem
from shared.keys import Namespace
from shared.record_values import Encoding
from shared.sizing import Grid

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Running:
    """What exists between start and stop."""

    loaded: LoadedEncoder
    pipeline: Pipeline
    health: HealthProbe
    work: Work


class EncoderEngine:
    """One tower, its host threads and its device thread.

    Args:
        model: name, checkpoint and encoder settings.
        images: limits on images.
        cache: where embeddings are kept; the caller closes it.
        progress: told in words what the start is doing; the log is told in any case.
    """

    def __init__(
        self,
        model: ModelSettings,
        images: ImageSettings,
        cache: AsyncEmbeddingCache,
        *,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        settings = model.encoder
        self._model = model
        self._images = images
        self._cache = cache
        self._progress = progress
        self._stats = EncoderStats()
        self._room: WaitingRoom[Entry] = WaitingRoom(settings.max_queue, settings.max_batch_patches)
        self._device = DeviceThread(settings.threads)
        self._staging = DeviceThread(1)
        self._pool = ThreadPoolExecutor(
            settings.preprocess_threads, thread_name_prefix="host", initializer=use_torch_threads, initargs=(1,)
        )
        self._running: _Running | None = None

    async def start(self) -> None:
        """Loads the tower, warms it up and remembers what health looks like.

        Raises:
            CheckpointError: the checkpoint cannot be used.
            LookonceError: the tower gives values that are not finite.
        """
        settings, begin = self._model.encoder, time.perf_counter()
        self._say(f"Loading the tower of {self._model.name} in {settings.dtype} from {self._model.checkpoint}")
        loaded = await self._device.run(
            lambda: load_encoder(
                self._model.checkpoint, settings.dtype, settings.device, settings.quantization, settings.output
            )
        )
        weights = sum(tensor.nbytes for tensor in loaded.tower.state_dict().values())
        tensors = sum(len(names) for names in loaded.read.values())
        self._say(f"Read {tensors} tensors, {weights / 1e6:.1f} MB, in {time.perf_counter() - begin:.2f} s")
        if settings.replay.backend == "eager":  # torch.compile lays out weights by itself
            await self._device.run(lambda: pack_weights(loaded.tower))
        replay = await self._device.run(lambda: make_replay(loaded, settings))
        await self._warm_up(replay, usual_grids(loaded.preprocess.rule))
        health = HealthProbe(loaded, replay, self._device)
        await health.remember()
        work = await self._device.run(lambda: measure_work(loaded.tower, health.picture))
        self._stats.show_work(self._model.name, work)
        dtype = next(loaded.tower.parameters()).dtype
        pipeline = Pipeline(
            Namespace(self._model.name, loaded.fingerprints.tower, loaded.fingerprints.preprocess),
            PictureReader(self._images, loaded.preprocess, dtype, self._pool),
            Batcher(
                self._model.name,
                replay,
                self._device,
                self._staging,
                self._room,
                settings.batch_wait_ms / 1000,
                self._stats,
            ),
            self._room,
            Store(
                self._cache,
                loaded.tower.merge,
                pooled=loaded.tower.pooled,
                encoding=Encoding[settings.records.upper()],
            ),
            self._stats,
        )
        self._running = _Running(loaded, pipeline, health, work)
        self._say(
            f"The tower of {self._model.name} is ready on {settings.device} ({time.perf_counter() - begin:.2f} s)"
        )

    async def _warm_up(self, replay: Replay, grids: Sequence[Grid]) -> None:
        """All budgets; requests are packed for them from then on."""
        if not replay.budgets:
            return
        loop, total = asyncio.get_running_loop(), len(replay.budgets)
        sizes = ", ".join(str(budget.patches) for budget in replay.budgets)
        self._say(f"Warming up {total} budgets ({replay.backend.name}): {sizes} patches")

        def done(capture: Capture) -> None:
            self._stats.count_warmup(self._model.name, capture)
            self._stats.show_costs(self._model.name, replay.costs, capture.budget)
            loop.call_soon_threadsafe(self._say, f"Budget of {capture}")

        captures = await self._device.run(lambda: warm_up(replay, grids, done))
        seconds, grown = sum(c.seconds for c in captures), sum(c.bytes for c in captures)
        self._say(f"{total} budgets are ready after {seconds:.1f} s of preparation, {grown / 1e6:+.1f} MB")
        self._room.use_sizes(replay.budgets, replay.costs.price)

    async def stop(self) -> None:
        """Ends all work; callers that still wait get :class:`Unavailable`. The second time does nothing."""
        running, self._running = self._running, None
        if running is not None:
            await running.pipeline.stop()
        self._device.stop()
        self._staging.stop()
        self._pool.shutdown(wait=False)

    async def encode(
        self,
        data: bytes,
        *,
        salt: str | None = None,
        inline: bool = False,
        again: bool = False,
        priority: Priority = Priority.INTERACTIVE,
        request: str | None = None,
    ) -> VisionItem:
        """Finds or makes the embedding of an image file.

        Args:
            data: the encoded file.
            salt: of the tenant; embeddings are never shared across salts.
            inline: put the record into the item even when the cache holds it.
            again: encode whatever the cache and other encoders' leases say: the process that held the lease died.
            priority: who waits for it.
            request: of this name wants it among other images: what arrives together is looked up and claimed together.

        Raises:
            BadImage, ImageTooLarge: the file cannot be used.
            Busy: too many images in work.
            Unavailable: the engine does not run.
            LookonceError: the forward failed or gave values that are not finite; nothing was stored.
        """
        pipeline = self._require().pipeline
        self._stats.requests += 1
        outcome = await pipeline.run(data, salt, priority, fresh=again, request=request)
        record = outcome.record
        if inline and record is None:
            record = await pipeline.store.fetch(outcome.item.key)
            if record is None:  # described, but not delivered: the cache is slow, full or lying
                outcome = await pipeline.run(data, salt, priority, fresh=True)
                record = outcome.record
        return dataclasses.replace(outcome.item, record=record if inline or not outcome.stored else None)

    def identity(self) -> Namespace:
        """Namespace of this model's cache keys."""
        return self._require().pipeline.namespace

    async def check_health(self) -> None:
        """Encodes a small picture and compares its bits with those at start.

        Raises:
            LookonceError: other bits, a device that hangs, or an engine that does not run.
        """
        running = self._require()
        running.pipeline.batcher.check()
        await running.health.check()

    def stats(self) -> dict[str, float]:
        """Plain counters, what is in work now, and the share of a plain matrix product's rate that forwards reach."""
        stats, running = self._stats, self._running
        mean = stats.patches / stats.images if stats.images else 0.0  # of an image whose own number nobody knows here
        return dataclasses.asdict(stats) | {
            "in_work": self._room.places_taken,
            "waiting": len(self._room),
            "waiting_patches": self._room.patches,
            "patches_in_work": self._room.patches + mean * (self._room.places_taken - len(self._room)),
            "pixels_held": running.pipeline.reader.gate.held if running else 0,
            "gemm_share": running.work.share(stats.patches + stats.padding_patches, stats.encode_seconds)
            if running
            else 0,
        }

    def parameter_names(self) -> list[str]:
        """Names, in the checkpoint, of all tensors that this engine holds."""
        return [name for names in self._require().loaded.read.values() for name in names]

    def _require(self) -> _Running:
        if self._running is None:
            raise Unavailable("the encoder is not running; try again")
        return self._running

    def _say(self, text: str) -> None:
        logger.info(text)
        if self._progress is not None:
            self._progress(text)
