"""A folder of drawn pictures as people's folders are: with copies, copies in other files, and broken ones.

python -m tools.demo.folder FOLDER --pictures 10000 --duplicates 0.3 --broken 0.01
"""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import PngImagePlugin

from tools.demo.pictures import draw
from tools.demo.questions import describe

#: pictures in one subfolder
CHUNK = 1000
#: pictures that no other command draws
FIRST_SEED = 12_000_000


@dataclass(frozen=True)
class Drawn:
    """What is in a folder.

    Attributes:
        truths: true caption of every good file, by path below the folder.
        broken: files that are no pictures.
        distinct: different pictures among the good ones.
    """

    truths: dict[str, str]
    broken: frozenset[str]
    distinct: int


def draw_folder(
    folder: Path, files: int, duplicates: float = 0.3, broken: float = 0.01, seed: int = FIRST_SEED
) -> Drawn:
    """Draws pictures into a folder; the same arguments give the same files.

    Args:
        folder: made if missing; its pictures are replaced.
        files: how many.
        duplicates: share of files that show what an earlier one shows; every other of these has other bytes.
        broken: share of files that are cut short.
        seed: of the first picture.
    """
    rng = np.random.default_rng(seed)
    truths: dict[str, str] = {}
    bad: set[str] = set()
    originals: list[tuple[bytes, str]] = []
    for number in range(files):
        name = f"{number // CHUNK:03}/{number:06}.png"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        chance = rng.random()
        if chance < broken:
            path.write_bytes(_file(seed + number)[0][: rng.integers(10, 200)])
            bad.add(name)
            continue
        if chance < broken + duplicates and originals:
            data, truths[name] = originals[rng.integers(len(originals))]
            path.write_bytes(data if number % 2 else _other_bytes(data, number))
            continue
        data, truths[name] = _file(seed + number)
        originals.append((data, truths[name]))
        path.write_bytes(data)
    return Drawn(truths, frozenset(bad), len(originals))


def _file(seed: int) -> tuple[bytes, str]:
    """A picture's file and its true caption."""
    picture, scene = draw(seed, "held-out")
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue(), describe(np.random.default_rng(seed), scene).answer


def _other_bytes(data: bytes, number: int) -> bytes:
    """The same pixels in another file: a comment stands before the end."""
    mark = io.BytesIO()
    PngImagePlugin.putchunk(mark, b"tEXt", b"Comment\0copy %d" % number)
    end = data.rindex(b"IEND") - 4
    return data[:end] + mark.getvalue() + data[end:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--duplicates", type=float, default=0.3)
    parser.add_argument("--broken", type=float, default=0.01)
    options = parser.parse_args()
    drawn = draw_folder(options.folder, options.pictures, options.duplicates, options.broken)
    truth = {"truths": drawn.truths, "broken": sorted(drawn.broken), "distinct": drawn.distinct}
    (options.folder / "truth.json").write_text(json.dumps(truth))
    print(f"{len(drawn.truths)} good files, {drawn.distinct} distinct pictures, {len(drawn.broken)} broken files")


if __name__ == "__main__":
    main()
