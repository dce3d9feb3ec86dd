"""Every kind of source, on real files: which rows come out, under which names, and what is refused in which words."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from llm_service.captioning.images import read_image
from llm_service.captioning.rows import Row, Source
from llm_service.captioning.sources import Columns, open_source
from shared.config import ImageSettings
from shared.errors import ConfigError, FetchFailed, ImageTooLarge
from shared.fetch import ImageFetcher


def picture(seed: int, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def rows(source: Source) -> list[Row]:
    """All rows, having travelled as they do to a worker."""
    return [Row.unpack(*row.pack()) for fragment in source.fragments for row in fragment.rows()]


async def contents(source: Source) -> dict[str, bytes]:
    """File of every row, by id."""
    fetcher = ImageFetcher(ImageSettings())
    try:
        return {row.id: await read_image(row.image, fetcher, ImageSettings()) for row in rows(source)}
    finally:
        await fetcher.aclose()


#: names that have been lost or confused in other people's jobs
NAMES = [
    *("a.JPG", "a.png", "b.jpeg", "c.WebP", "two words.png", 'comma, and "quotes".png', "new\nline.png"),
    *("é🎈.png", "{braces}.png", "x" * 251 + ".png", "sub1/a.JPG", "sub2/a.JPG"),
]


async def test_a_folder_gives_every_picture_under_its_own_name(tmp_path: Path) -> None:
    """B9, B10: suffixes in any case, names of any kind, equal stems and equal names in subfolders."""
    made = {name: picture(seed) for seed, name in enumerate(NAMES)}
    for name, data in made.items():
        write(tmp_path / name, data)
    write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/raw\xff.png")), picture(99))
    write(tmp_path / "notes.txt", b"not a picture")
    source = open_source(str(tmp_path))
    assert source.total == len(NAMES) + 1
    assert await contents(source) == made | {"raw\\xff.png": picture(99)}


def test_fields_of_a_picture_file(tmp_path: Path) -> None:
    write(tmp_path / "cats" / "tom.PNG", picture(0))
    source = open_source(str(tmp_path))
    (row,) = rows(source)
    assert row.fields == {"id": "cats/tom.PNG", "name": "tom.PNG", "stem": "tom", "folder": "cats"}
    assert source.fields == set(row.fields)


async def test_a_glob_and_files_that_come_later(tmp_path: Path) -> None:
    """B7: ids are relative to the part of the pattern without wildcards, so that new files rename nothing."""
    write(tmp_path / "x" / "1.png", picture(1))
    pattern = str(tmp_path / "**" / "*.png")
    first = open_source(pattern)
    assert [row.id for row in rows(first)] == ["x/1.png"]
    write(tmp_path / "2.png", picture(2))
    second = open_source(pattern)
    assert await contents(second) == {"x/1.png": picture(1), "2.png": picture(2)}
    assert first.identity == second.identity


async def test_a_list_of_paths_and_urls(tmp_path: Path) -> None:
    write(tmp_path / "a.png", picture(1))
    data = "data:image/png;base64," + base64.b64encode(picture(2)).decode()
    away = write(tmp_path / "away" / "b.png", picture(3))
    lines = ["a.png", "", str(away), data, "a.png", "https://example.org/x.jpg"]
    listing = write(tmp_path / "list.txt", "\r\n".join(lines).encode())
    source = open_source(str(listing))
    assert [row.id for row in rows(source)] == ["a.png", str(away), data, "https://example.org/x.jpg"]
    assert source.total == 4
    assert source.notes == ("1 lines repeat others and count once",)
    images = {row.id: row.image for row in rows(source)}
    assert images["https://example.org/x.jpg"] == "https://example.org/x.jpg"
    fetcher = ImageFetcher(ImageSettings())
    assert await read_image(images["a.png"], fetcher, ImageSettings()) == picture(1)
    assert await read_image(images[data], fetcher, ImageSettings()) == picture(2)
    await fetcher.aclose()


def as_jsonl(path: Path, table: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table))


def as_csv(path: Path, table: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(table[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(table)


def as_parquet(path: Path, table: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(table), path, row_group_size=2)


WRITERS = {".jsonl": as_jsonl, ".csv": as_csv, ".tsv": as_csv, ".parquet": as_parquet}


@pytest.mark.parametrize("suffix", WRITERS)
async def test_a_table_with_paths_and_prompts(tmp_path: Path, suffix: str) -> None:
    """Ids from a column, paths relative to the table, other columns for the prompt."""
    table = [{"id": f"item {n}", "path": f'pictures/{n}, "it".png', "question": f"What,\nabout {n}?"} for n in range(5)]
    for n, row in enumerate(table):
        write(tmp_path / row["path"], picture(n))
    file = tmp_path / f"table{suffix}"
    WRITERS[suffix](file, table)
    source = open_source(str(file))
    assert source.total == 5
    assert source.fields == {"id", "question"}
    assert [(row.id, row.fields["question"]) for row in rows(source)] == [(r["id"], r["question"]) for r in table]
    assert await contents(source) == {f"item {n}": picture(n) for n in range(5)}


@pytest.mark.parametrize("kind", ["bytes", "struct", "base64"])
async def test_a_table_with_pictures_inside(tmp_path: Path, kind: str) -> None:
    cells: dict[str, Any] = {
        "bytes": lambda data: data,
        "struct": lambda data: {"bytes": data, "path": None},  # as data sets of Hugging Face have it
        "base64": lambda data: base64.b64encode(data).decode(),
    }
    table = [{"shot": cells[kind](picture(n)), "n": n} for n in range(5)]
    as_parquet(tmp_path / "t.parquet", table)
    source = open_source(str(tmp_path / "t.parquet"), Columns(image="shot"))
    assert await contents(source) == {f"t.parquet#{n}": picture(n) for n in range(5)}


async def test_a_data_set_on_disk(tmp_path: Path) -> None:
    """The layout of ``datasets.save_to_disk``: Arrow streams and state.json."""
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    for part in range(2):
        table = pa.Table.from_pylist(
            [{"image": {"bytes": picture(10 * part + n), "path": None}, "label": n} for n in range(3)]
        )
        name = folder / f"data-0000{part}-of-00002.arrow"
        with pa.OSFile(str(name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text("{}")
    source = open_source(str(folder))
    found = await contents(source)
    assert list(found.values()) == [picture(10 * part + n) for part in range(2) for n in range(3)]
    assert source.total == 6
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match=r"holds several splits; name one: .*train"):
        open_source(str(tmp_path / "set"))


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["shard-0.tar", "shard-0.tar.gz"])
async def test_a_web_data_set(tmp_path: Path, name: str) -> None:
    members = {
        "a/001.jpg": picture(1, "JPEG"),
        "a/001.json": b'{"title": "one", "list": [1]}',
        "a/001.txt": b" words \n",
        "a/002.seg.PNG": picture(2),
        "b/001.png": picture(3),
        "b/003.txt": b"no picture here",
    }
    source = open_source(str(tar(tmp_path / name, members)))
    found = rows(source)
    assert [row.id for row in found] == [f"{name}/{key}" for key in ("a/001", "a/002", "b/001", "b/003")]
    assert [row.image for row in found[:3]] == [picture(1, "JPEG"), picture(2), picture(3)]
    assert found[0].fields == {"id": f"{name}/a/001", "key": "a/001", "title": "one", "txt": "words"}
    assert found[3].error == "the sample holds no picture that can be read (it has txt)"


def test_a_tar_that_is_cut_short_gives_what_is_whole(tmp_path: Path) -> None:
    path = tar(tmp_path / "s.tar", {f"{n}.png": picture(n) for n in range(4)})
    path.write_bytes(path.read_bytes()[:-9000])
    *good, bad = rows(open_source(str(path)))
    assert [row.image for row in good] == [picture(n) for n in range(len(good))]
    assert 0 < len(good) < 4
    assert bad.error is not None
    assert "cannot be read after" in bad.error


def test_rows_of_a_table_that_cannot_be_used(tmp_path: Path) -> None:
    """B1: each bad row is an error of its own; the rows around it are captioned."""
    file = write(
        tmp_path / "t.jsonl",
        b'{"id": "a", "image": "a.png"}\n{"id": "b"}\nnot json\n[1]\n\n'
        b'{"id": "c", "image": 7}\n{"id": "d", "image": "d.png"}',
    )
    found = {row.id: row.error for row in rows(open_source(str(file)))}
    assert found == {
        "a": None,
        "b": "column image: bytes, a path or a URL is wanted, nothing is there",
        "t.jsonl#2": "the line is not JSON",
        "t.jsonl#3": "the line is not a JSON object",
        "c": "column image: bytes, a path or a URL is wanted, int is there",
        "d": None,
    }
    short = write(tmp_path / "t.csv", b"image,title\na.png,x\nb.png\nc.png,z\n")
    errors = [row.error for row in rows(open_source(str(short)))]
    assert errors == [None, "the row has 1 values for 2 columns", None]


def test_a_damaged_parquet_file_ends_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.Table.from_pylist([{"image": picture(n)} for n in range(4)])
    pq.write_table(table, path, row_group_size=1, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    place = data.find(picture(2)) - 20
    data[place : place + 16] = b"\xff" * 16
    path.write_bytes(data)
    found = rows(open_source(str(path)))
    assert [row.image for row in found if row.error is None] == [picture(0), picture(1), picture(3)]
    assert [row.error is not None for row in found].count(True) == 1


def test_ids_that_are_not_unique_are_not_used(tmp_path: Path) -> None:
    table = [{"id": "same", "path": f"{n}.png"} for n in range(2)]
    as_jsonl(tmp_path / "t.jsonl", table)
    source = open_source(str(tmp_path / "t.jsonl"))
    assert [row.id for row in rows(source)] == ["t.jsonl#0", "t.jsonl#1"]
    assert source.notes == ("rows are named by file and place, not by their column id: same comes more than once",)
    with pytest.raises(ConfigError, match="column id cannot name the rows: same comes more than once"):
        open_source(str(tmp_path / "t.jsonl"), Columns(id="id"))


@pytest.mark.parametrize(
    ("name", "data", "columns", "said"),
    [
        (
            "t.csv",
            b"picture,title\na.png,x\n",
            Columns(image="photo"),
            "t.csv has no column photo; there is: picture",
        ),
        (
            "t.csv",
            b"photo,title\na.png,x\n",
            Columns(),
            "looks like pictures; name one with --image-column. There is",
        ),
        ("t.csv", b"image,image\na.png,x\n", Columns(), "must be headings, each another"),
        ("t.jsonl", b'{"image": "a.png"}\n', Columns(id="sku"), "t.jsonl has no column sku; there is: image"),
        ("t.jsonl", b"\x89PNG", Columns(), "holds no JSON objects"),
        ("t.parquet", b"PAR1 no PAR1", Columns(), "cannot read .*t.parquet"),
        ("t.txt", b"\n\n", Columns(), "names no pictures"),
        ("t.txt", b"\x00\x01", Columns(), "it is not text"),
        ("t.txt", b"a.png\n", Columns(image="x"), "columns are for tables"),
        ("t.docx", b"words", Columns(), "is of no kind that can be captioned; known: .*.png"),
    ],
)
def test_wrong_files_and_columns_get_one_sentence(
    tmp_path: Path, name: str, data: bytes, columns: Columns, said: str
) -> None:
    path = write(tmp_path / name, data)
    with pytest.raises(ConfigError, match=said) as caught:
        open_source(str(path), columns)
    assert "\n" not in caught.value.message


def test_places_that_are_no_source(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "mixed" / "a.tar", b"")
    write(tmp_path / "mixed" / "b.jsonl", b"{}")
    for spec, said in {
        "missing": "there is no ",
        "*.png": "nothing matches ",
        "empty": "no pictures below ",
        "mixed": "holds tables and tars; name one kind",
        "mixed/*": "files of several kinds at once \\(tables, tars\\)",
    }.items():
        with pytest.raises(ConfigError, match=said):
            open_source(str(tmp_path / spec))
    with pytest.raises(ConfigError, match="a URL itself is no source"):
        open_source("https://example.org/a.png")


async def test_files_that_cannot_be_read_are_their_rows_faults(tmp_path: Path) -> None:
    limits = ImageSettings(max_bytes=100)
    fetcher = ImageFetcher(limits)
    with pytest.raises(FetchFailed, match="the file cannot be read: No such file"):
        await read_image(str(tmp_path / "gone.png"), fetcher, limits)
    with pytest.raises(FetchFailed, match="the file cannot be read: Is a directory"):
        await read_image(str(tmp_path), fetcher, ImageSettings())
    for large in (str(write(tmp_path / "large.png", bytes(101))), bytes(101)):
        with pytest.raises(ImageTooLarge, match="the file has 101 bytes; the limit is 100"):
            await read_image(large, fetcher, limits)
    await fetcher.aclose()
