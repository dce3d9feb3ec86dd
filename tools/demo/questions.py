"""Questions about pictures, with their exact answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tools.demo.pictures import COLOURS, DIGITS, KINDS, SHAPES, Scene, Thing, random_thing

KIND_NAMES = ("describe", "at", "where", "count", "which")
NOTHING = "nothing"
DESCRIBE = ("Describe the picture.", "Describe the image.", "Describe this image.", "What is in this picture?")
AT = ("What is at {}?", "What is in {}?", "What do you see at {}?")
WHERE = ("Where is the {}?", "In which cell is the {}?", "Find the {}.")
COUNT = ("How many {} are there?", "How many {} do you see?", "Count the {}.")
WHICH = ("Which image has a {}?", "Which image shows a {}?")
WHICH_ANSWERS = {
    (True, False): "the first image",
    (False, True): "the second image",
    (True, True): "both images",
    (False, False): "neither image",
}


@dataclass(frozen=True)
class Question:
    """One question, its answer, and its kind (``describe``, ``at``, ``where``, ``count``, ``which``)."""

    kind: str
    text: str
    answer: str


def _pick(rng: np.random.Generator, *phrasings: str) -> str:
    return phrasings[rng.integers(len(phrasings))]


def _plural(shape: str) -> str:
    return "crosses" if shape == "cross" else f"{shape}s"


def name(thing: Thing | None) -> str:
    """``red circle``, ``blue 7`` or ``nothing``."""
    return NOTHING if thing is None else str(thing)


def caption(scene: Scene) -> str:
    """The whole picture in words: ``Row 1: red circle, nothing. Row 2: …``."""
    rows = []
    for row in range(scene.rows):
        cells = ", ".join(name(scene.cells[row][column]) for column in range(scene.columns))
        rows.append(f"Row {row + 1}: {cells}.")
    return " ".join(rows)


def describe(rng: np.random.Generator, scene: Scene) -> Question:
    """Everything that is in the picture."""
    text = _pick(rng, *DESCRIBE)
    return Question("describe", text, caption(scene))


def at(rng: np.random.Generator, scene: Scene) -> Question:
    """What stands at a place."""
    row, column = int(rng.integers(scene.rows)), int(rng.integers(scene.columns))
    place = f"row {row + 1} column {column + 1}"
    text = _pick(rng, *(phrase.format(place) for phrase in AT))
    return Question("at", text, name(scene.cells[row][column]))


def where(rng: np.random.Generator, scene: Scene) -> Question | None:
    """Where something stands that stands there once; None when there is no such thing."""
    once = [thing for thing, times in Counter(scene.things).items() if times == 1]
    if not once:
        return None
    thing = once[rng.integers(len(once))]
    row, column = next((r, c) for r, cells in enumerate(scene.cells) for c, there in enumerate(cells) if there == thing)
    text = _pick(rng, *(phrase.format(thing) for phrase in WHERE))
    return Question("where", text, f"row {row + 1} column {column + 1}")


def count(rng: np.random.Generator, scene: Scene) -> Question:
    """How many of a colour, a shape, digits, or empty cells."""
    things = scene.things
    choice = rng.random()
    if choice < 0.45:
        colour = str(rng.choice(list(COLOURS)))
        what, number = f"{colour} things", sum(thing.colour == colour for thing in things)
    elif choice < 0.8:
        shape = str(rng.choice(SHAPES))
        what, number = _plural(shape), sum(thing.kind == shape for thing in things)
    elif choice < 0.9:
        what, number = "digits", sum(thing.kind in DIGITS for thing in things)
    else:
        what, number = "empty cells", scene.rows * scene.columns - len(things)
    return Question("count", _pick(rng, *(phrase.format(what) for phrase in COUNT)), str(number))


def which(rng: np.random.Generator, first: Scene, second: Scene) -> Question:
    """Which of two images holds something."""
    pool = [*first.things, *second.things]
    thing = pool[rng.integers(len(pool))] if pool and rng.random() < 0.8 else None
    while thing is None:
        thing = random_thing(rng)
    answer = WHICH_ANSWERS[thing in first.things, thing in second.things]
    return Question("which", _pick(rng, *(phrase.format(thing) for phrase in WHICH)), answer)


def corpus() -> list[str]:
    """Every word in its surroundings, often enough to become one token."""
    places = [f"row {row} column {column}" for row in range(1, 4) for column in range(1, 4)]
    whats = (
        [f"{colour} things" for colour in COLOURS] + [_plural(shape) for shape in SHAPES] + ["digits", "empty cells"]
    )
    things = [Thing(colour, kind) for colour in COLOURS for kind in KINDS]
    lines = [phrase.format(place) for phrase in AT for place in places]
    lines += [phrase.format(what) for phrase in COUNT for what in whats]
    lines += [phrase.format(thing) for phrase in (*WHERE, *WHICH) for thing in things]
    lines += [f"Row {row}: {thing}, {NOTHING}. Row {row}: {NOTHING}, {thing}." for row in (1, 2, 3) for thing in things]
    lines += [*map(str, things), *places, NOTHING] * 2
    return lines + [*DESCRIBE, *WHICH_ANSWERS.values(), "user\n", "assistant\n", "system\n", "<image>"] * 10
