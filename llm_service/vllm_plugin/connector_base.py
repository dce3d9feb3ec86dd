"""What both encoder-cache connectors share: embeddings are prefetched from Redis and travel with a step's metadata.

vLLM asks the scheduler's instance before it schedules a request (``ensure_cache_available``); a "no" defers the
request and costs the others nothing. A "yes" for an embedding (``has_cache_item``) is only ever said when its validated
bytes are in this process, because vLLM treats a yes that is not delivered as a fatal "Encoder cache miss".

Scheduler and model runner are one process on a GPU with world size 1 (``UniProcExecutor``) and, on CPU or with tensor
parallelism, several. Both work alike: the bytes travel inside the step's metadata, by reference within a process and
as one out-of-band buffer between processes. The worker's instance therefore needs no cache of its own.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from llm_service.vllm_plugin.prefetch import Prefetcher

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class Payload:
    """An embedding on its way to the model runner; pickles as one buffer without a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        raw = self.tensor.contiguous().view(torch.uint8).numpy()
        return _rebuild, (raw, str(self.tensor.dtype).removeprefix("torch."), tuple(self.tensor.shape))


def _rebuild(raw: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Payload:
    return Payload(torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape))


@dataclass
class StepMetadata(ECConnectorMetadata):
    """What this step's model runner does for the connector.

    Attributes:
        loads: embeddings for its encoder cache, by vLLM's identifier.
        saves: cache keys under which to store what it encodes, by vLLM's identifier.
    """

    loads: dict[str, Payload] = field(default_factory=dict)
    saves: dict[str, str] = field(default_factory=dict)


class PrefetchingConnector(ECConnectorBase):
    """Loads, and the life of a request. A subclass says in :meth:`_available` what a request needs."""

    _prefetcher: Prefetcher

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._loads: dict[str, Payload] = {}
        self._unavailable: set[str] = set()
        #: request → all of its images that end after this token are held, or will be made here
        self._horizon: dict[str, int] = {}

    # Scheduler side

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request can go on with what is held; fetches what is missing."""
        owner = request.request_id
        horizon = self._horizon.get(owner)
        if horizon is not None and num_computed_tokens >= horizon:
            self._enter(request)
            return True
        if owner in self._unavailable:
            return False
        ends = [feature.mm_position.offset + feature.mm_position.length for feature in request.mm_features]
        if not self._available(request, [index for index, end in enumerate(ends) if end > num_computed_tokens]):
            return False
        self._enter(request)
        self._horizon[owner] = num_computed_tokens
        return True

    def _available(self, request: Request, ahead: Sequence[int]) -> bool:
        """Whether nothing has to be waited for; a request that can never go on is put into ``_unavailable``.

        Args:
            request: the request.
            ahead: indices of those of its features that are not wholly computed yet.
        """
        raise NotImplementedError

    def _enter(self, request: Request) -> None:
        """vLLM is about to schedule this request: identifiers in its next calls are this one's."""

    def _key(self, identifier: str) -> str | None:
        """Cache key of an identifier; None for what the cache has nothing to do with."""
        return identifier

    def take_unavailable_requests(self) -> set[str]:
        """Requests that lost an entry; the scheduler fails them and the caller encodes again."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the embedding is held in this process."""
        return self._held(identifier) is not None

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """vLLM has room for the embedding: it goes with this step."""
        identifier = request.mm_features[index].identifier
        if (tensor := self._held(identifier)) is not None:
            self._loads[identifier] = Payload(tensor)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """This step's embeddings."""
        loads, self._loads = self._loads, {}
        return StepMetadata(loads)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Lets go of what the request held."""
        if self.is_consumer:
            self._prefetcher.release(request.request_id)
        self._horizon.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        return False, None

    def _held(self, identifier: str) -> torch.Tensor | None:
        key = self._key(identifier) if self.is_consumer else None
        return None if key is None else self._prefetcher.get(key)

    # Worker side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Puts this step's embeddings into the model runner's encoder cache."""
        loads = self._step().loads
        if not loads:
            return
        device = torch.device(current_platform.device_type)
        if current_platform.is_cuda_alike():
            device = torch.device(current_platform.device_type, torch.accelerator.current_device_index())
        for identifier, payload in loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = self._placed(payload.tensor, device)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """A consumer saves nothing."""

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def _placed(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """An embedding where the model runner wants it."""
        return tensor.to(device, non_blocking=True)
