"""The device side: one thread that runs the tower on packed batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

from encoder_service.towers.base import Budget, GridError, Tower
from shared.errors import LookonceError
from shared.sizing import Grid

#: Below a few rows per thread, CPU matrix kernels switch to another order of summation, and the bits of an image would
#: depend on its company. Seen with MKL: from 12 tokens on 2 threads, and 4 on one, every row has the same bits in any
#: batch. Smaller batches are padded to this many tokens per thread.
MIN_TOKENS_PER_THREAD = 8

Result = TypeVar("Result")


class Patches(NamedTuple):
    """A preprocessed image.

    Attributes:
        values: ``[grid.patches, patch_dim]`` in the tower's dtype, on the host.
        grid: its patch grid.
    """

    values: torch.Tensor
    grid: Grid


class Embedded(NamedTuple):
    """What one forward gave.

    Attributes:
        embeddings: one per image, ``[tokens, width]`` in the tower's dtype, on the host.
        padding: patches of padding that went through the tower.
        seconds: of plan, transfer and forward.
        budget: the fixed size that was replayed; None for a forward of the batch's own size.
        host: seconds of them in which the host planned and packed.
    """

    embeddings: list[torch.Tensor]
    padding: int
    seconds: float
    budget: Budget | None = None
    host: float = 0.0


def smallest_batch(tower: Tower) -> int:
    """Patches that a forward has at least, padding included; see :data:`MIN_TOKENS_PER_THREAD`."""
    on_cpu = next(tower.parameters()).device.type == "cpu"
    return MIN_TOKENS_PER_THREAD * torch.get_num_threads() * tower.merge**2 if on_cpu else 0


def pack(images: Sequence[Patches], out: torch.Tensor) -> int:
    """Copies images one after another into the front of ``out``, ``[patches, patch_dim]``; returns the rows written.

    Raises:
        GridError: an image whose values are not those of its grid.
    """
    row = 0
    for values, grid in images:
        if values.shape != (grid.patches, out.shape[1]):
            raise GridError(
                f"values of shape {list(values.shape)} are not {grid.patches} patches of {out.shape[1]} values"
            )
        out[row : row + grid.patches].copy_(values)
        row += grid.patches
    return row


def embed(tower: Tower, images: Sequence[Patches]) -> Embedded:
    """Runs the tower once over all images, at the batch's own size.

    On CPU an image's bits do not depend on the others.

    Raises:
        GridError: a grid that the tower cannot take.
        LookonceError: a tower that gives something else than ``[tokens, width]``, or ``[images, width]`` when it pools.
    """
    begin = time.perf_counter()
    parameter = next(tower.parameters())
    used = sum(image.grid.patches for image in images)
    budget = Budget(max(used, smallest_batch(tower)), len(images))
    plan = tower.plan([image.grid for image in images], budget)
    packed = torch.empty(budget.patches, tower.patch_dim, dtype=parameter.dtype)
    packed[pack(images, packed) :] = 0
    packing = time.perf_counter() - begin
    with torch.inference_mode():
        out = tower(packed.to(parameter.device), plan.to(parameter.device)).cpu()
    expected = (tower.rows(budget), tower.width)
    if out.shape != expected:
        raise LookonceError(
            f"{type(tower).__name__} gave values of shape {list(out.shape)} for {budget.patches} patches; "
            f"wanted {list(expected)}: one row a {'picture' if tower.pooled else 'token'}"
        )
    rows = list(torch.split(out[: sum(plan.tokens)], plan.tokens))
    return Embedded(rows, budget.patches - used, time.perf_counter() - begin, host=packing)


class DeviceThread:
    """The one thread that touches the device.

    Args:
        threads: torch threads of a forward; 0 leaves torch's default.
    """

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="device", initializer=use_torch_threads, initargs=(threads,)
        )
        self._busy_since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """How long the work in hand has been going on; 0 when there is none."""
        return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    async def run(self, work: Callable[[], Result]) -> Result:
        """Runs ``work`` in the thread; a caller that leaves does not stop it."""

        def timed() -> Result:
            self._busy_since = time.monotonic()
            try:
                return work()
            finally:
                self._busy_since = None

        return await asyncio.get_running_loop().run_in_executor(self._executor, timed)

    def stop(self) -> None:
        """Lets the work in hand end and drops the rest."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def use_torch_threads(threads: int) -> None:
    """Sets how many threads torch uses for work that the calling thread starts; 0 changes nothing."""
    torch.get_num_threads()  # the first call in a thread takes over the process's number: before ours, not after it
    if threads:
        torch.set_num_threads(threads)
