"""OpenTelemetry spans of one request across the processes that work for it; without a setting, nothing at all.

The context travels between processes as a W3C ``traceparent``. Only ids, names, sizes and counts go into spans, never
what a request says or shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shared.config import TelemetrySettings
from shared.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

TRACEPARENT = "traceparent"

_tracer: Tracer | None = None


def configure(settings: TelemetrySettings, role: str) -> None:
    """Starts sending this process's spans; the first call in a process counts.

    Args:
        settings: where to, and how many.
        role: what the process is: ``ingress``, ``encoder:NAME``, …

    Raises:
        ConfigError: the packages are not installed.
    """
    global _tracer
    if settings.otlp_endpoint is None or _tracer is not None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        raise ConfigError(f"spans need more packages: pip install 'lookonce[tracing]' ({error})") from error
    resource = Resource.create(
        {"service.name": "lookonce", "service.instance.id": f"{role}-{os.getpid()}", "lookonce.role": role}
    )
    # not the process's global one: vLLM sets that to its own
    provider = TracerProvider(resource=resource, sampler=ParentBasedTraceIdRatio(settings.sample_ratio))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(settings.otlp_endpoint))))
    _tracer = provider.get_tracer("lookonce")


def traces_url(endpoint: str) -> str:
    """Where OTLP over HTTP takes spans."""
    return f"{endpoint.rstrip('/')}/v1/traces"


class Work:
    """A span that runs, or nothing where spans are off.

    Attributes:
        traceparent: by which another process goes on; None where spans are off.
    """

    def __init__(self, span: Span | None = None) -> None:
        self._span = span
        self.traceparent = _inject(_within(span)) if span is not None else None

    def note(self, **attributes: Any) -> None:
        """Adds attributes."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        """For names that are known only at the end."""
        if self._span is not None:
            self._span.update_name(name)

    def past(self, name: str, seconds: float, until: float | None = None) -> None:
        """A span below this one that has ended.

        Args:
            name: of the span.
            seconds: how long it took.
            until: when it ended, seconds since the epoch; None for now.
        """
        if _tracer is None or self._span is None:
            return
        end = time.time() if until is None else until
        span = _tracer.start_span(name, context=_within(self._span), start_time=round((end - seconds) * 1e9))
        span.end(round(end * 1e9))


@contextmanager
def span(name: str, *, parent: str | None = None, **attributes: Any) -> Iterator[Work]:
    """A span for the length of a ``with`` block, above what the block itself starts.

    Args:
        name: of the span.
        parent: another process's ``traceparent``; None takes the span that runs here, or none.
        attributes: of the span.
    """
    if _tracer is None:
        yield Work()
        return
    with _tracer.start_as_current_span(name, context=_extract(parent), attributes=attributes) as current:
        yield Work(current)


@contextmanager
def detached(name: str, *, parent: str | None = None, **attributes: Any) -> Iterator[Work]:
    """The same where the block may end in another task than it began in, as a generator's may: above nothing."""
    if _tracer is None:
        yield Work()
        return
    started = _tracer.start_span(name, context=_extract(parent), attributes=attributes)
    try:
        yield Work(started)
    except Exception as error:
        started.record_exception(error)
        raise
    finally:
        started.end()


def past(name: str, seconds: float, *, parent: str | None = None) -> None:
    """A span that has just ended, below the one that runs here or another process's."""
    if _tracer is not None:
        from opentelemetry.trace import get_current_span

        Work(get_current_span(_extract(parent))).past(name, seconds)


def carried() -> str | None:
    """``traceparent`` of the span that runs here, for another process; None where spans are off."""
    return None if _tracer is None else _inject(None)


def _within(span: Span) -> Context:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _inject(context: Context | None) -> str | None:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier.get(TRACEPARENT)


def _extract(parent: str | None) -> Context | None:
    if parent is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: parent})
