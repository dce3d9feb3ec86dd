"""The way of a batch from the host into the static buffers and back. Several slots let copies overlap with a replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encoder_service.replay.buffers import Inputs, StaticBuffers
from encoder_service.towers.base import Budget, Tower


class Slot:
    """On CPU: the static buffers themselves or, when several batches are under way, a staging area of its own.

    Args:
        static: what programs read and write.
        staging: where batches are put together.
    """

    def __init__(self, static: StaticBuffers, staging: StaticBuffers) -> None:
        self._static = static
        self._staging = staging

    def host(self, budget: Budget) -> Inputs:
        """Where to put a batch together."""
        return self._staging.inputs(budget)

    def send(self, budget: Budget) -> None:
        """Called by the host thread when the batch is complete; must not touch the static buffers."""

    def fill(self, budget: Budget) -> None:
        """Called by the device thread before the program runs: the batch into the static buffers."""
        if self._staging is not self._static:
            self._static.inputs(budget).copy_from(self._staging.inputs(budget))

    def fetch(self, tokens: int) -> torch.Tensor:
        """Called by the device thread after the program: its first rows ``[tokens, width]``, in memory of their own."""
        return self._static.outputs[:tokens].clone()


class CudaSlot(Slot):
    """On CUDA: pinned host memory and a staging area on the device, filled on a side stream during other replays.

    Args:
        static: what programs read and write.
        tower, budgets, device: for buffers of the slot's own.
        stream: side stream for copies to the device.
    """

    def __init__(
        self,
        static: StaticBuffers,
        tower: Tower,
        budgets: Sequence[Budget],
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(static, StaticBuffers(tower, budgets, torch.device("cpu"), pinned=True))
        self._arriving = StaticBuffers(tower, budgets, device)
        self._device = device
        self._stream = stream
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)  # the buffers' first contents are there before another stream writes

    def send(self, budget: Budget) -> None:
        """Starts the copy to the device; a slot is used again only after its replay, so nothing reads these arrays."""
        with torch.cuda.stream(self._stream):
            self._arriving.inputs(budget).copy_from(self._staging.inputs(budget), non_blocking=True)
            self._arrived.record(self._stream)

    def fill(self, budget: Budget) -> None:
        """Device to device, in the order of the replays."""
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
        self._static.inputs(budget).copy_from(self._arriving.inputs(budget), non_blocking=True)

    def fetch(self, tokens: int) -> torch.Tensor:
        """Waits for the replay and the copy into pinned memory."""
        rows = self._staging.outputs[:tokens]
        rows.copy_(self._static.outputs[:tokens], non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return rows.clone()


def make_slots(count: int, static: StaticBuffers, tower: Tower, budgets: Sequence[Budget]) -> list[Slot]:
    """Slots for ``count`` batches under way at once."""
    device = static.outputs.device
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return [CudaSlot(static, tower, budgets, device, stream) for _ in range(count)]
    if count == 1:
        return [Slot(static, static)]
    return [Slot(static, StaticBuffers(tower, budgets, device)) for _ in range(count)]
