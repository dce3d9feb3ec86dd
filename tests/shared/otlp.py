"""A collector that takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span as it came over the wire.

    Attributes:
        name: of the span.
        process: ``service.instance.id`` of who sent it, or vLLM's own name.
        trace, id, parent: ids, hex; the parent's is empty at the root.
        begin, end: seconds since the epoch.
        attributes: of the span.
    """

    name: str
    process: str
    trace: str
    id: str
    parent: str
    begin: float
    end: float
    attributes: dict[str, Any]


class Collector:
    """What has come so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Received] = []
        self.headers: list[dict[str, str]] = []

    def take(self, body: bytes) -> None:
        """Reads one export."""
        export = ExportTraceServiceRequest.FromString(body)
        for resource in export.resource_spans:
            about = _values(resource.resource.attributes)
            process = about.get("service.instance.id") or about.get("vllm.instrumenting_module_name", "")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            span.name,
                            str(process),
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano / 1e9,
                            span.end_time_unix_nano / 1e9,
                            _values(span.attributes),
                        )
                    )

    def trace(self, trace: str) -> list[Received]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace == trace]

    def eventually(self, condition: Callable[[], object], seconds: float = 30) -> None:
        """Waits until enough has come."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, sorted((span.name, span.process) for span in self.spans)
            time.sleep(0.1)


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            collector.headers.append(dict(self.headers))
            collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
