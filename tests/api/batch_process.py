"""A process that runs the batches of a folder with slow answers, to be killed: python -m tests.api.batch_process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from llm_service.api.access import EVERYBODY, Tenant
from llm_service.api.batches.service import running_batches
from shared.config import BatchSettings
from shared.errors import BadImage

SECONDS = 0.01


async def answer(endpoint: str, body: bytes, tenant: Tenant, request: str) -> dict[str, Any]:
    await asyncio.sleep(SECONDS)
    if b"broken" in body:
        raise BadImage("broken")
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    return {"echo": body.decode(), "usage": usage, "padding": "x" * 3000}


async def main() -> None:
    settings = BatchSettings(folder=Path(sys.argv[1]), concurrency=4)
    async with running_batches(settings, [EVERYBODY], answer, lambda: 0):
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main())
