"""``/v1/embeddings``: features and summaries of an encoder alone, against transformers' own model."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from openai import OpenAI
from safetensors.torch import load
from transformers import RadioModel

from shared.config import AccessSettings
from tests.api.conftest import MODEL, serving
from tests.api.test_uploads import as_url, encoded, png
from tests.encoder_service.conftest import relative_error
from tests.shared.picture_files import Image, patches, save
from tools.checkpoints.radio import write_radio

#: width and height; the position table was made for 128 pixels, so none of them is resized
SIZES = [(96, 64), (64, 128), (128, 128)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_radio(tmp_path_factory.mktemp("radio"), "native")


@pytest.fixture(scope="module")
def features(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("redis"), AccessSettings(), checkpoint) as url:
        yield url


@pytest.fixture(scope="module")
def summaries(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("redis"), AccessSettings(), checkpoint, "summary") as url:
        yield url


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    return [patches(*size) for size in SIZES]


@pytest.fixture(scope="module")
def truth(checkpoint: Path, pictures: list[np.ndarray]) -> list[Any]:
    """Of transformers, whose normalisation is inside the model."""
    model = RadioModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    pixels = [torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255 for picture in pictures]
    with torch.inference_mode():
        return [model(F.interpolate(one, size=one.shape[2:], mode="bilinear")) for one in pixels]


def urls(pictures: list[np.ndarray]) -> list[str]:
    return [as_url(save(Image.fromarray(picture), "PNG")) for picture in pictures]


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/embeddings", json={"model": MODEL} | body, timeout=60)


def test_features_equal_transformers_in_every_format(
    features: str, pictures: list[np.ndarray], truth: list[Any]
) -> None:
    body = ask(features, input=urls(pictures)).json()
    file = ask(features, input=urls(pictures), encoding_format="safetensors")
    tensors = load(file.content)
    client = OpenAI(base_url=f"{features}/v1", api_key="unused", max_retries=0)
    official = client.embeddings.create(model=MODEL, input=urls(pictures))  # asks for base64 by itself
    for index, ((width, height), out) in enumerate(zip(SIZES, truth, strict=True)):
        entry = body["data"][index]
        assert entry["index"] == index
        assert entry["shape"] == [height // 8, width // 8, 64] == list(tensors[str(index)].shape)
        values = torch.tensor(entry["embedding"]).view(entry["shape"])
        assert torch.equal(values, tensors[str(index)])
        assert torch.equal(values.flatten(), torch.tensor(official.data[index].embedding))
        assert relative_error(values.flatten(0, 1), out.features[0]) <= 1e-5
    assert body["usage"]["prompt_tokens"] == sum(width * height // 64 for width, height in SIZES)
    again = ask(features, input=urls(pictures)).json()["usage"]
    assert again["cached_image_tokens"] == again["prompt_tokens"] == official.usage.prompt_tokens


def test_summaries_equal_transformers(summaries: str, pictures: list[np.ndarray], truth: list[Any]) -> None:
    """One row a picture, alone and beside others, from the encoder and from the cache."""
    alone = ask(summaries, input=urls(pictures)[0]).json()["data"]
    together = ask(summaries, input=urls(pictures)).json()
    for index, out in enumerate(truth):
        entry = together["data"][index]
        assert entry["shape"] == [2 * 64]
        assert relative_error(torch.tensor(entry["embedding"]), out.summary[0]) <= 1e-5
    assert alone[0]["embedding"] == together["data"][0]["embedding"]
    assert together["usage"] == {"prompt_tokens": 3, "total_tokens": 3, "cached_image_tokens": 1}
    form = ask(summaries, input=urls(pictures)[0], encoding_format="base64").json()["data"][0]
    values = np.frombuffer(base64.b64decode(form["embedding"]), "<f4")
    assert values.tolist() == alone[0]["embedding"]


def test_pictures_sent_ahead(features: str, summaries: str) -> None:
    for url, rows in ((features, 7 * 10), (summaries, 1)):
        with httpx.Client(base_url=url, timeout=60) as client:
            data = png(1)  # 80 × 60, so 10 × 7 or 8 patches of 8
            body = encoded(client, data)
        named = ask(url, input={"url": body["id"]}).json()
        assert named["data"] == ask(url, input=as_url(data)).json()["data"]
        assert named["usage"]["cached_image_tokens"] == body["tokens"] in (rows, 8 * 10)


def test_an_encoder_alone_says_so(features: str) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    answer = httpx.post(f"{features}/v1/chat/completions", json=chat)
    assert answer.status_code == 400
    assert "/v1/embeddings" in answer.json()["error"]["message"]
    assert httpx.get(f"{features}/readyz").status_code == 200
    (model,) = httpx.get(f"{features}/v1/status").json()["models"]
    assert model["language"] is None


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"input": "a cat"}, 400, "image 0"),
        ({"input": []}, 400, "input"),
        ({"input": ["data:,", "data:image/png;base64,aGVsbG8="]}, 400, "image"),
        ({"input": [1, 2]}, 400, "input"),
        ({"input": None}, 400, "input"),
        ({"encoding_format": "int8"}, 400, "encoding_format"),
        ({"model": "nobody"}, 404, MODEL),
        ({"input": "lookonce://" + 64 * "a"}, 404, "not in the cache"),
    ],
)
def test_wrong_requests(features: str, change: dict[str, Any], status: int, word: str) -> None:
    answer = ask(features, **({"input": as_url(png(2))} | change))
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_a_chat_models_embeddings_are_each_tenants_own(alice: httpx.Client, bob: httpx.Client) -> None:
    """What its language model gets; one tenant's question leaves no hit for another's."""
    body = {"model": MODEL, "input": [as_url(png(3))]}
    mine, again, theirs = (client.post("/v1/embeddings", json=body).json() for client in (alice, alice, bob))
    rows, columns, width = mine["data"][0]["shape"]
    assert rows * columns == mine["usage"]["prompt_tokens"]
    assert len(mine["data"][0]["embedding"]) == rows * columns * width
    assert mine["data"] == again["data"] == theirs["data"]
    cached = [answer["usage"]["cached_image_tokens"] for answer in (mine, again, theirs)]
    assert cached == [0, rows * columns, 0]
