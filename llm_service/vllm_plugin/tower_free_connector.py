"""The connector of engines without a tower: every embedding comes from Redis or in the request.

An entry that is gone cannot be made here: the request fails as unavailable, and its caller has it encoded again.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from llm_service.vllm_plugin.connector_base import PrefetchingConnector
from llm_service.vllm_plugin.parent import die_with_parent
from llm_service.vllm_plugin.prefetch import Lost, Need, Prefetcher
from llm_service.vllm_plugin.processing import EMBEDDING, GRID
from shared import tracing
from shared.cache import EmbeddingCache
from shared.config import CacheSettings, TelemetrySettings
from shared.records import Buffer, decode_record

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class TowerFreeConnector(PrefetchingConnector):
    """See the module.

    Extra configuration: ``cache`` and ``telemetry`` (settings), ``cache_url``, ``prefetch_bytes``, ``owner`` (pid).
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        assert vllm_config.ec_transfer_config is not None
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._width: int = vllm_config.model_config.get_inputs_embeds_size()
        self._cache: EmbeddingCache | None = None
        if role is ECConnectorRole.SCHEDULER:
            if extra.get("owner") != os.getpid():
                die_with_parent(extra.get("owner"))
            self._cache = EmbeddingCache(CacheSettings(**extra["cache"]), extra["cache_url"])
            self._prefetcher = Prefetcher(self._fetch, extra["prefetch_bytes"])
            tracing.configure(TelemetrySettings(**extra["telemetry"]), "engine")
            #: request → since when it waits for embeddings, seconds
            self._since: dict[str, float] = {}

    def _available(self, request: Request, ahead: Sequence[int]) -> bool:
        owner = request.request_id
        remote = {index: feature for index, feature in enumerate(request.mm_features) if not _inline(feature)}
        needs = [self._need(remote[index]) for index in ahead if index in remote]
        if needs:
            self._since.setdefault(owner, time.perf_counter())
        try:
            if not self._prefetcher.ready(owner, needs):
                return False
        except Lost as lost:
            logger.warning("request %s lost %s", owner, lost)
            self._unavailable.add(owner)
            return False
        # prefix-cached images may be needed again after a preemption
        self._prefetcher.keep(owner, (feature.identifier for feature in remote.values()))
        if (since := self._since.pop(owner, None)) is not None:
            trace = (request.trace_headers or {}).get(tracing.TRACEPARENT)
            tracing.past("cache.get", time.perf_counter() - since, parent=trace)
        return True

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request."""
        self._since.pop(request.request_id, None)
        return super().request_finished(request)

    def _need(self, feature: MultiModalFeatureSpec) -> Need:
        assert feature.data is not None
        _, height, width = feature.data[GRID].data.tolist()
        tokens = feature.mm_position.get_num_embeds()
        return Need(feature.identifier, tokens, (height, width), tokens * self._width * self._dtype.itemsize)

    def _fetch(self, needs: Sequence[Need]) -> list[torch.Tensor | None]:
        """Runs in a prefetch thread. What the cache gives has passed its own checks; it must also be what is needed."""
        assert self._cache is not None
        records = self._cache.fetch_many([need.key for need in needs])
        return [self._fitting(need, record) for need, record in zip(needs, records, strict=True)]

    def _fitting(self, need: Need, record: Buffer | None) -> torch.Tensor | None:
        if record is None:
            return None
        header, tensor = decode_record(record, need.key, verify=False)
        grid = (header.grid.height // header.merge, header.grid.width // header.merge)
        if (header.tokens, header.width, grid) != (need.tokens, self._width, need.grid):
            logger.warning(
                "record %s holds [%d, %d] over %s where the prompt needs [%d, %d] over %s; deleted",
                *(need.key, header.tokens, header.width, grid, need.tokens, self._width, need.grid),
            )
            assert self._cache is not None
            self._cache.delete([need.key])
            return None
        return tensor

    def _placed(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device, self._dtype, non_blocking=True)

    def shutdown(self) -> None:
        """Ends the prefetch threads."""
        if self._cache is not None:
            self._prefetcher.close()
            self._cache.close()


def _inline(feature: MultiModalFeatureSpec) -> bool:
    return feature.data is not None and EMBEDDING in feature.data
