"""When a line of a batch may begin: a few at a time, fewer while people wait, tenants in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from shared.config import BatchSettings


class Turns:
    """Turns of all batches together.

    Tenants that wait get them in rotation, however many batches each has; one tenant's lines in the order of asking.

    Args:
        settings: how many.
        interactive: number of interactive requests in work now.
    """

    def __init__(self, settings: BatchSettings, interactive: Callable[[], int]) -> None:
        self._settings = settings
        self._interactive = interactive
        self._taken = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, tenant: str) -> None:
        """Waits for a turn; :meth:`give` ends it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(future)
        self._hand_out()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give()
            raise

    def give(self) -> None:
        """Gives a turn back. As long as anybody waits somebody works, so limits that rose are seen here at last."""
        self._taken -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        limit = self._settings.concurrency_beside_others if self._interactive() else self._settings.concurrency
        while self._waiting and self._taken < limit:
            tenant, queue = self._waiting.popitem(last=False)
            future = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            if not future.done():  # a waiter that left
                future.set_result(None)
                self._taken += 1
