"""What is asked: one function a workload. Every round asks about pictures of its own, the same on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.e2e.load import Ask, Client, Result, closed_loop, conversations, open_loop
from benchmarks.e2e.prompts import Prompts

#: pictures of one round, so that rounds never share one
ROUND = 100_000
#: of a long traffic, the window that is measured holds this share of pictures that were asked for before
REPEATS = 0.8
CATALOGUE = 500
#: parallel clients of the closed loops
CLIENTS = 4


@dataclass(frozen=True)
class Scale:
    """How much is asked.

    Attributes:
        requests: of the closed loops.
        zipf: requests of one Zipf window.
        pairs: requests of either kind where one client measures latency.
        chats, turns: conversations and their turns.
        streams, long: running answers beside which pictures are encoded, and their tokens.
        skews: exponents of the Zipf windows.
        rate: arrivals per second of the open loop.
    """

    requests: int = 48
    zipf: int = 100
    pairs: int = 12
    chats: int = 8
    turns: int = 4
    streams: int = 3
    long: int = 160
    skews: tuple[float, ...] = (0.8, 1.0, 1.2)
    rate: float = 0.5


QUICK = Scale(requests=12, zipf=30, pairs=5, chats=3, turns=3, streams=2, long=64, skews=(1.0,), rate=0.4)


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    Attributes:
        name: of the row.
        run: asks one server; the round chooses the pictures. Gives what was measured.
        warm: asked before, and not measured.
        latency_of: the kind of request whose time to first token is compared.
        gaps_of: the kind whose inter-token times are compared.
    """

    name: str
    run: Callable[[Client, int], Awaitable[list[Result]]]
    warm: Callable[[Client, int], Awaitable[object]] | None = None
    latency_of: str = "image"
    gaps_of: str = "image"


def workloads(prompts: Prompts, scale: Scale) -> list[Workload]:
    """All of them, in the order of the table."""
    return [
        Workload("all pictures distinct", lambda client, number: distinct(client, prompts, scale, number)),
        *(
            Workload(
                f"Zipf {skew:g}",
                lambda client, number, s=skew: zipf(client, prompts, scale, number, s),
                lambda client, number, s=skew: before_zipf(client, prompts, scale, number, s),
            )
            for skew in scale.skews
        ),
        Workload(
            "several turns about one picture",
            lambda client, number: dialogues(client, prompts, scale, number),
            latency_of="later turn",
            gaps_of="later turn",
        ),
        Workload("1 to 8 pictures a request", lambda client, number: several(client, prompts, scale, number)),
        Workload(
            "cached picture, one client",
            lambda client, number: cached(client, prompts, scale, number),
            lambda client, number: before_cached(client, prompts, scale, number),
        ),
        Workload(
            "running answers, pictures arriving",
            lambda client, number: stalls(client, prompts, scale, number),
            latency_of="image",
            gaps_of="text",
        ),
        Workload("open loop, half text", lambda client, number: arrivals(client, prompts, scale, number)),
    ]


async def distinct(client: Client, prompts: Prompts, scale: Scale, number: int) -> list[Result]:
    """Nobody asks twice about a picture."""
    first = number * ROUND
    return await closed_loop(client, [prompts.image(first + i) for i in range(scale.requests)], CLIENTS)


def zipf_window(seed: int, skew: float, length: int) -> tuple[list[int], list[int]]:
    """A window of a long Zipf traffic in which :data:`REPEATS` of the pictures were asked for before.

    Returns:
        The pictures in it that were asked for before it began, least recently asked first, and the window.
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, CATALOGUE + 1, dtype=np.float64) ** -skew
    traffic = rng.choice(CATALOGUE, 40 * CATALOGUE, p=weights / weights.sum())
    first_seen = {int(picture): place for place, picture in reversed(list(enumerate(traffic)))}
    new = np.zeros(len(traffic), dtype=bool)
    new[list(first_seen.values())] = True
    totals = np.concatenate([[0], np.cumsum(new)])
    shares = (totals[length:] - totals[:-length]) / length
    begin = int(np.argmax(shares <= 1 - REPEATS))
    window = [int(picture) for picture in traffic[begin : begin + length]]
    last_seen = {int(picture): place for place, picture in enumerate(traffic[:begin])}
    known = sorted(set(window) & last_seen.keys(), key=last_seen.__getitem__)
    return known, window


def _zipf_base(number: int, skew: float) -> int:
    return number * ROUND + round(skew * 10) * 1000


async def before_zipf(client: Client, prompts: Prompts, scale: Scale, number: int, skew: float) -> None:
    """What was asked before the window begins."""
    base = _zipf_base(number, skew)
    known, _ = zipf_window(base, skew, scale.zipf)
    await closed_loop(client, [prompts.image(base + picture, answer=1) for picture in known], 2)


async def zipf(client: Client, prompts: Prompts, scale: Scale, number: int, skew: float) -> list[Result]:
    """Popular pictures come again and again, each time behind other text."""
    base = _zipf_base(number, skew)
    _, window = zipf_window(base, skew, scale.zipf)
    asks = [
        prompts.image(base + picture, before=prompts.text_of(16, f"zipf {base} {place}"))
        for place, picture in enumerate(window)
    ]
    return await closed_loop(client, asks, CLIENTS)


async def dialogues(client: Client, prompts: Prompts, scale: Scale, number: int) -> list[Result]:
    """Several questions about one picture, one after another; prefix caches do well here."""
    first = number * ROUND + 50_000
    chats = [prompts.dialogue(first + chat, scale.turns) for chat in range(scale.chats)]
    return await conversations(client, chats, CLIENTS)


async def several(client: Client, prompts: Prompts, scale: Scale, number: int) -> list[Result]:
    """1, 2, 4 and 8 new pictures in one request."""
    first = number * ROUND + 60_000
    groups = [range(first + 16 * i, first + 16 * i + count) for i, count in enumerate((1, 2, 4, 8))]
    return await closed_loop(client, [prompts.image(*pictures) for pictures in groups], 2)


async def before_cached(client: Client, prompts: Prompts, scale: Scale, number: int) -> None:
    """Every picture once."""
    first = number * ROUND + 70_000
    await closed_loop(client, [prompts.image(first + i, before="seen", answer=1) for i in range(scale.pairs)], 1)


async def cached(client: Client, prompts: Prompts, scale: Scale, number: int) -> list[Result]:
    """Text, and a known picture behind other text in a prompt of the same length, in turns; one client."""
    first = number * ROUND + 70_000

    def about(place: int, kind: str = "image") -> Ask:
        return prompts.image(first + place, before=prompts.text_of(10, f"{kind} {first} {place}"), kind=kind)

    sizes = await closed_loop(client, [about(0, "probe"), prompts.text(100, f"probe {first}", kind="probe")], 1)
    if any(result.error for result in sizes):
        return sizes
    length = 100 + sizes[0].prompt_tokens - sizes[1].prompt_tokens
    asks = [
        ask for place in range(scale.pairs) for ask in (prompts.text(length, f"alone {first} {place}"), about(place))
    ]
    return await closed_loop(client, asks, 1)


async def stalls(client: Client, prompts: Prompts, scale: Scale, number: int) -> list[Result]:
    """Long answers run while one client asks about one new picture after another."""
    first = number * ROUND + 80_000
    texts = [prompts.text(48, f"long {first} {i}", answer=scale.long) for i in range(scale.streams)]
    running = asyncio.create_task(closed_loop(client, texts, scale.streams))
    pictures: list[Result] = []
    while not running.done():
        pictures += await closed_loop(client, [prompts.image(first + len(pictures), answer=2)], 1)
    return [*await running, *pictures]


async def arrivals(client: Client, prompts: Prompts, scale: Scale, number: int) -> list[Result]:
    """Poisson arrivals; every other request is text, every other of the rest about a picture seen before."""
    first, rng = number * ROUND + 90_000, np.random.default_rng(number)
    times = np.cumsum(rng.exponential(1 / scale.rate, scale.requests))
    asks: list[Ask] = []
    for place, at in enumerate(times):
        if place % 2:
            asks.append(prompts.text(48, f"open {first} {place}", at=float(at)))
        else:
            picture = first + (place if place % 4 == 0 else place - 2)
            asks.append(_at(prompts.image(picture, before=prompts.text_of(8, f"open {first} {place}")), float(at)))
    return await open_loop(client, asks)


def _at(ask: Ask, at: float) -> Ask:
    return Ask(ask.body, ask.kind, at, ask.expected)


def kinds(results: Sequence[Result], kind: str) -> list[Result]:
    """Those of a kind that were answered."""
    return [result for result in results if result.ask.kind == kind and not result.error]
