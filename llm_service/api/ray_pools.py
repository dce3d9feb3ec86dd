"""The two pools over Ray Serve handles: errors unwrapped, deaths told as such, cancellation passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from llm_service.api.pools import PoolStatus
from llm_service.messages import Chunk
from llm_service.prompts import Prompt
from llm_service.replies import Replies, ReplyListener
from llm_service.sampling import SamplingOptions
from shared import tracing
from shared.config import PoolSettings
from shared.errors import Busy, LookonceError, ReplicaLost, Unavailable
from shared.items import VisionItem
from shared.keys import Namespace
from shared.log import request_id

#: for a question whose answer never changes, so a call whose replica died is simply made again
MAX_IDENTITY_ATTEMPTS = 3
#: a replica that is too busy to count is left out of the status
STATS_SECONDS = 1.0
#: Serve's name of the state in which a replica takes requests
RUNNING = "RUNNING"

#: what a call through a handle may raise
FAULTS = (RayTaskError, RayActorError, BackPressureError, DeploymentUnavailableError)

Answer = TypeVar("Answer")


def translated(error: Exception, pool: str) -> LookonceError:
    """Our error for one of Ray's."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, LookonceError):
        return error.cause
    if isinstance(error, LookonceError):
        return error
    if isinstance(error, BackPressureError):
        return Busy(f"the {pool} pool's queue is full; try again in a moment")
    if isinstance(error, RayActorError):
        return ReplicaLost(f"a replica of the {pool} pool died; it is being replaced", retry_after=5)
    if isinstance(error, DeploymentUnavailableError):
        return Unavailable(f"the {pool} pool has no replica that could start; the log has the details", retry_after=5)
    return LookonceError(f"the {pool} pool failed; the log has the details")


class RayEncoderPool:
    """:class:`EncoderPool` over a Serve handle.

    Args:
        handle: of the encoder deployment.
        settings: of the pool.
        batch: its images are a batch job's, and wait for those of people.
    """

    def __init__(self, handle: DeploymentHandle[Any], settings: PoolSettings, *, batch: bool = False) -> None:
        self._handle = handle
        self._settings = settings
        self._batch = batch

    async def status(self) -> PoolStatus:
        """See :meth:`EncoderPool.status`."""
        return await _status(self._handle)

    async def ready(self) -> bool:
        """See :meth:`EncoderPool.ready`."""
        return await _ready(self._handle, self._settings)

    async def identity(self) -> Namespace:
        """See :meth:`EncoderPool.identity`."""
        for attempt in range(1, MAX_IDENTITY_ATTEMPTS + 1):
            try:
                namespace: Namespace = await _call(self._handle.identity.remote())
                return namespace
            except ReplicaLost:
                if attempt == MAX_IDENTITY_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def encode(self, data: bytes, *, salt: str | None, inline: bool, again: bool = False) -> VisionItem:
        """See :meth:`EncoderPool.encode`."""
        with tracing.span("encoder"):
            trace = tracing.carried()
            response = self._handle.encode.remote(data, request_id.get(), salt, inline, again, self._batch, trace=trace)
            item: VisionItem = await _call(response)
            return item


async def _call(response: Awaitable[Any]) -> Any:
    try:
        return await _cancellable(response)
    except FAULTS as error:
        raise translated(error, "encoder") from error


async def _cancellable(response: Awaitable[Answer]) -> Answer:
    """Awaits a Serve response; a caller that leaves cancels the work in the replica."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()  # type: ignore[attr-defined]
        raise


async def _status(handle: DeploymentHandle[Any]) -> PoolStatus:
    """Replica counts from Serve's controller, and one replica's figures if one answers in time."""
    replicas = await _replicas(handle)
    if not replicas.get(RUNNING):  # asking would wake one
        return PoolStatus(replicas, {})
    try:
        async with asyncio.timeout(STATS_SECONDS):
            return PoolStatus(replicas, await _cancellable(handle.stats.remote()))
    except (TimeoutError, *FAULTS):
        return PoolStatus(replicas, {})


async def _replicas(handle: DeploymentHandle[Any]) -> dict[str, int]:
    overview = await asyncio.to_thread(serve.status)
    deployment = overview.applications[handle.app_name].deployments[handle.deployment_name]
    return {str(getattr(state, "value", state)): number for state, number in deployment.replica_states.items()}


async def _ready(handle: DeploymentHandle[Any], settings: PoolSettings) -> bool:
    return settings.min_replicas == 0 or bool((await _replicas(handle)).get(RUNNING))


class RayLanguagePool:
    """:class:`LanguagePool` over a Serve handle; the chunks of streams come over connections of their own."""

    def __init__(self, handle: DeploymentHandle[Any], settings: PoolSettings) -> None:
        self._handle = handle
        self._settings = settings
        self._listener = ReplyListener(ray.util.get_node_ip_address())
        #: calls whose answer is complete, until they say so as well
        self._ending: set[asyncio.Future[None]] = set()

    async def status(self) -> PoolStatus:
        """See :meth:`LanguagePool.status`."""
        return await _status(self._handle)

    async def ready(self) -> bool:
        """See :meth:`LanguagePool.ready`."""
        return await _ready(self._handle, self._settings)

    async def generate(
        self, request_id: str, prompt: Prompt, items: list[VisionItem], sampling: SamplingOptions
    ) -> AsyncIterator[Chunk]:
        """See :meth:`LanguagePool.generate`."""
        replies = await self._listener.open()
        response = self._handle.generate.remote(
            request_id, prompt, items, sampling, reply=replies.address, trace=tracing.carried()
        )
        call = asyncio.ensure_future(_cancellable(response))
        call.add_done_callback(partial(_tell_end, replies))
        try:
            async for chunk in replies:
                yield chunk
        except BaseException:
            call.cancel()
            raise
        finally:
            replies.close()
            self._ending.add(call)
            call.add_done_callback(self._ending.discard)

    async def answer(
        self, request_id: str, prompt: Prompt, items: list[VisionItem], sampling: SamplingOptions
    ) -> list[Chunk]:
        """See :meth:`LanguagePool.answer`."""
        try:
            trace = tracing.carried()
            return await _cancellable(self._handle.answer.remote(request_id, prompt, items, sampling, trace=trace))
        except FAULTS as error:
            raise translated(error, "language") from error


def _tell_end(replies: Replies, call: asyncio.Future[None]) -> None:
    """The call's end, as far as it concerns those who wait for chunks."""
    if call.cancelled():  # by themselves
        return
    error = call.exception()
    if error is None:
        replies.sent()
    else:
        replies.fail(translated(error, "language") if isinstance(error, FAULTS) else error)
