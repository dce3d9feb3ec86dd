"""A small HTTP client for the command line: files in, answers with their report out."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shared.errors import BadImage, LookonceError, Unavailable

#: environment variable with the API key, for services that want one
KEY_VARIABLE = "LOOKONCE_API_KEY"


@dataclass(frozen=True)
class Answer:
    """One answer of the service.

    Attributes:
        text: what the model said.
        finish_reason: ``stop`` or ``length``.
        usage: OpenAI's usage, with image tokens.
        report: the ``lookonce`` part: images with source and timings, timings of the engine.
    """

    text: str
    finish_reason: str
    usage: dict[str, Any]
    report: dict[str, Any]


def data_url(path: Path) -> str:
    """A file as a data URL; the service looks at the bytes, not at the declared type.

    Raises:
        BadImage: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadImage(f"cannot read {path}: {error.strerror}") from error
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def key_headers() -> dict[str, str]:
    """The header with the API key of ``LOOKONCE_API_KEY``; none if that is not set."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


class Client:
    """Talks to one endpoint, with the API key of ``LOOKONCE_API_KEY`` if that is set.

    Args:
        url: base URL, without ``/v1``.
        timeout: seconds for one request.
        connections: parallel requests at most.
    """

    def __init__(self, url: str, timeout: float = 300.0, connections: int = 64) -> None:
        limits = httpx.Limits(max_connections=connections)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=timeout, limits=limits, trust_env=False, headers=key_headers()
        )
        self._url = url

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Name of the first model served.

        Raises:
            Unavailable: nobody answers at this URL.
        """
        body = await self._send("GET", "/v1/models", None)
        name: str = body["data"][0]["id"]
        return name

    async def ask(self, model: str, images: Sequence[str], question: str, **sampling: Any) -> Answer:
        """One question about images given as URLs.

        Raises:
            LookonceError: the service's own sentence.
        """
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
        body = {"model": model, "messages": [message], "temperature": 0, "timings": True, **sampling}
        answer = await self._send("POST", "/v1/chat/completions", body)
        choice = answer["choices"][0]
        return Answer(choice["message"]["content"], choice["finish_reason"], answer["usage"], answer["lookonce"])

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise Unavailable(f"no answer from {self._url}: {type(error).__name__}") from error
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise Unavailable(f"{self._url} answered {response.status_code} without JSON") from error
        if response.status_code != httpx.codes.OK:
            failed = LookonceError(answer.get("error", {}).get("message", str(answer)))
            failed.status = response.status_code
            raise failed
        return answer
