"""The engine's own figures, as of its last step."""

# mypy: allow-subclassing-any
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats


class StatsRecorder:
    """Keeps the newest scheduler figures of one engine."""

    def __init__(self) -> None:
        #: of the engine since its start
        self.steps = 0
        self._latest: dict[str, float] = {"running": 0, "waiting": 0, "kv_cache_usage": 0.0}

    def latest(self) -> dict[str, float]:
        """``running``, ``waiting`` and ``kv_cache_usage`` (0 to 1)."""
        return dict(self._latest)

    def update(self, stats: SchedulerStats) -> None:
        """Takes the figures of one step."""
        self.steps += 1
        self._latest = {
            "running": stats.num_running_reqs,
            "waiting": stats.num_waiting_reqs,
            "kv_cache_usage": stats.kv_cache_usage,
        }

    def factory(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """What vLLM calls to make its logger."""
        return _Logger(self)


class _Logger(StatLoggerBase):
    def __init__(self, recorder: StatsRecorder) -> None:
        self._recorder = recorder

    def record(self, scheduler_stats: SchedulerStats | None, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self._recorder.update(scheduler_stats)

    def log_engine_initialized(self) -> None:
        pass
