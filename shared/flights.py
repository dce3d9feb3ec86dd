"""Single flight: callers that want the same thing share one run of the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shared.errors import LookonceError, Unavailable

Result = TypeVar("Result")


class FollowedFailure(LookonceError):
    """The run that this caller joined has failed; the failure is not remembered, so the caller may start its own.

    Args:
        error: what the run raised.
    """

    def __init__(self, error: LookonceError) -> None:
        super().__init__(error.message)
        #: the first cause, however many runs it came through
        self.error: LookonceError = error.error if isinstance(error, FollowedFailure) else error


@dataclass
class _Flight(Generic[Result]):
    task: asyncio.Task[Result]
    waiters: int = 0


class SingleFlight(Generic[Result]):
    """Runs by key. A run goes on while anybody waits for it; the last to leave cancels it."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[Result]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: str) -> bool:
        """Whether a run for this key is going on; :meth:`run` would join it."""
        return key in self._flights

    async def run(self, key: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Joins the run for ``key``, or starts ``work()`` as that run.

        Raises:
            FollowedFailure: a run that was joined, not started, has failed.
            Unavailable: the run was cancelled from outside, because the service stops.
        """
        flight = self._flights.get(key)
        led = flight is None
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except LookonceError as error:
            if led:
                raise
            raise FollowedFailure(error) from error
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if flight.task.cancelled() and me is not None and not me.cancelling():
                raise Unavailable("the service is stopping; try again") from None
            raise
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                self._forget(key, flight.task)  # first: nobody may join a flight that is about to end
                flight.task.cancel()

    async def cancel_all(self) -> None:
        """Cancels every run and waits until they have ended."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: str, task: asyncio.Task[Result]) -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # seen, even when every caller has left

    def _forget(self, key: str, task: asyncio.Task[Result]) -> None:
        if (flight := self._flights.get(key)) is not None and flight.task is task:
            del self._flights[key]
