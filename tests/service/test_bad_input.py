"""Bad input gets a clear 4xx in OpenAI's error shape and leaves the service healthy."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.service.conftest import MODEL, image_part, random_png, text_part, user


def jpeg(width: int = 64, height: int = 64) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(random_png(3, width, height))).save(buffer, "JPEG")
    return buffer.getvalue()


def bomb() -> bytes:
    """A PNG of a few kilobytes that declares 20000 × 20000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = (20000).to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    rows = zlib.compress(b"\0" * 2501 * 20000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def data(content: bytes) -> dict[str, Any]:
    return image_part("data:image/png;base64," + base64.b64encode(content).decode())


QUESTION = text_part("Describe the picture.")
LONG = text_part("red circle " * 3000)
CASES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "not an image": ({"messages": user(data(b"hello"), QUESTION)}, 400, "bad_image", "image 0"),
    "an html page": ({"messages": user(data(b"<html></html>"), QUESTION)}, 400, "bad_image", "image 0"),
    "truncated jpeg": ({"messages": user(data(jpeg()[:-200]), QUESTION)}, 400, "bad_image", ""),
    "half a png": ({"messages": user(data(random_png(4)[:3000]), QUESTION)}, 400, "bad_image", ""),
    "empty image": ({"messages": user(data(b""), QUESTION)}, 400, "bad_image", "image 0"),
    "second of two is broken": (
        {"messages": user(data(random_png(5)), data(b"x"), QUESTION)},
        400,
        "bad_image",
        "image 1",
    ),
    "too many pixels": ({"messages": user(data(bomb()), QUESTION)}, 400, "image_too_large", "image 0"),
    "too many images": (
        {"messages": user(*[data(random_png(6))] * 9, QUESTION)},
        400,
        "too_many_images",
        "at most 8",
    ),
    "no messages": ({"messages": []}, 400, "invalid_request", "messages"),
    "no messages field": ({}, 400, "invalid_request", "messages"),
    "unknown model": ({"model": "gpt-5", "messages": user(QUESTION)}, 404, "model_not_found", MODEL),
    "unknown part": ({"messages": user({"type": "audio", "audio": "x"})}, 400, "invalid_request", "messages"),
    "image url is null": (
        {"messages": user({"type": "image_url", "image_url": None})},
        400,
        "invalid_request",
        "image_url",
    ),
    "bare base64": (
        {"messages": user(image_part(base64.b64encode(random_png(8)).decode()), QUESTION)},
        400,
        "",
        "image 0",
    ),
    "a file on the server": ({"messages": user(image_part("file:///etc/passwd"), QUESTION)}, 400, "", "image 0"),
    "prompt too long": ({"messages": user(LONG)}, 400, "context_length_exceeded", "2048"),
    "answer too long": (
        {"messages": user(QUESTION), "max_tokens": 4000},
        400,
        "context_length_exceeded",
        "max_tokens",
    ),
    "wrong type": ({"messages": user(QUESTION), "temperature": "hot"}, 400, "invalid_request", "temperature"),
    "out of range": ({"messages": user(QUESTION), "top_p": 7}, 400, "invalid_request", "top_p"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_answered_in_words(service: str, name: str, stream: bool) -> None:
    body, status, code, fragment = CASES[name]
    response = httpx.post(f"{service}/v1/chat/completions", json={"model": MODEL, "stream": stream} | body, timeout=60)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code or not code
    assert fragment in error["message"]
    assert " at 0x" not in error["message"]
    healthy = {"model": MODEL, "messages": user(data(random_png(9)), QUESTION), "max_tokens": 2}
    assert httpx.post(f"{service}/v1/chat/completions", json=healthy, timeout=60).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"null"])
def test_bodies_that_are_not_requests(service: str, body: bytes) -> None:
    response = httpx.post(f"{service}/v1/chat/completions", content=body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_above_the_limit_is_refused(service: str) -> None:
    response = httpx.post(f"{service}/v1/chat/completions", content=b"x" * (65 << 20), timeout=60)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"


def test_unknown_routes_and_methods_keep_the_error_shape(service: str) -> None:
    assert httpx.get(f"{service}/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    response = httpx.get(f"{service}/v1/chat/completions")
    assert response.status_code == 405
    assert "error" in response.json()


def test_request_ids_go_in_and_out(service: str) -> None:
    given = httpx.get(f"{service}/healthz", headers={"X-Request-Id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    assert httpx.get(f"{service}/healthz").headers["x-request-id"]
