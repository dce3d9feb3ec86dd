"""Spans of two processes meet in one trace at a real collector; without a setting there is nothing."""

from __future__ import annotations

import subprocess
import sys

from tests.shared.otlp import collecting

#: a process that works for another one's request
WORKER = """
import sys, time
from shared import tracing
from shared.config import TelemetrySettings
endpoint, parent, ratio = sys.argv[1:]
tracing.configure(TelemetrySettings(otlp_endpoint=endpoint or None, sample_ratio=float(ratio)), "worker")
with tracing.span("request", parent=parent or None, size=3) as work:
    with tracing.span("inner"):
        tracing.past("before", 0.5)
    carried = tracing.carried()
    assert carried == work.traceparent
    with tracing.detached("generate", parent=carried) as apart:
        apart.past("prefill", 0.25, until=1000.0)
    work.rename("renamed")
print(carried)
if not endpoint:
    assert not [name for name in sys.modules if name.startswith("opentelemetry")], "nothing is even imported"
"""
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def run(endpoint: str, parent: str = "", ratio: float = 1.0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, endpoint, parent, str(ratio)], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_spans_go_on_with_the_callers_trace() -> None:
    with collecting() as collector:
        assert run(collector.url, f"00-{TRACE}-{CALLER}-01").startswith(f"00-{TRACE}-")
        found = {span.name: span for span in collector.spans}
    assert set(found) == {"renamed", "inner", "before", "generate", "prefill"}
    assert {span.trace for span in found.values()} == {TRACE}
    assert found["renamed"].parent == CALLER
    assert found["inner"].parent == found["generate"].parent == found["renamed"].id
    assert found["before"].parent == found["inner"].id
    assert found["prefill"].parent == found["generate"].id
    assert (found["prefill"].begin, found["prefill"].end) == (999.75, 1000.0)
    assert abs(found["before"].end - found["before"].begin - 0.5) < 1e-3
    assert found["renamed"].attributes == {"size": 3}
    assert all(span.process.startswith("worker-") for span in found.values())


def test_a_client_that_does_not_sample_is_not_sampled() -> None:
    with collecting() as collector:
        run(collector.url, f"00-{TRACE}-{CALLER}-00")
        run(collector.url, ratio=0.0)
        assert collector.spans == []


def test_without_an_endpoint_nothing_is_sent_or_imported() -> None:
    assert run("") == "None"
