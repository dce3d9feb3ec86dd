"""An answer whose replica dies: begun again where nothing has gone out, and only there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from llm_service.api.chat import MAX_REPLICAS, ModelService, Prepared
from llm_service.messages import Chunk
from llm_service.prompts import Prompt
from llm_service.sampling import SamplingOptions
from shared.errors import ReplicaLost

PROMPT = Prepared(Prompt([1]), [], [], SamplingOptions(max_tokens=4), None)


class DyingPool:
    """Replicas each of which dies after its number of chunks; the one after them lives."""

    def __init__(self, *chunks_before_death: int) -> None:
        self._deaths = list(chunks_before_death)
        self.requests: list[str] = []

    async def generate(self, request_id: str, *_: object) -> AsyncIterator[Chunk]:
        self.requests.append(request_id)
        last = self._deaths.pop(0) if self._deaths else None
        for number in range(3):
            if number == last:
                raise ReplicaLost("a replica died")
            yield Chunk(0, str(number), (number,))

    async def answer(self, *arguments: Any) -> list[Chunk]:
        return [chunk async for chunk in self.generate(*arguments)]


class Images:
    model = "m"


def service(pool: DyingPool) -> ModelService:
    return ModelService(cast("Any", Images()), cast("Any", pool), cast("Any", None), cast("Any", None), 64)


async def streamed(pool: DyingPool) -> list[str]:
    return [chunk.text async for chunk in service(pool).generate("r", PROMPT)]


async def test_a_stream_begins_again_before_its_first_token_only() -> None:
    pool = DyingPool(0, 0)
    assert await streamed(pool) == ["0", "1", "2"]
    assert pool.requests == ["r-1", "r-2", "r-3"]
    pool = DyingPool(1)
    with pytest.raises(ReplicaLost):
        await streamed(pool)
    assert pool.requests == ["r-1"]


async def test_a_whole_answer_begins_again_at_any_time() -> None:
    pool = DyingPool(2, 1)
    chunks = await service(pool).answer("r", PROMPT)
    assert [chunk.text for chunk in chunks] == ["0", "1", "2"], "nothing is told twice"


@pytest.mark.parametrize("at", [0, 1])
async def test_a_prompt_that_ends_every_engine_does_not_get_them_all(at: int) -> None:
    pool = DyingPool(*[at] * 10)
    with pytest.raises(ReplicaLost):
        await service(pool).answer("r", PROMPT)
    assert len(pool.requests) == MAX_REPLICAS
