"""Counters of one encoder engine, plain ones and Prometheus's."""

from __future__ import annotations

from dataclasses import dataclass

from encoder_service.device import Embedded
from encoder_service.replay import Capture
from encoder_service.replay.costs import CostBook
from encoder_service.towers.base import Budget
from encoder_service.utilisation import Work
from shared import metrics


@dataclass
class EncoderStats:
    """Counted since the start.

    Attributes:
        forwards: runs of the tower.
        replays: those of a fixed size.
        images, patches, tokens: that went through it.
        padding_patches: patches of no image that went through it.
        queue_seconds: summed over images, from patches ready to forward begun.
        encode_seconds, host_seconds: summed over forwards, all of it and the host's planning and packing.
        warmup_seconds, warmup_bytes: of all budgets at start.
        requests: calls of ``encode``.
        cache_hits: embeddings found after decoding: another file of the picture, or another encoder's work.
        shared: calls that another call's work here answered.
        stored, not_stored: new embeddings that the cache took, or not.
        takeovers: leases taken over from an encoder that did not deliver.
        cancelled: images dropped because every caller had left.
        failures: images whose forward raised.
        not_finite: images whose embedding had NaN or Inf, never stored.
    """

    forwards: int = 0
    replays: int = 0
    images: int = 0
    patches: int = 0
    tokens: int = 0
    padding_patches: int = 0
    queue_seconds: float = 0.0
    encode_seconds: float = 0.0
    host_seconds: float = 0.0
    warmup_seconds: float = 0.0
    warmup_bytes: int = 0
    requests: int = 0
    cache_hits: int = 0
    shared: int = 0
    stored: int = 0
    not_stored: int = 0
    takeovers: int = 0
    cancelled: int = 0
    failures: int = 0
    not_finite: int = 0

    def count_forward(self, model: str, result: Embedded, patches: int, fill: float) -> None:
        """One run of the tower.

        Args:
            model: its name.
            result: what came of it.
            patches: of its images.
            fill: patches over those of the largest batch.
        """
        images, tokens = len(result.embeddings), sum(len(values) for values in result.embeddings)
        path = "eager" if result.budget is None else "replay"
        self.forwards += 1
        self.replays += result.budget is not None
        self.images += images
        self.patches += patches
        self.tokens += tokens
        self.padding_patches += result.padding
        self.encode_seconds += result.seconds
        self.host_seconds += result.host
        metrics.FORWARDS.labels(model, path).inc()
        metrics.FORWARD_SECONDS.labels(model, path).inc(result.seconds)
        metrics.HOST_SECONDS.labels(model).inc(result.host)
        metrics.ENCODED_IMAGES.labels(model).inc(images)
        metrics.ENCODED_PATCHES.labels(model).inc(patches)
        metrics.ENCODED_TOKENS.labels(model).inc(tokens)
        metrics.PADDING_PATCHES.labels(model).inc(result.padding)
        metrics.BATCH_FILL.labels(model).observe(fill)

    def count_wait(self, model: str, seconds: float) -> None:
        """One image left the queue."""
        self.queue_seconds += seconds
        metrics.QUEUE_SECONDS.labels(model).observe(seconds)

    def count_warmup(self, model: str, capture: Capture) -> None:
        """One budget is ready."""
        self.warmup_seconds += capture.seconds
        self.warmup_bytes += capture.bytes
        budget = str(capture.budget.patches)
        metrics.WARMUP_SECONDS.labels(model, budget).set(capture.seconds)
        metrics.WARMUP_BYTES.labels(model, budget).set(capture.bytes)

    def show_work(self, model: str, work: Work) -> None:
        """What utilisation is reckoned with."""
        metrics.OPERATIONS_PER_PATCH.labels(model).set(work.per_patch)
        metrics.GEMM_RATE.labels(model).set(work.gemm_rate)

    def show_costs(self, model: str, costs: CostBook, budget: Budget | None) -> None:
        """What batches of one budget cost now."""
        if budget is None:
            return
        cost, name = costs.of(budget), str(budget.patches)
        if cost.replay is not None:
            metrics.BUDGET_SECONDS.labels(model, name, "replay").set(cost.replay)
        if cost.eager is not None:
            metrics.BUDGET_SECONDS.labels(model, name, "eager").set(cost.eager * budget.patches)
