"""The prompts of one request, answered side by side and numbered as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from llm_service.api.chat import ModelService, Prepared
from llm_service.api.vision import gather_or_cancel
from llm_service.messages import Chunk, EngineUsage
from shared.items import VisionItem
from shared.log import request_id


async def collected(service: ModelService, prepared: Sequence[Prepared]) -> list[Chunk]:
    """All chunks of all prompts, numbered as in :func:`generated`."""
    if len(prepared) == 1:
        return await service.answer(request_id.get(), prepared[0])
    names = [f"{request_id.get()}-p{number}" for number in range(len(prepared))]
    answers = await gather_or_cancel([service.answer(*named) for named in zip(names, prepared, strict=True)])
    return [
        replace(chunk, index=number * prompt.sampling.n + chunk.index)
        for number, (prompt, chunks) in enumerate(zip(prepared, answers, strict=True))
        for chunk in chunks
    ]


async def generated(service: ModelService, prepared: Sequence[Prepared]) -> AsyncGenerator[Chunk, None]:
    """Chunks of all prompts as they come; a prompt's answers are numbered after those of the prompts before it."""
    if len(prepared) == 1:
        async with aclosing(service.generate(request_id.get(), prepared[0])) as stream:
            async for chunk in stream:
                yield chunk
        return
    queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()

    async def forward(number: int, prompt: Prepared) -> None:
        try:
            async with aclosing(service.generate(f"{request_id.get()}-p{number}", prompt)) as stream:
                async for chunk in stream:
                    queue.put_nowait(replace(chunk, index=number * prompt.sampling.n + chunk.index))
            queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again where the queue is read
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(forward(number, prompt)) for number, prompt in enumerate(prepared)]
    try:
        running = len(tasks)
        while running:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def items_of(prepared: Sequence[Prepared]) -> list[VisionItem]:
    """The images of all prompts."""
    return [item for prompt in prepared for item in prompt.items]


def final_usage(chunks: Sequence[Chunk], prepared: Sequence[Prepared]) -> EngineUsage:
    """Counts over all prompts; times of one of them."""
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    if len(usages) < len(prepared):
        return EngineUsage(sum(len(p.prompt.token_ids) for p in prepared), sum(len(c.token_ids) for c in chunks))
    if len(prepared) == 1:
        return usages[-1]
    return EngineUsage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.prefix_cached_tokens for usage in usages),
        usages[-1].timings,
    )
