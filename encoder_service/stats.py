"""Counters of one encoder engine, plain ones and Prometheus's."""

from __future__ import annotations

from dataclasses import dataclass

from shared import metrics


@dataclass
class EncoderStats:
    """Counted since the start.

    Attributes:
        forwards: runs of the tower.
        images, patches: that went through it.
        padding_patches: patches of no image that went through it.
        queue_seconds: summed over images, from patches ready to forward begun.
        encode_seconds: summed over forwards.
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
    images: int = 0
    patches: int = 0
    padding_patches: int = 0
    queue_seconds: float = 0.0
    encode_seconds: float = 0.0
    requests: int = 0
    cache_hits: int = 0
    shared: int = 0
    stored: int = 0
    not_stored: int = 0
    takeovers: int = 0
    cancelled: int = 0
    failures: int = 0
    not_finite: int = 0

    def count_forward(self, model: str, images: int, patches: int, padding: int, seconds: float) -> None:
        """One run of the tower."""
        self.forwards += 1
        self.images += images
        self.patches += patches
        self.padding_patches += padding
        self.encode_seconds += seconds
        metrics.FORWARDS.labels(model).inc()
        metrics.ENCODED_IMAGES.labels(model).inc(images)
        metrics.ENCODED_PATCHES.labels(model).inc(patches)
