"""Files and batches with the official client, over real engines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, ConflictError, NotFoundError, OpenAI
from openai.types import Batch

from tests.api.conftest import KEYS, MODEL
from tests.api.test_uploads import as_url, png

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(name: str, endpoint: str = CHAT, **body: Any) -> dict[str, Any]:
    if endpoint == CHAT:
        body = {"messages": [{"role": "user", "content": "hello"}]} | body
    asked = {"model": MODEL, "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": endpoint, "body": asked}


def jsonl(*lines: dict[str, Any] | str) -> bytes:
    return "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines).encode()


def create(client: OpenAI, content: bytes, endpoint: str = CHAT, window: str = "24h", **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **more)


def ended(client: OpenAI, batch: Batch, seconds: float = 120) -> Batch:
    deadline = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


def rows(client: OpenAI, name: str | None) -> dict[str, dict[str, Any]]:
    """Lines of an output file by custom_id, each there once."""
    if name is None:
        return {}
    found = [json.loads(text) for text in client.files.content(name).text.splitlines()]
    by_id = {row["custom_id"]: row for row in found}
    assert len(by_id) == len(found)
    return by_id


@pytest.fixture
def other(url: str) -> Iterator[OpenAI]:
    yield OpenAI(base_url=f"{url}/v1", api_key=KEYS["bob"], max_retries=0)


def test_the_batch_workflow_of_the_official_client(openai: OpenAI) -> None:
    picture = {"type": "image_url", "image_url": {"url": as_url(png(30))}}
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    ask = {"type": "text", "text": "Describe the picture."}
    content = jsonl(
        line("text"),
        line("picture", messages=[{"role": "user", "content": [picture, ask]}]),
        line("broken", messages=[{"role": "user", "content": [broken, ask]}]),
        line("nobody", model="gpt-5"),
        line("stream", stream=True),
        line("hot", temperature="hot"),
        "",
    )
    batch = create(openai, content, metadata={"night": "1"})
    assert batch.status in ("validating", "in_progress")
    batch = ended(openai, batch)
    assert batch.status == "completed"
    assert batch.metadata == {"night": "1"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 2, 4)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at <= batch.expires_at
    answers, errors = rows(openai, batch.output_file_id), rows(openai, batch.error_file_id)
    assert answers.keys() == {"text", "picture"}
    direct = openai.chat.completions.create(**line("x")["body"])
    assert answers["text"]["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    assert answers["picture"]["response"]["status_code"] == 200
    assert answers["picture"]["response"]["body"]["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    assert batch.usage.output_tokens == sum(
        a["response"]["body"]["usage"]["completion_tokens"] for a in answers.values()
    )
    told = {name: (e["response"]["status_code"], e["response"]["body"]["error"]["code"]) for name, e in errors.items()}
    assert told == {
        "broken": (400, "bad_image"),
        "nobody": (404, "model_not_found"),
        "stream": (400, "invalid_request"),
        "hot": (400, "invalid_request"),
    }
    assert openai.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_plain_completions(openai: OpenAI) -> None:
    content = jsonl(*(line(str(n), TEXT, prompt=f"Row {n}:") for n in range(5)))
    batch = ended(openai, create(openai, content, TEXT))
    assert rows(openai, batch.output_file_id).keys() == {str(n) for n in range(5)}
    assert batch.error_file_id is None


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (jsonl(line("a"), "{"), "invalid_json_line", 2),
        (jsonl(line("a"), "[]"), "invalid_type", 2),
        (jsonl(line("a"), line("a")), "duplicate_custom_id", 2),
        (jsonl(line("a", TEXT, prompt="x")), "mismatched_endpoint", 1),
        (jsonl(line("a") | {"method": "GET"}), "invalid_method", 1),
        (jsonl(line("a") | {"custom_id": 1}), "invalid_type", 1),
        (jsonl(line("")), "invalid_custom_id", 1),
        (jsonl({"method": "POST", "url": CHAT, "body": {}}), "missing_required_parameter", 1),
        (b"\n\n", "empty_file", None),
        (b"\xff\xfe\x00", "invalid_json_line", 1),
    ],
)
def test_input_that_is_no_batch(openai: OpenAI, content: bytes, code: str, number: int | None) -> None:
    batch = ended(openai, create(openai, content))
    assert batch.status == "failed"
    (fault,) = batch.errors.data
    assert (fault.code, fault.line) == (code, number)
    assert batch.output_file_id is batch.error_file_id is None


def test_a_cancelled_batch_accounts_for_every_line(openai: OpenAI) -> None:
    slow = {"max_tokens": 300, "ignore_eos": True}
    batch = create(openai, jsonl(*(line(str(n), **slow) for n in range(60))))
    while openai.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.02)
    assert openai.batches.cancel(batch.id).status == "cancelling"
    batch = ended(openai, batch)
    assert batch.status == "cancelled"
    answers, errors = rows(openai, batch.output_file_id), rows(openai, batch.error_file_id)
    assert not answers.keys() & errors.keys()
    assert answers.keys() | errors.keys() == {str(n) for n in range(60)}
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    assert all(row["response"] is None for row in errors.values())
    with pytest.raises(ConflictError):
        openai.batches.cancel(batch.id)


def test_a_batch_expires(openai: OpenAI) -> None:
    slow = {"max_tokens": 400, "ignore_eos": True}
    batch = create(openai, jsonl(*(line(str(n), **slow) for n in range(100))), window="1s")
    batch = ended(openai, batch)
    assert batch.status == "expired"
    answers, errors = rows(openai, batch.output_file_id), rows(openai, batch.error_file_id)
    assert len(answers) + len(errors) == 100
    assert {row["error"]["code"] for row in errors.values()} == {"batch_expired"}


def test_another_tenant_sees_nothing(openai: OpenAI, other: OpenAI) -> None:
    batch = ended(openai, create(openai, jsonl(line("a"))))
    for name in (batch.input_file_id, batch.output_file_id):
        for look in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(NotFoundError):
                look(name)
    for look in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(NotFoundError):
            look(batch.id)
    with pytest.raises(NotFoundError):
        other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert batch.id not in [found.id for found in other.batches.list()]
    assert batch.input_file_id not in [found.id for found in other.files.list()]
    assert openai.files.retrieve(batch.output_file_id).bytes > 0


def test_lists_come_in_pages(openai: OpenAI) -> None:
    made = [openai.files.create(file=(f"{n}.jsonl", jsonl(line(str(n)))), purpose="batch").id for n in range(5)]
    first = openai.files.list(limit=2, order="desc", purpose="batch")
    assert ([file.id for file in first.data], first.has_more) == (made[:2:-1], True)
    assert [file.id for file in first][:5] == made[::-1]
    for name in made:
        assert openai.files.delete(name).deleted
    with pytest.raises(NotFoundError):
        openai.files.retrieve(made[0])
    batches = [create(openai, jsonl(line("a"))).id for _ in range(3)]
    assert [batch.id for batch in openai.batches.list(limit=2)][:3] == batches[::-1]


def test_a_file_in_use_stays(openai: OpenAI) -> None:
    batch = create(openai, jsonl(*(line(str(n), max_tokens=200, ignore_eos=True) for n in range(40))))
    with pytest.raises(ConflictError):
        openai.files.delete(batch.input_file_id)
    openai.batches.cancel(batch.id)
    ended(openai, batch)
    assert openai.files.delete(batch.input_file_id).deleted


@pytest.mark.parametrize("name", ["..", "file-" + 32 * "0", "file-x", "%2e%2e%2fmeta.json", "batch_" + 32 * "0"])
def test_names_that_are_none(alice: httpx.Client, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        assert alice.get(path).status_code in (404, 405)


def test_wrong_requests(openai: OpenAI, alice: httpx.Client) -> None:
    file = openai.files.create(file=("a", jsonl(line("a"))), purpose="batch")
    for change in ({"endpoint": "/v1/embeddings"}, {"completion_window": "soon"}, {"metadata": {"a": 1}}):
        asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | change
        with pytest.raises(BadRequestError):
            openai.post("/batches", body=asked, cast_to=object)
    with pytest.raises(BadRequestError):
        openai.files.create(file=("a", b"x"), purpose="fine-tune")
    with pytest.raises(BadRequestError):
        openai.files.create(file=("a", b""), purpose="batch")
    assert alice.post("/v1/files", files={"file": ("a", b"x")}).status_code == 400
