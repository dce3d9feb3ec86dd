"""Prompts from templates, patience with faults, duplicates, and what a person is told on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llm_service.captioning.duplicates import DiskIndex
from llm_service.captioning.patience import JobStopped, Patience
from llm_service.captioning.question import Question, checkpoint_fingerprint
from llm_service.captioning.rows import Outcome, Row
from llm_service.captioning.tally import Tally
from llm_service.captioning.templates import Template
from llm_service.sampling import SamplingOptions
from shared.errors import BadImage, Busy, ConfigError, LookonceError, RequestError, Unavailable


def test_a_template_takes_fields_as_text_only() -> None:
    template = Template.parse("{{json}} {title}: {n}")
    assert template.names == {"title", "n"}
    assert template.fill({"title": "{n} {title.__class__}", "n": 3}) == "{json} {n} {title.__class__}: 3"
    assert Template.parse("{name}").fill({"name": "raw\udcff"}) == "raw�"
    with pytest.raises(RequestError, match="the row has no title, which the prompt names"):
        template.fill({"title": None, "n": 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{title", "braces do not pair"),
        ("}", "braces do not pair"),
        ("{title.__class__}", "is no field's name; write {{ and }} for braces"),
        ("{0}", "is no field's name"),
        ("{}", "is no field's name"),
        ("{a!r}", "is no field's name"),
        ("{a:>99999999}", "is no field's name"),
    ],
)
def test_templates_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Template.parse(text)
    assert said in caught.value.message


def test_names_that_the_source_does_not_have() -> None:
    question = Question.parse(["{titel}"], "{who}", SamplingOptions())
    with pytest.raises(ConfigError, match=r"names {titel}, which the source does not have; did you mean {title}"):
        question.check(frozenset({"title", "who"}))
    with pytest.raises(ConfigError, match=r"{who}, which the source does not have; there is: titel"):
        question.check(frozenset({"titel"}))
    question.check(None)


def test_messages_and_fingerprint() -> None:
    question = Question.parse(["A {x}?", "B?"], "You see {x}.", SamplingOptions(seed=1))
    row = Row("r", "r.png", {"x": "cat"})
    assert question.texts(row) == ["A cat?", "B?"]
    system, user = question.messages(row, "A cat?")
    assert system == {"role": "system", "content": "You see cat."}
    assert user["content"][1] == {"type": "text", "text": "A cat?"}
    others = [
        Question.parse(["A {x}?"], "You see {x}.", SamplingOptions(seed=1)),
        Question.parse(["A {x}?", "B?"], None, SamplingOptions(seed=1)),
        Question.parse(["A {x}?", "B?"], "You see {x}.", SamplingOptions(seed=2)),
    ]
    assert len({question.fingerprint, *(other.fingerprint for other in others)}) == 4
    with pytest.raises(ConfigError, match="one answer per prompt"):
        Question.parse(["A"], None, SamplingOptions(n=2))


def test_a_checkpoint_that_was_trained_on_is_another(tmp_path: Path) -> None:
    weights = bytearray(9 << 20)
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_text("{}")
    first = checkpoint_fingerprint(tmp_path)
    assert checkpoint_fingerprint(tmp_path) == first
    weights[:] = bytes([1]) * len(weights)
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert checkpoint_fingerprint(tmp_path) != first


async def fails(errors: list[Exception], result: str = "done") -> Any:
    if errors:
        raise errors.pop(0)
    return result


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_service.captioning.patience.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("llm_service.captioning.patience.LONGEST_PAUSE", 0.02)


async def test_faults_of_the_service_are_waited_out() -> None:
    patience = Patience(5, 1)
    errors: list[Exception] = [Busy("full"), Unavailable("down"), LookonceError("bug"), *[Busy("full")] * 20]
    assert await patience.run(lambda: fails(errors)) == "done"
    assert patience.retries == 23


async def test_faults_of_a_row_are_told_at_once() -> None:
    errors: list[Exception] = [BadImage("broken")]
    with pytest.raises(BadImage):
        await Patience(5, 1).run(lambda: fails(errors))


async def test_a_row_that_fails_while_others_succeed_is_given_up() -> None:
    """B1: a picture that ends every engine does not end the job."""
    patience = Patience(5, 1)

    async def others() -> None:
        while True:
            await patience.run(lambda: fails([]))
            await asyncio.sleep(0.001)

    task = asyncio.create_task(others())
    with pytest.raises(RequestError, match="failed 6 times while other rows succeeded; last: dead"):
        await patience.run(lambda: fails([Unavailable("dead", retry_after=0)] * 99))
    task.cancel()


async def test_nothing_works_any_more() -> None:
    """B1: engines that are gone for good stop the job instead of failing every row."""
    patience = Patience(0.2, 1)
    with pytest.raises(JobStopped, match=r"nothing succeeded for 0.2 s; last: dead. What was finished is safe"):
        await patience.run(lambda: fails([Unavailable("dead", retry_after=0)] * 9999))


async def test_an_answer_that_never_comes_is_asked_again() -> None:
    tries = 0

    async def hangs_once() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            await asyncio.sleep(9)
        return "done"

    assert await Patience(5, 0.05).run(hangs_once) == "done"


async def test_duplicates_wait_for_the_first_one(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path / "index")
    assert await index.claim("x") is None
    waiting = [asyncio.create_task(index.claim("x")) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    await index.settle("x", None)  # the first one failed: another one takes over
    done, _ = await asyncio.wait(waiting, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [None]
    await index.settle("x", [{"caption": "c"}])
    results = await asyncio.gather(*waiting)
    assert sorted(map(str, results)) == ["None", "[{'caption': 'c'}]", "[{'caption': 'c'}]"]
    index.close()
    again = DiskIndex(tmp_path / "index")
    assert await again.claim("x") == [{"caption": "c"}]
    again.close()


def line(**changes: Any) -> dict[str, Any]:
    return {"prompt_tokens": 10, "completion_tokens": 5} | changes


def test_rate_time_left_and_bottleneck() -> None:
    now = 100.0
    tally = Tally(1000, 200, lambda: now)
    assert (tally.rate, tally.seconds_left, tally.bottleneck) == (0.0, None, None)
    now = 110.0  # loading took 10 s, of which the rate must know nothing
    for second in range(60):
        for number in range(4):
            now = 110 + second + number / 4
            slow = second >= 30
            seconds = {"read": 0.1, "encode": 2.0 if slow else 0.1, "answer": 0.5}
            tally.add(Outcome(f"{second} {number}", (line(),), None, seconds, cached=number == 0))
        if second == 10:
            assert tally.bottleneck == "answer"
            assert tally.rate == pytest.approx(4, rel=0.1)
    assert tally.rate == pytest.approx(4, rel=0.1)
    assert tally.bottleneck == "encode"
    assert tally.seconds_left == pytest.approx((1000 - 200 - 240) / 4, rel=0.1)
    assert (tally.done, tally.cached, tally.completion_tokens) == (240, 60, 1200)
    tally.add(Outcome("bad", error="broken"))
    assert (tally.captioned, tally.failed, tally.done) == (240, 1, 241)
    now += 29
    assert tally.rate < 4
