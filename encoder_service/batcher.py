"""From single images to forwards: an event loop's view of the waiting room and the device thread."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import torch

from encoder_service.batching import Priority, Waiting, WaitingRoom
from encoder_service.device import DeviceThread, Embedded, Patches
from encoder_service.replay import Replay
from encoder_service.stats import EncoderStats
from shared.errors import LookonceError, Unavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Embedding:
    """One image's result.

    Attributes:
        values: ``[tokens, width]`` on the host.
        queue_seconds, encode_seconds: waiting, and in the forward that it shared.
    """

    values: torch.Tensor
    queue_seconds: float
    encode_seconds: float


@dataclass
class Entry:
    """What the waiting room keeps for an image.

    Attributes:
        patches: the image.
        done: its result.
        arrived: when it came, by ``time.perf_counter``.
    """

    patches: Patches
    done: asyncio.Future[Embedding]
    arrived: float


class Batcher:
    """Packs submitted images into batches and runs them one after another.

    While the device is at work, the next batch is put together on a host thread if the replay's depth allows it and
    enough images wait to fill it: a smaller batch may still get company meanwhile.

    Args:
        model: its name, for metrics.
        replay: what to run.
        device: the thread to run it in.
        host: the thread to put batches together in.
        room: order and size of batches.
        wait: seconds that an image waits for company when the device is free.
        stats: counters to write.
    """

    def __init__(
        self,
        model: str,
        replay: Replay,
        device: DeviceThread,
        host: DeviceThread,
        room: WaitingRoom[Entry],
        wait: float,
        stats: EncoderStats,
    ) -> None:
        self._model = model
        self._replay = replay
        self._device = device
        self._host = host
        self._room = room
        self._wait = wait
        self._stats = stats
        self._wake = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        self._loop_task = asyncio.create_task(self._run())

    async def submit(self, key: str, patches: Patches, priority: Priority) -> Embedding:
        """Waits for the embedding of one image; a caller that leaves takes a waiting image with it.

        Raises:
            LookonceError: the forward failed.
        """
        entry = Entry(patches, asyncio.get_running_loop().create_future(), time.perf_counter())
        self._room.add(key, patches.grid.patches, priority, entry)
        self._wake.set()
        try:
            return await entry.done
        except asyncio.CancelledError:
            self._stats.cancelled += 1
            self._room.discard(key)
            raise

    def check(self) -> None:
        """Makes sure that the loop runs.

        Raises:
            LookonceError: it has ended by a fault; the log has it.
        """
        if self._loop_task.done():
            raise LookonceError("the encoder's batching loop has ended")

    async def stop(self) -> None:
        """Ends the loop; images that still wait fail with :class:`Unavailable`."""
        tasks = [self._loop_task, *self._under_way]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while batch := self._room.take():
            for waiting in batch:
                _fail(waiting.payload, Unavailable("the encoder is stopping; try again"))

    async def _run(self) -> None:
        while True:
            while not self._may_take():
                self._wake.clear()
                await self._wake.wait()
            if not self._under_way:
                await self._gather_company()
            if batch := self._room.take():
                task = asyncio.create_task(self._forward(batch))
                self._under_way.add(task)
                task.add_done_callback(self._landed)

    def _may_take(self) -> bool:
        ahead = self._room.full_batch and len(self._under_way) < self._replay.depth
        return len(self._room) > 0 and (ahead or not self._under_way)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the batching loop ends by a fault", exc_info=error)
            self._loop_task.cancel()

    async def _gather_company(self) -> None:
        """Waits while the oldest image has time left and the batch is not full."""
        while not self._room.full_batch and len(self._room):
            left = self._wait - (time.perf_counter() - min(one.arrived for one in self._room.payloads()))
            if left <= 0:
                return
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), left)
            except TimeoutError:
                return

    async def _forward(self, batch: list[Waiting[Entry]]) -> None:
        entries = [waiting.payload for waiting in batch]
        begin = time.perf_counter()
        try:
            (result,) = await asyncio.gather(self._run_batch(entries), return_exceptions=True)
        except asyncio.CancelledError:
            for entry in entries:
                _fail(entry, Unavailable("the encoder is stopping; try again"))
            raise
        if isinstance(result, BaseException):
            await self._after_failure(batch, result)
            return
        self._count(batch, result)
        for entry, values in zip(entries, result.embeddings, strict=True):
            waited = begin - entry.arrived
            self._stats.count_wait(self._model, waited)
            if not entry.done.done():
                entry.done.set_result(Embedding(values, waited, result.seconds))

    async def _run_batch(self, entries: list[Entry]) -> Embedded:
        images = [entry.patches for entry in entries]
        if self._replay.depth == 1:  # nothing could overlap
            return await self._device.run(lambda: self._replay.embed(images))
        staged = await self._host.run(lambda: self._replay.stage(images))
        return await self._device.run(lambda: self._replay.launch(staged))

    def _count(self, batch: list[Waiting[Entry]], result: Embedded) -> None:
        patches = sum(waiting.patches for waiting in batch)
        self._room.note_speed(patches, result.seconds)
        self._stats.count_forward(self._model, result, patches, self._room.fill(patches))
        self._stats.show_costs(self._model, self._replay.costs, self._replay.fitting(patches, len(batch)))

    async def _after_failure(self, batch: list[Waiting[Entry]], error: BaseException) -> None:
        """One image's failure is not its neighbours': a failed batch is run again one by one."""
        if len(batch) > 1:
            logger.warning("a forward over %d images failed, running them one by one: %s", len(batch), error)
            for waiting in batch:
                if not waiting.payload.done.done():
                    await self._forward([waiting])
            return
        self._stats.failures += 1
        logger.error("the forward of one image failed: %s", error)
        _fail(batch[0].payload, LookonceError("the encoder failed on this image; its log has the details"))


def _fail(entry: Entry, error: LookonceError) -> None:
    if not entry.done.done():
        entry.done.set_exception(error)
