"""The images of one request go on together once they are read, so that the cache is asked about all of them at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: seconds that an image waits for the others of its request, at most
COMPANY_SECONDS = 0.02


class Company:
    """Who is being read, by request.

    Waiting costs next to nothing: what an image wants next, cutting it into patches, is done by the same host threads
    in the order of asking, and so after the others were read.
    """

    def __init__(self) -> None:
        self._reading: Counter[str] = Counter()
        self._waiting: dict[str, asyncio.Event] = {}

    @contextmanager
    def reading(self, request: str) -> Iterator[None]:
        """While an image is read."""
        self._reading[request] += 1
        try:
            yield
        finally:
            self._less(request)

    @contextmanager
    def held_up(self, request: str) -> Iterator[None]:
        """While an image that is read waits for something that others may hold: nobody waits for it meanwhile."""
        self._less(request)
        try:
            yield
        finally:
            self._reading[request] += 1

    async def gather(self, request: str) -> None:
        """Waits until no image of the request is being read, or for :data:`COMPANY_SECONDS`."""
        if request not in self._reading:
            return
        everybody = self._waiting.setdefault(request, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(COMPANY_SECONDS):
                await everybody.wait()

    def _less(self, request: str) -> None:
        self._reading[request] -= 1
        if not self._reading[request]:
            del self._reading[request]
            if (everybody := self._waiting.pop(request, None)) is not None:
                everybody.set()
