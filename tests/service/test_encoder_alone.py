"""A service of encoders alone, over HTTP and Ray: features at ``/v1/embeddings``, and each picture looked at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image
from safetensors.torch import load
from transformers import RadioModel

from lookonce.service import running
from shared.config import ModelSettings
from tests.api.test_uploads import as_url
from tests.encoder_service.conftest import relative_error
from tests.service.conftest import service_settings
from tests.shared.picture_files import patches, save
from tools.checkpoints.radio import write_radio

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAME = "radio"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_radio(tmp_path_factory.mktemp("radio"), "native")


@pytest.fixture(scope="module")
def encoders(checkpoint: Path) -> Iterator[str]:
    """Base URL."""
    settings = service_settings()
    encoder = settings.models[0].encoder.model_copy(update={"dtype": "float32"})
    model = ModelSettings(name=NAME, checkpoint=checkpoint, encoder=encoder)
    with running(settings.model_copy(update={"models": (model,)})) as url:
        yield url


def test_features_are_those_of_transformers_and_made_once(encoders: str, checkpoint: Path) -> None:
    pixels = patches(128, 128)
    picture = as_url(save(Image.fromarray(pixels), "PNG"))
    body = {"model": NAME, "input": [picture, picture], "encoding_format": "safetensors"}
    first, second = (httpx.post(f"{encoders}/v1/embeddings", json=body, timeout=60) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200), first.text
    oracle = RadioModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        truth = oracle(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255).features[0]
    for tensors in (load(first.content), load(second.content)):
        for index in ("0", "1"):
            assert relative_error(tensors[index].flatten(0, -2), truth) < 1e-5
    (model,) = httpx.get(f"{encoders}/v1/status", timeout=30).json()["models"]
    assert model["encoder"]["stats"]["images"] == 1
