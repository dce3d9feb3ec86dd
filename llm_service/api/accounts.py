"""What metrics learn of a request: how it ended, how long it took, and where its images came from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llm_service.messages import EngineUsage
from shared import metrics
from shared.errors import LookonceError
from shared.items import VisionItem

#: nginx's number for a client that left; no client sees it
CLIENT_LEFT = 499


@dataclass
class Outcome:
    """Of one request.

    Attributes:
        model: once it is known to exist: no stranger's string becomes a label.
        status: of the response.
    """

    model: str = ""
    status: int = 500


@contextmanager
def measured(route: str) -> Iterator[Outcome]:
    """Counts and times a request; the block fills in its outcome, errors do by themselves."""
    begin, outcome = time.perf_counter(), Outcome()
    try:
        yield outcome
    except LookonceError as error:
        outcome.status = error.status
        raise
    except asyncio.CancelledError:
        outcome.status = CLIENT_LEFT
        raise
    finally:
        metrics.REQUESTS.labels(route, outcome.model, str(outcome.status)).inc()
        metrics.REQUEST_SECONDS.labels(route, outcome.model).observe(time.perf_counter() - begin)


def observe_images(model: str, items: Sequence[VisionItem]) -> None:
    """Counts a request's images by source, and their stages."""
    for item in items:
        source = "cache" if item.cached else "encoder"
        metrics.IMAGES.labels(model, source).inc()
        metrics.IMAGE_TOKENS.labels(model, source).inc(item.tokens)
        for stage, seconds in item.timings.items():
            metrics.STAGE_SECONDS.labels(model, stage).observe(seconds)


def observe_engine(model: str, usage: EngineUsage) -> None:
    """Counts the engine's stages."""
    for stage, seconds in usage.timings.items():
        metrics.STAGE_SECONDS.labels(model, f"engine_{stage}").observe(seconds)
