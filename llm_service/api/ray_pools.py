"""The two pools over Ray Serve handles: errors unwrapped, dead replicas retried, cancellation passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from llm_service.api.pools import PoolStatus
from llm_service.messages import Chunk
from llm_service.prompts import Prompt
from llm_service.sampling import SamplingOptions
from shared.errors import Busy, LookonceError, Unavailable
from shared.items import VisionItem
from shared.keys import Namespace
from shared.log import request_id

#: encoding twice gives the same bytes, so a call whose replica died is simply made again
MAX_ENCODE_ATTEMPTS = 3
#: a replica that is too busy to count is left out of the status
STATS_SECONDS = 1.0

Answer = TypeVar("Answer")


def translated(error: Exception, pool: str) -> LookonceError:
    """Our error for one of Ray's."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, LookonceError):
        return error.cause
    if isinstance(error, LookonceError):
        return error
    if isinstance(error, BackPressureError):
        return Busy(f"the {pool} pool's queue is full; try again in a moment")
    if isinstance(error, RayActorError | DeploymentUnavailableError):
        return Unavailable(f"a replica of the {pool} pool died; it is being replaced", retry_after=5)
    return LookonceError(f"the {pool} pool failed; the log has the details")


class RayEncoderPool:
    """:class:`EncoderPool` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def status(self) -> PoolStatus:
        """See :meth:`EncoderPool.status`."""
        return await _status(self._handle)

    async def identity(self) -> Namespace:
        """See :meth:`EncoderPool.identity`."""
        return await self._call(lambda: self._handle.identity.remote())

    async def encode(self, data: bytes, *, salt: str | None, inline: bool) -> VisionItem:
        """See :meth:`EncoderPool.encode`."""
        return await self._call(lambda: self._handle.encode.remote(data, request_id.get(), salt, inline))

    async def _call(self, call: Callable[[], Any]) -> Any:
        for attempt in range(1, MAX_ENCODE_ATTEMPTS + 1):
            try:
                return await _cancellable(call())
            except RayActorError as error:
                if attempt == MAX_ENCODE_ATTEMPTS:
                    raise translated(error, "encoder") from error
            except (RayTaskError, BackPressureError, DeploymentUnavailableError) as error:
                raise translated(error, "encoder") from error
        raise AssertionError("unreachable")


async def _cancellable(response: Awaitable[Answer]) -> Answer:
    """Awaits a Serve response; a caller that leaves cancels the work in the replica."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()  # type: ignore[attr-defined]
        raise


async def _status(handle: DeploymentHandle[Any]) -> PoolStatus:
    """Replica counts from Serve's controller, and one replica's figures if one answers in time."""
    overview = await asyncio.to_thread(serve.status)
    deployment = overview.applications[handle.app_name].deployments[handle.deployment_name]
    replicas = {str(getattr(state, "value", state)): number for state, number in deployment.replica_states.items()}
    try:
        async with asyncio.timeout(STATS_SECONDS):
            return PoolStatus(replicas, await _cancellable(handle.stats.remote()))
    except (TimeoutError, RayTaskError, RayActorError, BackPressureError, DeploymentUnavailableError):
        return PoolStatus(replicas, {})


class RayLanguagePool:
    """:class:`LanguagePool` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._whole = handle
        self._handle = handle.options(stream=True)

    async def status(self) -> PoolStatus:
        """See :meth:`LanguagePool.status`."""
        return await _status(self._whole)

    async def generate(
        self, request_id: str, prompt: Prompt, items: list[VisionItem], sampling: SamplingOptions
    ) -> AsyncIterator[Chunk]:
        """See :meth:`LanguagePool.generate`."""
        stream = self._handle.generate.remote(request_id, prompt, items, sampling)
        finished = False
        try:
            async for chunk in stream:
                yield chunk
            finished = True
        except (RayTaskError, RayActorError, BackPressureError, DeploymentUnavailableError) as error:
            finished = True
            raise translated(error, "language") from error
        finally:
            if not finished:
                stream.cancel()
