"""Several models in one application, each with its own pools: two that chat, and an encoder alone."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lookonce.service import running
from shared.config import ModelSettings, Settings, load_settings
from tests.service.conftest import ROOT, image_part, random_png, sample_url, service_settings, text_part, user
from tests.service.failures.victims import TITLES, eventually, victims
from tests.shared.picture_files import patches, save
from tools.checkpoints.radio import write_radio

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ISAAC, PIXTRAL, RADIO = "lookonce-demo", "lookonce-demo-pixtral", "radio"


def side_by_side(folder: Path) -> Settings:
    settings = service_settings()
    (pixtral,) = load_settings(ROOT / "configs" / "demo-pixtral.yaml").models
    alone = ModelSettings(name=RADIO, checkpoint=write_radio(folder, "native"))
    return settings.model_copy(update={"models": (*settings.models, pixtral, alone)})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(side_by_side(tmp_path_factory.mktemp("radio"))) as base:
        yield base


def ask(url: str, model: str, picture: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": user(image_part(picture), text_part("Describe the picture.")), "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body | more, timeout=120)
    assert response.status_code == httpx.codes.OK, response.text
    found: dict[str, Any] = response.json()
    return found


def fresh(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(random_png(seed)).decode()


def from_cache(answer: dict[str, Any]) -> bool:
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_image_tokens"] in (0, details["image_tokens"])
    return bool(details["cached_image_tokens"])


def test_every_model_is_listed_with_its_pools(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
    assert [model["id"] for model in listed] == [ISAAC, PIXTRAL, RADIO]
    status = {model["name"]: model for model in httpx.get(f"{url}/v1/status", timeout=30).json()["models"]}
    assert [status[name]["encoder"]["replicas"] for name in (ISAAC, PIXTRAL, RADIO)] == [{"RUNNING": 1}] * 3
    assert [status[name]["language"]["replicas"] for name in (ISAAC, PIXTRAL)] == [{"RUNNING": 1}] * 2
    assert status[RADIO]["language"] is None
    assert httpx.get(f"{url}/readyz", timeout=30).status_code == httpx.codes.OK
    unknown = httpx.post(f"{url}/v1/chat/completions", json={"model": "other", "messages": user(text_part("?"))})
    assert unknown.status_code == httpx.codes.NOT_FOUND


def test_each_answers_with_its_own_halves_at_the_same_time(url: str, samples: list[tuple[Path, str]]) -> None:
    asked = [(model, path, truth) for path, truth in samples for model in (ISAAC, PIXTRAL)]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda one: ask(url, one[0], sample_url(one[1])), asked))
    for model in (ISAAC, PIXTRAL):
        mine = [(a, truth) for a, (name, _, truth) in zip(answers, asked, strict=True) if name == model]
        assert {answer["model"] for answer, _ in mine} == {model}
        right = sum(answer["choices"][0]["message"]["content"] == truth for answer, truth in mine)
        assert right >= len(samples) - 1, f"{model}: {right} of {len(samples)}"


def test_no_model_finds_anothers_embedding_of_a_picture(url: str) -> None:
    picture = fresh(1)
    assert [from_cache(ask(url, ISAAC, picture)) for _ in range(2)] == [False, True]
    assert [from_cache(ask(url, PIXTRAL, picture)) for _ in range(2)] == [False, True]
    assert from_cache(ask(url, ISAAC, picture))


def test_an_encoder_alone_beside_them_gives_embeddings_and_no_chat(url: str) -> None:
    from PIL import Image

    picture = save(Image.fromarray(patches(128, 128)), "PNG")
    address = "data:image/png;base64," + base64.b64encode(picture).decode()
    good = httpx.post(f"{url}/v1/embeddings", json={"model": RADIO, "input": [address]}, timeout=60)
    assert good.status_code == httpx.codes.OK, good.text
    body = {"model": RADIO, "messages": user(text_part("Hello."))}
    refused = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert 400 <= refused.status_code < 500


def test_the_loss_of_one_models_pools_is_no_matter_to_the_other(url: str) -> None:
    """Its pictures wait for nobody's restart but their own."""
    killed = [pid for role in ("encoder", "language") for pid in of_model(role, ISAAC)]
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    answer = ask(url, PIXTRAL, fresh(2), max_tokens=4)
    assert not from_cache(answer)
    unready = httpx.get(f"{url}/readyz", timeout=30)
    assert unready.status_code == httpx.codes.SERVICE_UNAVAILABLE, "the lost pools are not back yet"
    assert PIXTRAL not in unready.text
    eventually(lambda: httpx.get(f"{url}/readyz", timeout=30).status_code == httpx.codes.OK, 120, "it is back")
    assert ask(url, ISAAC, fresh(3), max_tokens=4)["choices"][0]["message"]["content"]


def of_model(role: str, model: str) -> list[int]:
    """Replicas of one model's pool; one model's name begins with another's."""
    import psutil

    def name(pid: int) -> str:
        return " ".join(psutil.Process(pid).cmdline()).split(TITLES[role])[-1].split(".")[0].split()[0]

    return [pid for pid in victims(role) if name(pid) == model]
