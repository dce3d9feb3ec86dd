"""The connector's counters on vLLM's own ways: its log line and its ``/metrics``."""

# mypy: allow-subclassing-any
from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorWorkerMetadata
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = {
    "hits": "Encoder outputs that were loaded from Redis.",
    "misses": "Encoder outputs that Redis did not have, so that they were made here.",
    "uncacheable": "Items whose content or model could not be identified; they were encoded here and not saved.",
    "unavailable": "Requests failed because they carried no data to encode and Redis had no embedding.",
    "bytes_loaded": "Bytes of encoder outputs loaded from Redis.",
    "saved": "Encoder outputs stored in Redis.",
    "saved_before": "Encoder outputs that were in Redis already when they should be stored.",
    "save_failed": "Encoder outputs that Redis did not take.",
    "save_dropped": "Encoder outputs not saved because too many were on their way.",
    "save_unsupported": "Encoder outputs that have no record: not a matrix of finite floats.",
    "bytes_saved": "Bytes of encoder outputs stored in Redis.",
}


class RedisStats(ECConnectorStats):
    """Counts since the last report, by the names of :data:`COUNTERS`."""

    def reset(self) -> None:
        """Forgets them."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: ECConnectorStats) -> RedisStats:
        """Both together."""
        return RedisStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class WorkerCounts(ECConnectorWorkerMetadata):
    """What a worker's saver counted, on its way to the scheduler."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts

    def aggregate(self, other: ECConnectorWorkerMetadata) -> WorkerCounts:
        """Of all workers."""
        assert isinstance(other, WorkerCounts)
        return WorkerCounts(dict(Counter(self.counts) + Counter(other.counts)))


class RedisPromMetrics(ECConnectorPromMetrics):
    """One Prometheus counter each: ``vllm:ec_redis_hits_total`` and so on."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[prometheus_client.Counter]
        self._counters = {
            name: create_metric_per_engine(
                make(name=f"vllm:ec_redis_{name}", documentation=text, labelnames=labelnames), per_engine_labelvalues
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds a report."""
        for name, number in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(number)
