"""When a row is tried again, when it is given up, and when the whole job stops."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.errors import Busy, DeadlineExceeded, LookonceError, RequestError, StorageError, Unavailable

Result = TypeVar("Result")

#: tries of a row that fails while others succeed
ATTEMPTS = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0


class JobStopped(LookonceError):
    """The pools do not answer at all: nothing is wrong with the rows."""

    status = 503
    code = "job_stopped"


class Patience:
    """Tries rows again. Shared by the rows of one worker, since what happens to others tells whose fault it is.

    Args:
        seconds: how long nothing may succeed before the job stops.
        attempt_seconds: deadline of one try.
    """

    def __init__(self, seconds: float, attempt_seconds: float) -> None:
        self._seconds = seconds
        self._attempt_seconds = attempt_seconds
        self._last_success = time.monotonic()
        self._successes = 0
        self.retries = 0

    async def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of ``work``, tried again while the fault is not its own.

        Raises:
            RequestError: the row is at fault: at once, or since it failed again and again while others succeeded.
            JobStopped: nothing has succeeded for long.
        """
        begin = time.monotonic()
        failures, successes = 0, self._successes
        pause = FIRST_PAUSE
        while True:
            try:
                async with asyncio.timeout(self._attempt_seconds):
                    result = await work()
            except TimeoutError:
                error: LookonceError = DeadlineExceeded(f"no answer within {self._attempt_seconds:g} s")
            except (RequestError, StorageError, JobStopped):
                raise
            except LookonceError as caught:
                error = caught
            else:
                self._last_success = time.monotonic()
                self._successes += 1
                return result
            failures += not isinstance(error, Busy)  # a full queue says nothing about the row
            if failures >= ATTEMPTS and self._successes > successes:
                raise RequestError(f"failed {failures} times while other rows succeeded; last: {error.message}")
            if time.monotonic() - max(self._last_success, begin) > self._seconds:
                raise JobStopped(
                    f"nothing succeeded for {self._seconds:g} s; last: {error.message}. What was finished is safe: "
                    "run the same command again to go on"
                ) from error
            self.retries += 1
            hint = min(getattr(error, "retry_after", 0.0), LONGEST_PAUSE) if isinstance(error, Unavailable) else 0.0
            await asyncio.sleep(max(pause * random.uniform(0.5, 1.5), hint))
            pause = min(2 * pause, LONGEST_PAUSE)
