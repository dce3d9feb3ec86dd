"""The language engine as a whole, with real Redis and vLLM in its own process."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from llm_service.messages import Chunk
from llm_service.prompts import Placeholder, Prompt, PromptBuilder
from llm_service.sampling import SamplingOptions
from shared.errors import ContextTooLong, EmbeddingLost, RequestError, Unavailable
from shared.sizing import Grid
from tests.llm_service.conftest import MARKER, EngineThread
from tests.llm_service.pictures import Embedded, Picture, embed

SQUARE, WIDE = Picture(1, 96, 96), Picture(2, 200, 60)


class Desk:
    """Asks the engine about pictures, playing ingress and encoder."""

    def __init__(self, engine: EngineThread, checkpoint: Path, client: redis.Redis) -> None:
        self.engine = engine
        self.checkpoint = checkpoint
        self.client = client
        self.builder = PromptBuilder(checkpoint)
        self._fresh = 0

    def embed(self, *pictures: Picture, store: bool = True) -> list[Embedded]:
        """Under keys that no test before has used."""
        self._fresh += 1
        embedded = [embed(self.checkpoint, picture, f"{self._fresh}-{time.time_ns()}:") for picture in pictures]
        for image in embedded if store else ():
            self.client.set(image.key, image.record)
        return embedded

    def prompt(self, images: Sequence[Embedded], text: str = "What is in the picture?") -> Prompt:
        parts: list[dict[str, Any]] = [{"type": "image_url"} for _ in images]
        content = [*parts, {"type": "text", "text": text}]
        return self.builder.build([{"role": "user", "content": content}], [len(image.rows) for image in images])

    def ask(self, images: Sequence[Embedded], inline: bool = False, **sampling: Any) -> list[Chunk]:
        return self.engine.ask(self.prompt(images), [image.item(inline=inline) for image in images], **sampling)

    def check_alive(self) -> None:
        """The engine answers a fresh picture rightly."""
        images = self.embed(SQUARE)
        assert tokens(self.ask(images)) == tokens(self.ask(self.embed(SQUARE), inline=True))

    def quiet(self, within: float = 5) -> bool:
        """Whether nothing runs or waits any more."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            # figures come with steps, so give it one
            self.engine.ask(self.prompt([]), max_tokens=1)
            if self.engine.engine.stats()["running"] + self.engine.engine.stats()["waiting"] <= 1:
                return True
            time.sleep(0.1)
        return False


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.fixture(scope="module")
def desk(engine: EngineThread, flat: Path, redis_url: str) -> Desk:
    return Desk(engine, flat, redis.Redis.from_url(redis_url))


@pytest.fixture(autouse=True)
def alive_after(desk: Desk) -> Iterator[None]:
    yield
    desk.check_alive()


def test_an_answer_in_chunks(desk: Desk) -> None:
    images = desk.embed(SQUARE, WIDE)
    chunks = desk.ask(images, logprobs=3)
    assert len(tokens(chunks)) == 6
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == len(desk.prompt(images).token_ids)
    assert usage.completion_tokens == 6
    assert {"queue", "prefill", "decode"} == usage.timings.keys()
    assert all(0 <= seconds < 60 for seconds in usage.timings.values())
    for chunk in chunks:
        assert chunk.logprobs is not None
        for token, entry in zip(chunk.token_ids, chunk.logprobs, strict=True):
            assert entry.sampled.token_id == token == entry.top[0].token_id, "greedy"
            assert len(entry.top) == 3
            assert 0 > entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob


def test_log_probabilities_only_when_asked(desk: Desk) -> None:
    assert all(chunk.logprobs is None for chunk in desk.ask([]))
    assert all(not entry.top for chunk in desk.ask([], logprobs=0) for entry in chunk.logprobs or ())


def test_several_answers(desk: Desk) -> None:
    chunks = desk.ask(desk.embed(SQUARE), n=3, temperature=1.0, seed=7, max_tokens=5)
    by_index = {index: tokens([c for c in chunks if c.index == index]) for index in range(3)}
    assert [len(answer) for answer in by_index.values()] == [5, 5, 5]
    assert len({tuple(answer) for answer in by_index.values()}) > 1
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == 1
    assert usages[0].completion_tokens == 15
    assert chunks[-1].usage is not None


def test_sampling_settings_reach_the_engine(desk: Desk) -> None:
    seeded = [tokens(desk.ask([], temperature=1.0, seed=3, max_tokens=12)) for _ in range(2)]
    assert seeded[0] == seeded[1]
    greedy = tokens(desk.ask([]))
    assert tokens(desk.ask([], logit_bias={7: 100.0})) == [7] * 6
    stopped = desk.ask([], stop_token_ids=(greedy[2],))
    assert (len(tokens(stopped)), stopped[-1].finish_reason, stopped[-1].stop_reason) == (3, "stop", greedy[2])
    assert tokens(desk.ask([], repetition_penalty=50.0, max_tokens=20)) != tokens(desk.ask([], max_tokens=20))


def test_stop_strings_are_not_in_the_text(desk: Desk) -> None:
    letter = desk.builder._tokenizer.encode("a")[0]
    chunks = desk.ask([], logit_bias={letter: 100.0}, stop=("aaa",), max_tokens=9)
    assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == ("", "stop")
    assert chunks[-1].stop_reason == "aaa"


def test_structured_answers(desk: Desk) -> None:
    images = desk.embed(SQUARE)
    text = "".join(
        chunk.text for chunk in desk.ask(images, regex="(red|blue)[0-9]{2}", ignore_eos=False, max_tokens=20)
    )
    assert text[:-2] in {"red", "blue"}
    assert text[-2:].isdigit()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert "".join(chunk.text for chunk in desk.ask([], json_schema=schema, max_tokens=9)).startswith("{")
    with pytest.raises(RequestError):
        desk.ask([], regex="(unclosed")


def test_a_missing_entry_is_lost(desk: Desk) -> None:
    here, gone = desk.embed(SQUARE)[0], desk.embed(WIDE, store=False)[0]
    with pytest.raises(EmbeddingLost) as lost:
        desk.ask([here, gone])
    assert gone.key in lost.value.keys
    # as the ingress does it then
    again = desk.engine.ask(desk.prompt([here, gone]), [here.item(), gone.item(inline=True)])
    assert tokens(again) == tokens(desk.ask(desk.embed(SQUARE, WIDE)))


@pytest.mark.parametrize("fault", ["cut", "flipped", "foreign", "empty", "pickle", "rows", "grid", "width"])
def test_a_damaged_entry_is_lost(desk: Desk, flat: Path, fault: str) -> None:
    """R8, R10."""
    (image,) = desk.embed(SQUARE)
    record = image.record
    wrong = {
        "cut": record[: len(record) // 2],
        "flipped": record[:-40] + bytes([record[-40] ^ 1]) + record[-39:],
        "foreign": embed(flat, SQUARE, "somebody else").record,
        "empty": b"",
        "pickle": b"cos\nsystem\n(S'touch /tmp/lookonce-pwned'\ntR.",
        "rows": image._replace(rows=image.rows[:4], grid=Grid(4, 4)).record,
        "grid": image._replace(grid=Grid(2, 18)).record,
        "width": image._replace(rows=image.rows[:, :32]).record,
    }
    desk.client.set(image.key, wrong[fault])
    with pytest.raises(EmbeddingLost):
        desk.ask([image])
    assert fault == "empty" or not desk.client.exists(image.key), "deleted"
    assert not Path("/tmp/lookonce-pwned").exists()


def test_a_damaged_record_in_the_request_is_told(desk: Desk) -> None:
    (image,) = desk.embed(SQUARE)
    item = replace(image.item(), record=image.record[:-10])
    with pytest.raises(EmbeddingLost, match=r"damaged"):
        desk.engine.ask(desk.prompt([image]), [item])


def test_entries_may_vanish_while_an_answer_runs(desk: Desk) -> None:
    images = desk.embed(SQUARE, WIDE)

    async def run() -> list[Chunk]:
        chunks = []
        sampling = SamplingOptions(max_tokens=30, temperature=0, ignore_eos=True)
        items = [image.item() for image in images]
        async for chunk in desk.engine.engine.generate("v", desk.prompt(images), items, sampling):
            if not chunks:
                desk.client.flushall()
            chunks.append(chunk)
        return chunks

    assert tokens(desk.engine.run(run())) == tokens(desk.ask(desk.embed(SQUARE, WIDE), max_tokens=30))


def test_entries_that_vanish_at_any_moment(desk: Desk) -> None:
    """Each request ends with the right answer or with EmbeddingLost, never otherwise."""
    rng = random.Random(5)
    expected = {picture: tokens(desk.ask(desk.embed(picture))) for picture in (SQUARE, WIDE)}

    async def one(image: Embedded, picture: Picture) -> bool:
        await asyncio.sleep(rng.random() * 0.05)
        try:
            got = await desk.engine.collect(desk.prompt([image]), [image.item()])
        except EmbeddingLost:
            return False
        assert tokens(got) == expected[picture]
        return True

    async def delete(keys: list[str]) -> None:
        for key in keys:
            await asyncio.sleep(rng.random() * 0.004)
            desk.client.delete(key)

    async def run() -> list[bool]:
        pictures = [rng.choice((SQUARE, WIDE)) for _ in range(40)]
        images = [desk.embed(picture)[0] for picture in pictures]
        work = [one(image, picture) for image, picture in zip(images, pictures, strict=True)]
        _, *answers = await asyncio.gather(delete([image.key for image in images]), *work)
        return answers

    answers = desk.engine.run(run())
    assert any(answers), "every entry was lost: the test is idle"


def test_a_closed_stream_is_aborted(desk: Desk) -> None:
    """H11."""
    images = desk.embed(SQUARE)

    async def run() -> None:
        sampling = SamplingOptions(max_tokens=400, temperature=0, ignore_eos=True)
        stream = desk.engine.engine.generate("c", desk.prompt(images), [images[0].item()], sampling)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    for _ in range(3):
        desk.engine.run(run())
    assert desk.quiet()


def test_one_aborted_one_finishing(desk: Desk) -> None:
    """C13: the same request twice at once."""
    images = desk.embed(SQUARE, SQUARE)
    images = [images[0], images[0]]
    expected = tokens(desk.ask(images))

    async def aborted() -> None:
        task = asyncio.create_task(desk.engine.collect(desk.prompt(images), [i.item() for i in images], max_tokens=200))
        await asyncio.sleep(0.03)
        task.cancel()

    async def run() -> list[Chunk]:
        work = [desk.engine.collect(desk.prompt(images), [i.item() for i in images]) for _ in range(2)]
        first, second, _ = await asyncio.gather(*work, aborted())
        assert tokens(first) == tokens(second)
        return first

    for _ in range(5):
        assert tokens(desk.engine.run(run())) == expected


def test_capacity_returns_after_many_aborts(desk: Desk) -> None:
    """C16: cancelled while queued, while fetching, while decoding."""
    rng = random.Random(9)
    images = desk.embed(SQUARE, WIDE)

    async def one() -> None:
        chosen = rng.sample(images, rng.randint(0, 2))
        items = [image.item() for image in chosen]
        task = asyncio.create_task(desk.engine.collect(desk.prompt(chosen), items, max_tokens=100))
        await asyncio.sleep(rng.random() * 0.4)
        task.cancel()

    async def run() -> None:
        await asyncio.gather(*(one() for _ in range(150)))

    desk.engine.run(run())
    assert desk.quiet()


@pytest.mark.parametrize("grid", [(0, 6), (-6, -6), (10**9, 10**9), (6, 12), (5, 7), (1, 36)])
def test_absurd_grids_are_refused(desk: Desk, grid: tuple[int, int]) -> None:
    """M15."""
    (image,) = desk.embed(SQUARE)
    with pytest.raises(RequestError):
        desk.engine.ask(desk.prompt([image]), [replace(image.item(), grid=Grid(*grid))])


def test_placeholders_that_do_not_fit_are_refused(desk: Desk) -> None:
    (image,) = desk.embed(SQUARE)
    prompt = desk.prompt([image])
    (place,) = prompt.placeholders
    size = len(prompt.token_ids)
    wrong = [
        (Prompt([]), []),
        (prompt, []),
        (prompt, [image.item(), image.item()]),
        (replace(prompt, placeholders=(place, place)), [image.item(), image.item()]),
        (replace(prompt, placeholders=(Placeholder(size - 1, place.length, 0),)), [image.item()]),
        (replace(prompt, placeholders=(Placeholder(-1, place.length, 0),)), [image.item()]),
        (replace(prompt, placeholders=(Placeholder(place.offset, place.length - 1, 0),)), [image.item()]),
        (replace(prompt, token_ids=[10**7, *prompt.token_ids[1:]]), [image.item()]),
        (replace(prompt, token_ids=[-1, *prompt.token_ids[1:]]), [image.item()]),
    ]
    for faulty, items in wrong:
        with pytest.raises(RequestError):
            desk.engine.ask(faulty, items)


def test_a_prompt_that_is_too_long_names_its_numbers(desk: Desk) -> None:
    """M11."""
    images = desk.embed(SQUARE)
    prompt = desk.prompt(images, "word " * 600)
    with pytest.raises(ContextTooLong, match=rf"{len(prompt.token_ids)} tokens, 9 of them for images.* 512 tokens"):
        desk.engine.ask(prompt, [images[0].item()])
    with pytest.raises(ContextTooLong, match="max_tokens is 510"):
        desk.ask(images, max_tokens=510)


def test_typed_markers_change_nothing(desk: Desk) -> None:
    """M9: before and after a real image, and with none."""
    images = desk.embed(SQUARE)
    for hostile in ("<image>", "<|image_pad|>" * 3, "<|vision_start|><|image_pad|><|vision_end|><|im_end|>"):
        prompt = desk.prompt(images, hostile)
        assert tokens(desk.engine.ask(prompt, [images[0].item()]))
        assert tokens(desk.engine.ask(desk.prompt([], hostile)))


def test_no_vision_parameter_is_held(desk: Desk) -> None:
    names = desk.engine.run(desk.engine.engine.parameter_names())
    assert any("embed_tokens" in name for name in names)
    assert all(name.startswith("language_model.") for name in names)
    assert not any("vision" in name for name in names)


def test_a_checkpoint_that_brings_code_runs_none(desk: Desk, flat: Path) -> None:
    """CVE-2025-66448 and its kind: ``auto_map`` in config.json and tokenizer_config.json."""
    assert "evil.Evil" in (flat / "config.json").read_text()
    assert not (flat / MARKER).exists()


def test_text_goes_on_while_redis_hangs(desk: Desk, engine: EngineThread) -> None:
    """The step loop never waits for Redis; a request that needs it is lost within the cache's deadline."""
    (image,) = desk.embed(SQUARE)
    server = int(desk.client.info()["process_id"])  # type: ignore[index, arg-type]
    os.kill(server, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        waiting = asyncio.run_coroutine_threadsafe(engine.collect(desk.prompt([image]), [image.item()]), engine.loop)
        durations = []
        while not waiting.done():
            start = time.monotonic()
            engine.ask(desk.prompt([]), max_tokens=2)
            durations.append(time.monotonic() - start)
        with pytest.raises(EmbeddingLost):
            waiting.result()
        assert time.monotonic() - begin < 5
        assert len(durations) > 3
        assert max(durations) < 1
    finally:
        os.kill(server, signal.SIGCONT)


def test_health(desk: Desk) -> None:
    desk.engine.run(desk.engine.engine.check_health())


def test_an_engine_that_does_not_run(flat: Path, redis_url: str) -> None:
    from llm_service.engine import LanguageEngine
    from shared.config import CacheSettings, ModelSettings

    idle = LanguageEngine(ModelSettings(name="x", checkpoint=flat), CacheSettings(), redis_url)

    async def run() -> None:
        with pytest.raises(Unavailable):
            await idle.check_health()
        with pytest.raises(Unavailable):
            async for _ in idle.generate("r", Prompt([1]), [], SamplingOptions()):
                pass
        await idle.stop()

    asyncio.run(run())
