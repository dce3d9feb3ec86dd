"""A service whose encoders crash over one picture, whose replicas are killed, and which must go on answering."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from encoder_service.deployment import EncoderReplica
from lookonce import application
from lookonce.service import running
from shared.items import VisionItem
from tests.service.conftest import MODEL, image_part, random_png, service_settings, text_part, user

#: after the end of a picture's file, where no decoder looks
POISON = b"the encoder dies over this picture"


class CrashingEncoder(EncoderReplica):
    """The real replica, whose process is killed as soon as it gets a poisoned file."""

    async def encode(
        self,
        data: bytes,
        request_id: str,
        salt: str | None,
        inline: bool,
        again: bool,
        batch: bool = False,
        trace: str | None = None,
    ) -> VisionItem:
        if data.endswith(POISON):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().encode(data, request_id, salt, inline, again, batch, trace)


@dataclass
class Faulty:
    """A running service and how to ask it."""

    url: str

    def ask(self, data: bytes, text: str = "Describe the picture.", **more: Any) -> httpx.Response:
        """One question about one picture."""
        return httpx.post(f"{self.url}/v1/chat/completions", json=question(data, text, **more), timeout=130)

    def text(self, data: bytes, text: str = "Describe the picture.", **more: Any) -> str:
        """The answer, which must be one."""
        response = self.ask(data, text, **more)
        assert response.status_code == httpx.codes.OK, response.text
        content: str = response.json()["choices"][0]["message"]["content"]
        return content


def question(data: bytes, text: str = "Describe the picture.", **more: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"model": MODEL, "messages": user(image_part(url), text_part(text)), "temperature": 0} | more


def poisoned(seed: int) -> bytes:
    return random_png(seed) + POISON


@pytest.fixture(scope="module")
def faulty() -> Iterator[Faulty]:
    patch = pytest.MonkeyPatch()
    patch.setattr(application, "EncoderReplica", CrashingEncoder)
    settings = service_settings(images={"quarantine_seconds": 60.0})
    (model,) = settings.models
    encoder = model.encoder.model_copy(update={"min_replicas": 2, "max_replicas": 2})
    settings = settings.model_copy(update={"models": (model.model_copy(update={"encoder": encoder}),)})
    try:
        with running(settings) as url:
            yield Faulty(url)
    finally:
        patch.undo()
