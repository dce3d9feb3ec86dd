"""Prometheus metrics of every process, gathered through files of one folder.

Each process of a node writes its numbers to ``PROMETHEUS_MULTIPROC_DIR`` (set before this module is imported); the
ingress of that node answers ``/metrics`` for all of them, vLLM's own metrics included.
"""

from __future__ import annotations

import os

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from shared.metric_files import keep_counting_without_room

keep_counting_without_room()

MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"

#: seconds; from a cache hit (about 1 ms) to a cold true-size tower on a CPU (tens of seconds)
STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

REQUESTS = Counter("lookonce_requests", "Requests by route, model and HTTP status", ["route", "model", "status"])
REQUEST_SECONDS = Histogram(
    "lookonce_request_seconds", "Whole time of a request", ["route", "model"], buckets=STAGE_BUCKETS
)
STAGE_SECONDS = Histogram(
    "lookonce_stage_seconds",
    "Time of one stage: fetch, hash, lookup, decode, preprocess, queue, encode, put; engine_queue, engine_prefill, …",
    ["model", "stage"],
    buckets=STAGE_BUCKETS,
)
IMAGES = Counter("lookonce_images", "Images of requests, by where their embedding came from", ["model", "source"])
IMAGE_TOKENS = Counter("lookonce_image_tokens", "Image tokens of requests, by source", ["model", "source"])
FORWARDS = Counter("lookonce_encoder_forwards", "Forward passes of a tower, by path: replay, eager", ["model", "path"])
FORWARD_SECONDS = Counter("lookonce_encoder_forward_seconds", "Time in forward passes, by path", ["model", "path"])
ENCODED_IMAGES = Counter("lookonce_encoded_images", "Images that went through a tower", ["model"])
ENCODED_PATCHES = Counter("lookonce_encoded_patches", "Patches that went through a tower", ["model"])
HOST_SECONDS = Counter("lookonce_encoder_host_seconds", "Planning and packing of batches, part of the above", ["model"])
ENCODED_TOKENS = Counter("lookonce_encoded_tokens", "Embedding rows that towers gave", ["model"])
PADDING_PATCHES = Counter("lookonce_encoder_padding_patches", "Patches of no image in forward passes", ["model"])
QUEUE_SECONDS = Histogram(
    "lookonce_encoder_queue_seconds", "From an image's patches ready to its forward", ["model"], buckets=STAGE_BUCKETS
)
BATCH_FILL = Histogram(
    "lookonce_encoder_batch_fill",
    "Patches of a batch over max_batch_patches",
    ["model"],
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
WARMUP_SECONDS = Gauge(
    "lookonce_encoder_warmup_seconds",
    "Compilation or capture of one budget at start",
    ["model", "budget"],
    multiprocess_mode="livemax",
)
WARMUP_BYTES = Gauge(
    "lookonce_encoder_warmup_bytes", "Memory that one budget took", ["model", "budget"], multiprocess_mode="livemax"
)
BUDGET_SECONDS = Gauge(
    "lookonce_encoder_budget_seconds",
    "What a full batch of one budget costs by the forwards so far, on which the choice of a path rests",
    ["model", "budget", "path"],
    multiprocess_mode="livemax",
)
OPERATIONS_PER_PATCH = Gauge(
    "lookonce_encoder_operations_per_patch", "Of matrix products", ["model"], multiprocess_mode="livemax"
)
GEMM_RATE = Gauge(
    "lookonce_encoder_gemm_rate",
    "Operations per second of a plain matrix product of the tower's size, measured at start",
    ["model"],
    multiprocess_mode="livemax",
)
CACHE_OPERATIONS = Counter("lookonce_cache_operations", "Cache operations by outcome", ["operation", "outcome"])
LOCAL_BYTES = Gauge("lookonce_local_tier_bytes", "Records in this node's shared memory", multiprocess_mode="mostrecent")
ENCODER_DEATHS = Counter("lookonce_encoder_deaths", "Images in work when their encoder process died", ["model"])
QUARANTINED = Counter("lookonce_quarantined", "Refusals of images in quarantine", ["model"])
RESUBMITTED = Counter("lookonce_resubmitted", "Answers begun again because their replica died", ["model"])
EMBEDDINGS_LOST = Counter("lookonce_embeddings_lost", "Entries that vanished before their use", ["model"])


def start_at_zero(model: str) -> None:
    """Shows counters of rare events from the start, so that their first one is a step that alerts can see."""
    for counter in (ENCODER_DEATHS, QUARANTINED, RESUBMITTED, EMBEDDINGS_LOST):
        counter.labels(model)


def render() -> tuple[bytes, str]:
    """All processes' metrics in Prometheus's text format, and its content type."""
    registry = CollectorRegistry()
    if os.environ.get(MULTIPROC_DIR):
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST
    return generate_latest(), CONTENT_TYPE_LATEST
