"""One request's spans, from four processes, in one trace."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import httpx
import pytest

from lookonce.service import running
from shared.config import TelemetrySettings
from tests.service.conftest import MODEL, image_part, random_png, service_settings, text_part, user
from tests.shared.otlp import Collector, Received, collecting

pytestmark = pytest.mark.slow

CALLER = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[str, Collector]]:
    with collecting() as collector:
        settings = service_settings().model_copy(update={"telemetry": TelemetrySettings(otlp_endpoint=collector.url)})
        with running(settings) as url:
            yield url, collector


def ask(url: str, trace: str, seed: int, **more: object) -> None:
    picture = "data:image/png;base64," + base64.b64encode(random_png(seed)).decode()
    body = {"model": MODEL, "messages": user(image_part(picture), text_part("Describe the picture.")), "max_tokens": 8}
    headers = {"traceparent": f"00-{trace}-{CALLER}-01", "X-Request-Id": f"traced-{seed}"}
    response = httpx.post(f"{url}/v1/chat/completions", json=body | more, headers=headers, timeout=120)
    assert response.status_code == httpx.codes.OK, response.text


def spans(collector: Collector, trace: str, *more: str) -> dict[str, Received]:
    """The spans of a trace by name, once those of all its processes have come, each in its own time."""
    last = {"POST /v1/chat/completions", "generate", "llm_request", "cache.get", *more}
    collector.eventually(lambda: last <= {span.name for span in collector.trace(trace)})
    return {span.name: span for span in collector.trace(trace)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_new_picture_leaves_a_span_of_every_step_in_every_process(
    traced: tuple[str, Collector], stream: bool
) -> None:
    url, collector = traced
    trace = f"{1 + stream:032x}"
    ask(url, trace, 8000 + stream, stream=stream)
    found = spans(collector, trace, "encode")
    parents = {
        "fetch": "POST /v1/chat/completions",
        "hash": "POST /v1/chat/completions",
        "lookup": "POST /v1/chat/completions",
        "encoder": "POST /v1/chat/completions",
        "encode": "encoder",
        "decode": "encode",
        "preprocess": "encode",
        "batch": "encode",
        "queue": "generate",  # the encoder's own is below "batch"
        "forward": "batch",
        "cache.put": "encode",
        "generate": "POST /v1/chat/completions",
        "cache.get": "generate",
        "llm_request": "generate",
        "prefill": "generate",
        "decode_tokens": "generate",
    }
    ids = {span.id: span.name for span in collector.trace(trace)}
    assert found["POST /v1/chat/completions"].parent == CALLER
    assert {(span.name, ids.get(span.parent)) for span in collector.trace(trace)} >= set(parents.items())
    roles = {found[name].process.partition(":")[0].partition("-")[0] for name in ("fetch", "encode", "generate")}
    assert roles == {"ingress", "encoder", "language"}
    for name in ("POST /v1/chat/completions", "encode", "generate"):
        # a language replica's is followed by the number of the try
        assert found[name].attributes["request_id"].startswith(f"traced-{8000 + stream}")
    assert found["POST /v1/chat/completions"].attributes["http.response.status_code"] == 200
    assert found["lookup"].attributes["found"] is False
    assert found["generate"].attributes["completion_tokens"] == 8
    request = found["POST /v1/chat/completions"]
    for name in ("fetch", "encoder", "generate"):
        assert request.begin - 0.01 <= found[name].begin <= found[name].end <= request.end + 0.01, name


def test_a_known_picture_has_no_span_of_the_encoder(traced: tuple[str, Collector]) -> None:
    url, collector = traced
    ask(url, f"{11:032x}", 8100)
    ask(url, f"{12:032x}", 8100)
    found = spans(collector, f"{12:032x}")
    assert found["lookup"].attributes["found"] is True
    assert not {"encoder", "encode", "forward"} & set(found)


def test_nothing_of_what_was_said_or_shown_is_in_a_span(traced: tuple[str, Collector]) -> None:
    _, collector = traced
    assert collector.spans
    for span in collector.spans:
        assert "Describe" not in str(span.attributes)
        assert "base64" not in str(span.attributes)
