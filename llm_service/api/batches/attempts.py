"""One line of a batch: tried again while the service is at fault, refused when the line is."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from typing import Any, Protocol

from llm_service.api.access import Tenant
from llm_service.api.batches.lines import answered, refused
from shared.errors import Busy, LookonceError, RequestError

#: of a line that the service fails on; about four minutes with the pauses between
MAX_ATTEMPTS = 10
#: longest pause between two, seconds
MAX_PAUSE = 30.0


class Answer(Protocol):
    """Answers one request as its endpoint would, whole."""

    async def __call__(self, endpoint: str, body: bytes, tenant: Tenant, request: str) -> dict[str, Any]:
        """The response's body; raises what the endpoint would have answered."""


async def attempt(answer: Answer, endpoint: str, raw: bytes, tenant: Tenant) -> tuple[dict[str, Any], bool]:
    """Answers a line.

    Args:
        answer: answers its body.
        endpoint: of the batch.
        raw: the line, checked before.
        tenant: whose it is.

    Returns:
        Its row, and whether that belongs into the error file.
    """
    line = await asyncio.to_thread(json.loads, raw)
    custom, request = line["custom_id"], secrets.token_hex(16)
    body = await asyncio.to_thread(lambda: json.dumps(line["body"]).encode())
    tries = 0
    while True:
        try:
            return answered(custom, request, await answer(endpoint, body, tenant, request)), False
        except RequestError as error:
            return refused(custom, request, error), True
        except LookonceError as error:
            tries += not isinstance(error, Busy)  # a full queue empties, a fault may not go away
            if tries >= MAX_ATTEMPTS:
                return refused(custom, request, error), True
        pause = min(MAX_PAUSE, 0.5 * 2**tries)
        await asyncio.sleep(pause * random.uniform(0.7, 1.3))
