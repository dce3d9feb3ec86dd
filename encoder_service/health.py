"""Health: a small built-in picture must keep giving the bits that it gave at start."""

from __future__ import annotations

import torch
from blake3 import blake3

from encoder_service.checkpoints import LoadedEncoder
from encoder_service.device import DeviceThread, Patches
from encoder_service.replay import Replay
from shared.errors import LookonceError, Unavailable

#: pixels; small enough for a check every few seconds
SIDE = 48
#: seconds; a forward that takes longer counts as a device that hangs
STUCK = 300.0


class HealthProbe:
    """Encodes the built-in picture in the device thread and compares.

    Args:
        loaded: tower and preprocessing.
        replay: the way in which the tower is run.
        device: the thread of the tower.

    Attributes:
        picture: the built-in one, cut into patches.
    """

    def __init__(self, loaded: LoadedEncoder, replay: Replay, device: DeviceThread) -> None:
        self._replay = replay
        self._device = device
        values, grid = loaded.preprocess.patches(built_in_picture())
        self.picture = Patches(values.to(next(loaded.tower.parameters()).dtype), grid)
        self._expected: str | None = None

    async def remember(self) -> None:
        """The first encoding, which also warms the tower up.

        Raises:
            LookonceError: it is not finite.
        """
        self._expected = await self._device.run(self._digest)

    async def check(self) -> None:
        """Encodes again, unless the device is at work, which shows as much.

        Raises:
            LookonceError: other bits than at start.
            Unavailable: the forward in hand takes longer than :data:`STUCK`.
        """
        if busy := self._device.busy_seconds:
            if busy > STUCK:
                raise Unavailable(f"a forward has been running for {busy:.0f} s; the device seems to hang")
            return
        if await self._device.run(self._digest) != self._expected:
            raise LookonceError("the encoder gives other bits for its built-in picture than at start")

    def _digest(self) -> str:
        path = self._replay.fitting(self.picture.grid.patches, 1)  # one path for ever, whatever the costs say
        (values,) = self._replay.embed([self.picture], path=path).embeddings
        if not torch.isfinite(values).all():
            raise LookonceError("the encoder gives values that are not finite for its built-in picture")
        return blake3(values.contiguous().view(torch.uint8).numpy().data).hexdigest()


def built_in_picture() -> torch.Tensor:
    """Gradients and an edge: uint8 ``[SIDE, SIDE, 3]``."""
    ramp = torch.arange(SIDE) * 255 // (SIDE - 1)
    red, green = ramp.expand(SIDE, SIDE), ramp[:, None].expand(SIDE, SIDE)
    blue = torch.where(red > green, 255, 0)
    return torch.stack([red, green, blue], dim=-1).to(torch.uint8)
