"""Pictures sent ahead, named by their hash, and kept apart by tenant."""

from __future__ import annotations

import base64
import io
import time
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.api.conftest import MODEL, as_tenant

DESCRIBE = {"type": "text", "text": "Describe the picture."}
UNKNOWN = "lookonce://" + 64 * "a"


def png(seed: int) -> bytes:
    """A picture that no other test uses."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng([seed, time.time_ns()]).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def as_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def upload(client: httpx.Client, data: bytes) -> dict[str, Any]:
    answer = client.post("/v1/images", files={"file": ("a.png", data)})
    assert answer.status_code == 200, answer.text
    return answer.json()


def state(client: httpx.Client, name: str) -> str:
    answer = client.get(f"/v1/images/{name}")
    return answer.json()["state"] if answer.status_code == 200 else answer.json()["error"]["code"]


def encoded(client: httpx.Client, data: bytes) -> dict[str, Any]:
    """Uploads and waits."""
    body = upload(client, data)
    deadline = time.monotonic() + 60
    while state(client, body["hash"]) == "encoding":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert state(client, body["hash"]) == "cached"
    return body


def ask(client: httpx.Client, url: str, **more: Any) -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": url, **more}}, DESCRIBE]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 12}
    return client.post("/v1/chat/completions", json=body)


def cached_tokens(answer: httpx.Response) -> tuple[int, int]:
    details = answer.json()["usage"]["prompt_tokens_details"]
    return details["cached_image_tokens"], details["image_tokens"]


def test_an_uploaded_picture_is_asked_about_by_name(alice: httpx.Client) -> None:
    data = png(1)
    body = encoded(alice, data)
    assert (body["width"], body["height"], body["bytes"]) == (80, 60, len(data))
    assert body["id"] == "lookonce://" + body["hash"]
    by_name, by_bytes = ask(alice, body["id"]), ask(alice, as_url(data))
    assert by_name.json()["choices"][0]["message"] == by_bytes.json()["choices"][0]["message"]
    assert cached_tokens(by_name) == cached_tokens(by_bytes) == (body["tokens"], body["tokens"])
    assert upload(alice, data)["state"] == "cached"


def test_another_tenant_finds_nothing(alice: httpx.Client, bob: httpx.Client) -> None:
    data = png(2)
    body = encoded(alice, data)
    nobody = ask(bob, UNKNOWN)
    theirs = ask(bob, body["id"])
    assert theirs.status_code == nobody.status_code == 404
    assert theirs.text.replace(body["hash"], 64 * "a") == nobody.text
    assert state(bob, body["hash"]) == "image_not_found"
    assert bob.delete(f"/v1/images/{body['hash']}").status_code == 404
    assert cached_tokens(ask(bob, as_url(data)))[0] == 0  # no hit tells that alice has it
    assert upload(bob, data)["id"] == body["id"]  # the public name is a hash, the same for all
    assert bob.delete(f"/v1/images/{body['hash']}").status_code == 200
    assert state(alice, body["hash"]) == "cached"


def test_tenants_share_no_prefix(alice: httpx.Client, bob: httpx.Client) -> None:
    """The engine's own prefix cache would tell what others asked."""
    body = {"model": MODEL, "prompt": [index % 200 + 20 for index in range(200)], "max_tokens": 1}

    def prefix_hits(client: httpx.Client) -> int:
        return client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert prefix_hits(alice) == 0
    assert prefix_hits(alice) > 0
    assert prefix_hits(bob) == 0


def test_purged_means_gone(alice: httpx.Client) -> None:
    data = png(3)
    body = encoded(alice, data)
    assert alice.delete(f"/v1/images/{body['hash']}").json()["deleted"] is True
    assert state(alice, body["hash"]) == "image_not_found"
    assert alice.delete(f"/v1/images/{body['hash']}").status_code == 404
    assert ask(alice, body["id"]).json()["error"]["code"] == "image_not_found"
    safe = ask(alice, body["id"], fallback=as_url(data))
    assert safe.status_code == 200
    assert cached_tokens(safe)[0] == 0
    assert state(alice, body["hash"]) == "cached"


def test_a_name_with_a_fallback_needs_no_bytes_when_known(alice: httpx.Client) -> None:
    body = encoded(alice, png(4))
    answer = ask(alice, body["id"], fallback="http://127.0.0.1:1/never-fetched.png")
    assert answer.status_code == 200


def test_a_fallback_is_for_names_only(alice: httpx.Client) -> None:
    """A picture that is sent itself is the one that is seen."""
    data, other = encoded(alice, png(7)), png(8)
    answer = ask(alice, as_url(other), fallback=data["id"])
    assert answer.status_code == 200
    assert cached_tokens(answer)[0] == 0


@pytest.mark.parametrize("name", ["", "x", 63 * "0", 64 * "g", "../" + 61 * "0", 64 * "A"])
def test_what_is_no_hash_is_not_found(alice: httpx.Client, name: str) -> None:
    answer = ask(alice, "lookonce://" + name)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "image_not_found"


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        ({"files": {"file": ("a.png", b"no picture")}}, 400, "bad_image"),
        ({"files": {"file": ("a.png", b"")}}, 400, "bad_image"),
        ({"files": {"other": ("a.png", b"x")}}, 400, "invalid_request"),
        ({"json": {"file": "x"}}, 400, "invalid_request"),
        ({"files": {"file": ("a.png", b"x")}, "data": {"model": "nobody"}}, 404, "model_not_found"),
    ],
)
def test_bad_uploads(alice: httpx.Client, request_: dict[str, Any], status: int, code: str) -> None:
    answer = alice.post("/v1/images", **request_)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_picture_that_only_decoding_shows_to_be_broken(alice: httpx.Client) -> None:
    data = png(5)
    body = upload(alice, data[: len(data) // 2])
    deadline = time.monotonic() + 30
    while state(alice, body["hash"]) == "encoding":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    known = alice.get(f"/v1/images/{body['hash']}").json()
    assert known["state"] == "failed"
    assert known["error"]
    assert alice.delete(f"/v1/images/{body['hash']}").status_code == 200


def test_the_page_is_told_about_images(url: str, alice: httpx.Client) -> None:
    def counts() -> dict[str, float]:
        with as_tenant(url, "operator") as operator:
            return operator.get("/v1/status").json()["models"][0]["images"]

    before, data = counts(), png(6)
    for _ in range(3):
        assert ask(alice, as_url(data)).status_code == 200
    after = counts()
    assert after["encoder"] - before["encoder"] == 1
    assert after["cache"] - before["cache"] == 2
