"""A desk over HTTP: a service that runs somewhere, asked as any client asks it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from llm_service.api.vision import NAMED
from llm_service.captioning.desks import Answer, Messages, Seen
from llm_service.captioning.patience import JobStopped
from llm_service.sampling import SamplingOptions
from shared.errors import Busy, LookonceError, RequestError, Unavailable, UnknownModel
from shared.keys import file_hash

#: seconds for the first question, which tells whether anybody is there
HELLO_SECONDS = 10.0
_UNAUTHORIZED = frozenset({401, 403})


@dataclass(frozen=True)
class _Pending:
    """A picture and the chats about it."""

    name: str
    data: bytes
    chats: Sequence[Messages]
    sampling: SamplingOptions


class HttpDesk:
    """:class:`~llm_service.captioning.desks.Desk` over the chat endpoint.

    The picture travels with the first question; later ones name it by its hash.

    Args:
        address: base URL of the service.
        headers: with the API key.
        model: its name there.
        timeout: of one request, seconds.
    """

    def __init__(self, address: str, headers: Mapping[str, str], model: str, timeout: float) -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=address, headers=dict(headers), timeout=timeout, limits=limits, trust_env=False
        )
        self._model = model

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def look(self, data: bytes, chats: Sequence[Messages], sampling: SamplingOptions) -> Seen:
        """See :class:`~llm_service.captioning.desks.Desk`; the service looks when it is asked."""
        name = file_hash(data)
        return Seen(name, _Pending(name, data, chats, sampling))

    async def answer(self, seen: Seen) -> list[Answer]:
        """See :class:`~llm_service.captioning.desks.Desk`."""
        pending: _Pending = seen.pending
        return [await self._ask(pending, chat, first=not place) for place, chat in enumerate(pending.chats)]

    async def _ask(self, pending: _Pending, chat: Messages, *, first: bool) -> Answer:
        body = {"model": self._model, "messages": _with_picture(chat, pending, first=first), "timings": True}
        try:
            response = await self._http.post("/v1/chat/completions", json=body | _options(pending.sampling))
        except httpx.TransportError as error:
            raise Unavailable(f"no answer from {self._http.base_url}: {type(error).__name__}") from error
        answer = _body(response)
        choice, usage = answer["choices"][0], answer["usage"]
        (image,) = answer["lookonce"]["images"]
        return Answer(
            choice["message"]["content"],
            choice["finish_reason"],
            usage["prompt_tokens"],
            usage["completion_tokens"],
            image["tokens"],
            image["source"] == "cache",
        )


def described(address: str, headers: Mapping[str, str], model: str | None) -> dict[str, Any]:
    """What a service says of a model.

    Args:
        address: base URL of the service.
        headers: with the API key.
        model: name; None takes the first.

    Raises:
        Unavailable: nobody answers there.
        RequestError: the key is not known, or the model.
    """
    try:
        response = httpx.get(f"{address}/v1/models", headers=dict(headers), timeout=HELLO_SECONDS, trust_env=False)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise Unavailable(f"no answer from {address}: {type(error).__name__}") from error
    cards: list[dict[str, Any]] = _body(response)["data"]
    for card in cards:
        if model in (None, card["id"]):
            return card
    raise UnknownModel(f"no model {model!r} at {address}; there is: {', '.join(card['id'] for card in cards)}")


def _with_picture(chat: Messages, pending: _Pending, *, first: bool) -> list[dict[str, Any]]:
    """The chat with its picture's URL filled in."""
    data = f"data:application/octet-stream;base64,{base64.b64encode(pending.data).decode()}"
    url = {"url": data} if first else {"url": f"{NAMED}{pending.name}", "fallback": data}
    filled = []
    for message in chat:
        content = message["content"]
        if isinstance(content, list):
            content = [part | {"image_url": url} if part["type"] == "image_url" else part for part in content]
        filled.append({**message, "content": content})
    return filled


def _options(sampling: SamplingOptions) -> dict[str, Any]:
    """Sampling settings as the chat endpoint takes them."""
    options = sampling.model_dump(mode="json", exclude_defaults=True) | {"temperature": sampling.temperature}
    if (schema := options.pop("json_schema", None)) is not None:
        options["response_format"] = {"type": "json_schema", "json_schema": {"name": "caption", "schema": schema}}
    return options


def _body(response: httpx.Response) -> dict[str, Any]:
    """The JSON of a good answer.

    Raises:
        LookonceError: what the service says, by its status.
    """
    try:
        body: dict[str, Any] = response.json()
    except ValueError as error:
        raise Unavailable(f"{response.url} answered {response.status_code} without JSON") from error
    if response.status_code == httpx.codes.OK:
        return body
    said = str(body.get("error", {}).get("message", body))
    if response.status_code in _UNAUTHORIZED:
        raise JobStopped(f"the service refuses the key: {said}")
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        raise Busy(said)
    if response.is_client_error:
        raise RequestError(said)
    failed = LookonceError(said)
    failed.status = response.status_code
    raise failed
