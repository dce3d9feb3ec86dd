"""Calls that begin in one turn of the event loop become one: the images of a request share their round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class Together(Generic[Argument, Result]):
    """Carries calls of one kind. A caller that leaves leaves the others their call; the last one ends it.

    Args:
        carry: makes a call for many arguments; its results are in their order.
    """

    def __init__(self, carry: Callable[[Sequence[Argument]], Coroutine[Any, Any, Sequence[Result]]]) -> None:
        self._carry = carry
        self._waiting: list[tuple[Argument, asyncio.Future[Result]]] = []
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, argument: Argument) -> Result:
        """The result for one argument."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((argument, result))
        if len(self._waiting) == 1:
            loop.call_soon(self._start)
        return await result

    def _start(self) -> None:
        calls = [call for call in self._waiting if not call[1].done()]
        self._waiting = []
        if not calls:
            return
        task = asyncio.get_running_loop().create_task(self._run(calls))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

        def left(_: asyncio.Future[Result]) -> None:
            if all(result.cancelled() for _, result in calls):
                task.cancel()

        for _, result in calls:
            result.add_done_callback(left)

    async def _run(self, calls: Sequence[tuple[Argument, asyncio.Future[Result]]]) -> None:
        try:
            found = await self._carry([argument for argument, _ in calls])
        except asyncio.CancelledError:
            for _, result in calls:
                result.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - it goes to those who await
            for _, result in calls:
                if not result.done():
                    result.set_exception(error)
            return
        for (_, result), value in zip(calls, found, strict=True):
            if not result.done():
                result.set_result(value)
