"""D1, D2, D3, D5–D8, D10, D11, D13, H1, H4, H20: odd and hostile pictures over HTTP, each answered as it should be."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from PIL import Image

from tests.service import odd_images, processes
from tests.service.conftest import MODEL, text_part, user

HEAP = re.compile(r"0x[0-9a-f]{6,}|object at|BytesIO|Traceback|base64,[A-Za-z0-9+/]{80}", re.IGNORECASE)
#: of any replica's peak over all cases, bytes
GROWTH = 300e6
ASK = text_part("Describe the picture.")
Samples = list[tuple[Path, str]]

logger = logging.getLogger(__name__)


def chat(client: httpx.Client, *parts: Any, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": user(*parts, ASK), "max_tokens": 1} | more
    return client.post("/v1/chat/completions", json=body)


def fault(answer: httpx.Response, code: str | None, name: str) -> str | None:
    """What is wrong with an answer; None for nothing."""
    if code is None:
        return None if answer.status_code == 200 else f"{name}: {answer.status_code} {answer.text[:200]}"
    if answer.status_code != 400:
        return f"{name}: {answer.status_code} {answer.text[:200]}"
    error = answer.json()["error"]
    if error["code"] != code or error["type"] != "invalid_request_error" or HEAP.search(error["message"]):
        return f"{name}: {error}"
    if code != odd_images.WRONG and "image 0" not in error["message"]:
        return f"{name}: does not say which image: {error}"
    return None


@pytest.mark.timeout(900)
def test_every_odd_picture_has_its_answer_at_bounded_cost(service: str) -> None:
    cases = odd_images.accepted() | odd_images.refused()
    assert len(cases) >= 100
    good = odd_images.accepted()["PNG"][0]
    with httpx.Client(base_url=service, timeout=120) as client:
        assert chat(client, good).status_code == 200
        before = processes.resident()
        processes.forget_peaks()
        faults = []
        for name, (part, code) in cases.items():
            answers = [chat(client, part)] if code is None else [chat(client, part), chat(client, part, stream=True)]
            faults += [fault(answer, code, name) for answer in answers]
            if code is not None and (after := chat(client, good)).status_code != 200:
                faults.append(f"the request after {name}: {after.text[:200]}")
        assert not list(filter(None, faults)), "\n".join(filter(None, faults))
        after = processes.peaks()
    assert after.keys() == before.keys(), "a process died"
    grown = {name: after[name] - before[name] for name in before}
    logger.warning("%d cases; growth of peaks, MB: %s", len(cases), {n: round(g / 1e6) for n, g in grown.items()})
    assert max(grown.values()) < GROWTH, grown


def test_the_broken_one_of_two_is_named(service: str) -> None:
    """H20: nothing is dropped in silence."""
    good, bad = odd_images.accepted()["PNG"][0], odd_images.refused()["half of a PNG"][0]
    with httpx.Client(base_url=service, timeout=60) as client:
        error = chat(client, good, bad).json()["error"]
    assert error["code"] == "bad_image"
    assert "image 1" in error["message"]
    assert error["param"] == "messages.image_url[1]"


@pytest.mark.parametrize("number", [0, 3])
def test_every_variant_of_a_picture_has_its_right_answer(client: OpenAI, samples: Samples, number: int) -> None:
    """D1, D2, D3, D5, D6: turned, in a palette, transparent, in 16 bits, for print, moving: the answer is the same."""
    path, truth = samples[number]
    with Image.open(path) as image:
        variants = odd_images.variants(image.convert("RGB"))
    wrong, sizes = {}, set()
    for name, data in variants.items():
        answer = client.chat.completions.create(model=MODEL, messages=user(odd_images.part(data), ASK), temperature=0)
        sizes.add(answer.usage.prompt_tokens)
        if answer.choices[0].message.content != truth:
            wrong[name] = answer.choices[0].message.content
    assert not wrong
    assert len(sizes) == 1
