"""Captioning jobs over real pools: sources to sinks, stop and go on, what an encoder is paid for."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llm_service.sampling import SamplingOptions
from lookonce.caption import Job, Summary, run
from lookonce.service import Service
from shared.config import Settings
from shared.errors import ConfigError
from tests.service.conftest import SAMPLES, metric, random_png

DESCRIBE, CORNER = "Describe the picture.", "What is at row 1 column 1?"


def captioned(job: Job, settings: Settings, pools: Service) -> tuple[Summary, int]:
    """What became of a job, and how many pictures were encoded for it."""
    before = metric(pools.url, "lookonce_encoded_images_total")
    summary = run(job, settings, pools=pools)
    return summary, round(metric(pools.url, "lookonce_encoded_images_total") - before)


def rows(out: Path) -> list[dict[str, Any]]:
    """All output rows."""
    found: list[dict[str, Any]] = []
    for part in sorted(out.glob("part-*")):
        if part.suffix == ".parquet":
            found += pq.read_table(part).to_pylist()
        else:
            found += [json.loads(line) for line in part.read_text().splitlines()]
    return found


def texts(out: Path) -> dict[tuple[str, int], str]:
    """Captions by id and prompt; no row may come twice."""
    found = {(row["id"], row["prompt_index"]): row["caption"] for row in rows(out)}
    assert len(found) == len(rows(out))
    return found


def failures(out: Path) -> dict[str, str]:
    return {row["id"]: row["error"] for row in map(json.loads, (out / "errors.jsonl").read_text().splitlines())}


def test_a_folder_with_everything_in_it(
    pools: Service, settings: Settings, samples: list[tuple[Path, str]], tmp_path: Path
) -> None:
    """B1, B3, B9, B10: right captions under the right names, bad files told, nothing done twice."""
    folder = tmp_path / "pictures"
    truths = {}
    for number, name in enumerate(["a.JPG", "a.png", "é 🎈\n.WebP", "sub1/a.jpg", "sub2/a.jpg", "x" * 240 + ".png"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        path, truths[name, 0] = samples[number]
        (folder / name).write_bytes(path.read_bytes() + b"behind the picture")  # of no other test
    (folder / "again.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "broken.png").write_bytes(b"nothing of the kind")
    (folder / "zero.png").write_bytes(b"")
    (folder / "large.png").write_bytes(bytes(settings.images.max_bytes + 1))
    truths["again.png", 0] = truths["a.png", 0]
    job = Job(str(folder), tmp_path / "out", (DESCRIBE,), sidecars=True, report=True)
    summary, _ = captioned(job, settings, pools)
    assert (summary.captioned, summary.failed) == (7, 3)
    assert texts(job.out) == truths
    assert {name: reason[:25] for name, reason in failures(job.out).items()} == {
        "broken.png": "the image data are not a ",
        "zero.png": "the image is empty. Accep",
        "large.png": "the file has 33554433 byt",
    }
    assert (folder / "a.JPG.txt").read_text() == truths["a.JPG", 0] + "\n"
    before = rows(job.out)
    (folder / "new.png").write_bytes(random_png(4711))
    summary, encoded = captioned(job, settings, pools)
    assert (summary.captioned, summary.tally.done, encoded) == (8, 1, 1)
    assert [row for row in rows(job.out) if row["id"] != "new.png"] == before
    shutil.copy(folder / "a.png", folder / "broken.png")
    summary, encoded = captioned(replace(job, retry_failed=True), settings, pools)
    assert (summary.captioned, summary.failed, summary.tally.done, encoded) == (9, 2, 3, 0)
    assert texts(job.out)["broken.png", 0] == truths["a.png", 0]


def test_another_prompt_needs_another_output(pools: Service, settings: Settings, tmp_path: Path) -> None:
    """B5: refused, or begun anew where asked, and the embeddings stay paid for."""
    shutil.copy(SAMPLES / "0.png", tmp_path / "0.png")
    job = Job(str(tmp_path / "*.png"), tmp_path / "out", (DESCRIBE,))
    captioned(job, settings, pools)
    changed = replace(job, prompts=(CORNER,))
    with pytest.raises(ConfigError, match="prompts was"):
        run(changed, settings, pools=pools)
    _, encoded = captioned(replace(changed, overwrite=True), settings, pools)
    assert encoded == 0
    assert list(texts(job.out)) == [("0.png", 0)]
    assert "row" not in texts(job.out)["0.png", 0].lower()


@pytest.mark.slow
def test_several_prompts_pay_the_encoder_once(pools: Service, settings: Settings, tmp_path: Path) -> None:
    for seed in range(5):
        (tmp_path / f"{seed}.png").write_bytes(random_png(5000 + seed))
    job = Job(str(tmp_path), tmp_path / "out", (DESCRIBE, CORNER, "How many {stem}?"), system="Pictures in {folder}.")
    summary, encoded = captioned(job, settings, pools)
    assert (summary.captioned, encoded, len(texts(job.out))) == (5, 5, 15)
    asked = {row["prompt"] for row in rows(job.out) if row["id"] == "3.png"}
    assert asked == {DESCRIBE, CORNER, "How many 3?"}


@pytest.mark.slow
def test_duplicates_are_captioned_once(pools: Service, settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(24):
        (folder / f"{number}.png").write_bytes(random_png(6000 + number % 4) + bytes(number))  # equal pixels
    job = Job(str(folder), tmp_path / "out", (DESCRIBE,), dedupe=True)
    summary, encoded = captioned(job, settings, pools)
    assert (summary.captioned, summary.tally.duplicates, encoded) == (24, 20, 4)
    by_id = {row["id"]: row for row in rows(job.out)}
    for row in by_id.values():
        if row["duplicate_of"] is not None:
            first = by_id[row["duplicate_of"]]
            assert first["duplicate_of"] is None
            assert row["caption"] == first["caption"]
            assert int(row["id"][:-4]) % 4 == int(first["id"][:-4]) % 4
    (folder / "24.png").write_bytes(random_png(6000))
    summary, encoded = captioned(job, settings, pools)
    assert (summary.tally.done, summary.tally.duplicates, encoded) == (1, 1, 0)


@pytest.mark.slow
def test_captions_of_a_given_shape(pools: Service, settings: Settings, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"digit": {"enum": [1, 2]}}, "required": ["digit"]}
    sampling = SamplingOptions(temperature=0, max_tokens=60, json_schema=schema | {"additionalProperties": False})
    job = Job(str(SAMPLES), tmp_path / "out", (DESCRIBE,), sampling=sampling)
    captioned(job, settings, pools)
    finished = [row["caption"] for row in rows(job.out) if row["finish_reason"] == "stop"]
    assert all(json.loads(caption)["digit"] in (1, 2) for caption in finished)
    assert len(rows(job.out)) == 6
    assert all(row["caption"].startswith("{") for row in rows(job.out))


@pytest.mark.slow
def test_a_seed_repeats_a_run(pools: Service, settings: Settings, tmp_path: Path) -> None:
    sampling = SamplingOptions(temperature=1.5, seed=11, max_tokens=40)
    found = []
    for name in ("one", "two"):
        captioned(Job(str(SAMPLES), tmp_path / name, (DESCRIBE,), sampling=sampling), settings, pools)
        found.append(texts(tmp_path / name))
    assert found[0] == found[1]


def as_table(folder: Path, kind: str) -> str:
    """The samples as a source of some kind, each with a prompt of its own."""
    pictures = [(path.stem, path) for path in sorted(SAMPLES.glob("*.png"))]
    if kind == "tar":
        with tarfile.open(folder / "s.tar", "w") as archive:
            for name, path in pictures:
                archive.add(path, f"{name}.png")
                info = tarfile.TarInfo(f"{name}.question.txt")
                info.size = len(CORNER)
                archive.addfile(info, io.BytesIO(CORNER.encode()))
        return str(folder / "s.tar")
    if kind == "jsonl":
        table = [{"id": name, "path": str(path), "question_txt": CORNER} for name, path in pictures]
        (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        return str(folder / "t.jsonl")
    cells = [{"id": n, "image": {"bytes": p.read_bytes(), "path": None}, "question_txt": CORNER} for n, p in pictures]
    arrow = pa.Table.from_pylist(cells)
    if kind == "parquet":
        pq.write_table(arrow, folder / "t.parquet", row_group_size=2)
        return str(folder / "t.parquet")
    (folder / "state.json").write_text("{}")
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, arrow.schema) as stream,
    ):
        stream.write_table(arrow)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "tar"])
@pytest.mark.parametrize("sink", ["jsonl", "parquet"])
def test_every_source_into_every_sink(
    pools: Service, settings: Settings, samples: list[tuple[Path, str]], tmp_path: Path, kind: str, sink: Any
) -> None:
    (tmp_path / "source").mkdir()
    spec = as_table(tmp_path / "source", kind)
    job = Job(spec, tmp_path / "out", (DESCRIBE, "{question_txt}"), format=sink, report=True)
    summary, _ = captioned(job, settings, pools)
    assert (summary.captioned, summary.failed) == (6, 0)
    prefix = "s.tar/" if kind == "tar" else ""
    found = texts(job.out)
    assert {(f"{prefix}{path.stem}", 0): truth for path, truth in samples}.items() <= found.items()
    assert all(found[name, 0].startswith(f"Row 1: {found[name, 1]}") for name, index in found if index)
    assert (job.out / "report.html").read_text().count("<img ") == 6
    summary, _ = captioned(job, settings, pools)
    assert summary.tally.done == 0
