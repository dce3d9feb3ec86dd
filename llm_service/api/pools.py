"""What the endpoint needs of the pools. Deployments implement these over Ray; the endpoint knows nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from llm_service.messages import Chunk
from llm_service.prompts import Prompt
from llm_service.sampling import SamplingOptions
from shared.items import VisionItem
from shared.keys import Namespace


@dataclass(frozen=True)
class PoolStatus:
    """How a pool fares.

    Attributes:
        replicas: how many there are, by state (``RUNNING``, ``STARTING``, …).
        stats: figures of one of them, as it counts itself; empty when none answers.
    """

    replicas: dict[str, int]
    stats: dict[str, float]


class EncoderPool(Protocol):
    """Encodes images of one model."""

    async def status(self) -> PoolStatus:
        """How the pool fares."""

    async def ready(self) -> bool:
        """Whether a request would find a replica, or wake one."""

    async def identity(self) -> Namespace:
        """Namespace of this pool's cache keys."""

    async def encode(self, data: bytes, *, salt: str | None, inline: bool, again: bool = False) -> VisionItem:
        """Encodes an image file, or finds it in the cache.

        Args:
            data: the encoded file (JPEG, PNG, …).
            salt: tenant salt of the cache key.
            inline: put the record into the answer even if it is in the cache.
            again: a process died over it: its lease on the image does not count.

        Raises:
            ReplicaLost: the process died; it may have been another image's fault.
        """


class LanguagePool(Protocol):
    """Answers prompts of one model."""

    async def status(self) -> PoolStatus:
        """How the pool fares."""

    async def ready(self) -> bool:
        """Whether a request would find a replica, or wake one."""

    def generate(
        self, request_id: str, prompt: Prompt, items: list[VisionItem], sampling: SamplingOptions
    ) -> AsyncIterator[Chunk]:
        """Streams an answer; closing the iterator aborts the request.

        Raises:
            EmbeddingLost: before the first chunk, when a cache entry vanished.
            ReplicaLost: the process died, at whatever point.
        """

    async def answer(
        self, request_id: str, prompt: Prompt, items: list[VisionItem], sampling: SamplingOptions
    ) -> list[Chunk]:
        """The whole answer in one message, which costs far less than a stream; cancelling aborts the request.

        Raises:
            EmbeddingLost: a cache entry vanished.
        """
