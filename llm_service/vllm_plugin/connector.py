"""Encoder-cache connector: image embeddings come from Redis, never from a tower in this engine.

vLLM asks the scheduler's instance before it schedules a request (``ensure_cache_available``); a "no" defers the
request and costs the others nothing. A "yes" for an embedding (``has_cache_item``) is only ever said when its validated
bytes are in this process, because vLLM treats a yes that is not delivered as a fatal "Encoder cache miss".

Scheduler and model runner are one process on a GPU with world size 1 (``UniProcExecutor``) and, on CPU or with tensor
parallelism, several. Both work alike: the bytes travel inside the step's metadata, by reference within a process and
as one out-of-band buffer between processes. The worker's instance therefore needs no cache of its own.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from llm_service.vllm_plugin.parent import die_with_parent
from llm_service.vllm_plugin.prefetch import Lost, Need, Prefetcher
from llm_service.vllm_plugin.processing import EMBEDDING, GRID
from shared.cache import EmbeddingCache
from shared.config import CacheSettings
from shared.records import decode_record

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


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
class LoadMetadata(ECConnectorMetadata):
    """What this step's model runner must put into its encoder cache."""

    loads: dict[str, Payload] = field(default_factory=dict)


class RedisECConnector(ECConnectorBase):
    """See the module. Extra configuration: ``cache`` (settings), ``cache_url``, ``prefetch_bytes``, ``owner`` (pid)."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        assert vllm_config.ec_transfer_config is not None
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._width: int = vllm_config.model_config.get_inputs_embeds_size()
        self._loads: dict[str, Payload] = {}
        self._unavailable: set[str] = set()
        #: request → all of its images that end after this token are held
        self._horizon: dict[str, int] = {}
        self._cache: EmbeddingCache | None = None
        if role is ECConnectorRole.SCHEDULER:
            if extra.get("owner") != os.getpid():
                die_with_parent(extra.get("owner"))
            self._cache = EmbeddingCache(CacheSettings(**extra["cache"]), extra["cache_url"])
            self._prefetcher = Prefetcher(self._fetch, extra["prefetch_bytes"])

    # Scheduler side

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether every embedding that the request still needs is held; fetches what is missing."""
        owner = request.request_id
        horizon = self._horizon.get(owner)
        if horizon is not None and num_computed_tokens >= horizon:
            return True
        if owner in self._unavailable:
            return False
        remote = [feature for feature in request.mm_features if not _inline(feature)]
        needs = [self._need(f) for f in remote if f.mm_position.offset + f.mm_position.length > num_computed_tokens]
        try:
            if not self._prefetcher.ready(owner, needs):
                return False
        except Lost as lost:
            logger.warning("request %s lost %s", owner, lost)
            self._unavailable.add(owner)
            return False
        # prefix-cached images may be needed again after a preemption
        self._prefetcher.keep(owner, (feature.identifier for feature in remote))
        self._horizon[owner] = num_computed_tokens
        return True

    def take_unavailable_requests(self) -> set[str]:
        """Requests that lost an entry; the scheduler fails them and the caller encodes again."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the embedding is held in this process."""
        return self._prefetcher.get(identifier) is not None

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """vLLM has room for the embedding: it goes with this step."""
        key = request.mm_features[index].identifier
        if (tensor := self._prefetcher.get(key)) is not None:
            self._loads[key] = Payload(tensor)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """This step's embeddings."""
        loads, self._loads = self._loads, {}
        return LoadMetadata(loads)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Lets go of what the request held."""
        self._prefetcher.release(request.request_id)
        self._horizon.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        return False, None

    def _need(self, feature: MultiModalFeatureSpec) -> Need:
        assert feature.data is not None
        _, height, width = feature.data[GRID].data.tolist()
        tokens = feature.mm_position.get_num_embeds()
        return Need(feature.identifier, tokens, (height, width), tokens * self._width * self._dtype.itemsize)

    def _fetch(self, need: Need) -> torch.Tensor | None:
        """Runs in a prefetch thread. What the cache gives has passed its own checks; it must also be what is needed."""
        assert self._cache is not None
        record = self._cache.fetch(need.key)
        if record is None:
            return None
        header, tensor = decode_record(record, need.key, verify=False)
        grid = (header.grid.height // header.merge, header.grid.width // header.merge)
        if (header.tokens, header.width, grid) != (need.tokens, self._width, need.grid):
            logger.warning(
                "record %s holds [%d, %d] over %s where the prompt needs [%d, %d] over %s; deleted",
                *(need.key, header.tokens, header.width, grid, need.tokens, self._width, need.grid),
            )
            self._cache.delete([need.key])
            return None
        return tensor

    # Worker side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Puts this step's embeddings into the model runner's encoder cache."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, LoadMetadata)
        if not metadata.loads:
            return
        device = torch.device(current_platform.device_type)
        if current_platform.is_cuda_alike():
            device = torch.device(current_platform.device_type, torch.accelerator.current_device_index())
        for key, payload in metadata.loads.items():
            if key not in encoder_cache:
                encoder_cache[key] = payload.tensor.to(device, self._dtype, non_blocking=True)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """A consumer saves nothing."""

    def shutdown(self) -> None:
        """Ends the prefetch threads."""
        if self._cache is not None:
            self._prefetcher.close()
            self._cache.close()


def _inline(feature: MultiModalFeatureSpec) -> bool:
    return feature.data is not None and EMBEDDING in feature.data
