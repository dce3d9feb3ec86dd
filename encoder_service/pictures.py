"""Decoded pictures: read on host threads, their memory counted."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from encoder_service.device import Patches
from encoder_service.preprocess.base import Preprocess
from shared import images
from shared.config import ImageSettings
from shared.errors import Unavailable
from shared.keys import image_digest

Result = TypeVar("Result")
Waiting: TypeAlias = Callable[[], AbstractContextManager[None]]


class PixelGate:
    """Bounds the sum of pixels that are decoded at one time, first come, first served.

    Args:
        most: pixels; a picture above it comes through alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        #: pixels held now
        self.held = 0

    async def acquire(self, pixels: int, waiting: Waiting = nullcontext) -> int:
        """Waits for room, within ``waiting``; returns what to give to :meth:`release`."""
        share = min(pixels, self._most)
        ticket = asyncio.get_running_loop().create_future()
        self._queue.append((share, ticket))
        self._admit()
        try:
            if not ticket.done():
                with waiting():
                    await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self.release(share)  # admitted in the same moment
            else:
                self._queue = deque(entry for entry in self._queue if entry[1] is not ticket)
                self._admit()
            raise
        return share

    def release(self, share: int) -> None:
        """Gives room back."""
        self.held -= share
        self._admit()

    def _admit(self) -> None:
        while self._queue and (not self.held or self.held + self._queue[0][0] <= self._most):
            share, ticket = self._queue.popleft()
            if not ticket.done():
                self.held += share
                ticket.set_result(None)


class PictureReader:
    """Decodes and preprocesses on host threads.

    Args:
        limits: checked before memory is spent.
        preprocess: of the tower.
        dtype: of the tower.
        pool: host threads.
    """

    def __init__(self, limits: ImageSettings, preprocess: Preprocess, dtype: torch.dtype, pool: Executor) -> None:
        self._limits = limits
        self._preprocess = preprocess
        self._dtype = dtype
        self._pool = pool
        self.gate = PixelGate(limits.max_request_pixels)

    async def read(
        self, data: bytes, salt: str | None, timings: dict[str, float], waiting: Waiting = nullcontext
    ) -> Picture:
        """Decodes a file and hashes its pixels; waits for room within ``waiting``.

        Raises:
            BadImage, ImageTooLarge: the file cannot be used.
        """
        header = await self.in_pool(lambda: images.probe(data, self._limits))
        picture = Picture(self, await self.gate.acquire(header.width * header.height, waiting))
        try:
            picture.pixels, picture.digest = await self.in_pool(lambda: self._decode(data, salt, timings))
        except BaseException:
            picture.drop()
            raise
        return picture

    async def cut(self, picture: Picture, timings: dict[str, float]) -> Patches:
        """Pixels to patches in the tower's dtype."""
        pixels = picture.pixels
        assert pixels is not None, "a dropped picture is read again first"

        def work() -> Patches:
            begin = time.perf_counter()
            values, grid = self._preprocess.patches(torch.from_numpy(pixels))
            timings["preprocess"] = time.perf_counter() - begin
            return Patches(values.to(self._dtype), grid)

        return await self.in_pool(work)

    async def in_pool(self, work: Callable[[], Result]) -> Result:
        """Runs ``work`` on a host thread.

        Raises:
            Unavailable: the pool has been shut down.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError as error:
            raise Unavailable("the encoder is stopping; try again") from error
        return await running

    def _decode(self, data: bytes, salt: str | None, timings: dict[str, float]) -> tuple[np.ndarray, str]:
        begin = time.perf_counter()
        pixels = images.decode(data, self._limits)
        decoded = time.perf_counter()
        digest = image_digest(pixels, salt)
        timings["decode"], timings["hash"] = decoded - begin, time.perf_counter() - decoded
        return pixels, digest


class Picture:
    """A decoded picture that counts against the gate until it is dropped.

    Attributes:
        pixels: uint8 ``[height, width, 3]``, None once dropped.
        digest: of the pixels and the salt.
    """

    def __init__(self, reader: PictureReader, share: int) -> None:
        self._reader = reader
        self._share: int | None = share
        self.pixels: np.ndarray | None = None
        self.digest = ""

    def drop(self) -> None:
        """Lets go of the pixels; the second time does nothing."""
        self.pixels = None
        if self._share is not None:
            share, self._share = self._share, None
            self._reader.gate.release(share)
