"""What a job leaves on disk: each row once, whatever is repeated, stopped, edited or full."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llm_service.captioning.output import Output
from llm_service.captioning.parquet import Parquet
from llm_service.captioning.rows import Outcome, Source, printable
from llm_service.captioning.sidecars import check_sidecars, write_sidecars
from llm_service.captioning.sources import open_source
from shared.config import JobSettings
from shared.errors import ConfigError, InUse, StorageError
from shared.shards import JsonLines, RowFormat

JOB = {"source": "pictures", "prompts": ["Describe the picture."], "model": {"name": "demo"}}
ROOT = Path(__file__).parent.parent.parent.parent
FORMATS = [JsonLines(), Parquet()]


def line(name: str, prompt_index: int = 0, **changes: Any) -> dict[str, Any]:
    """An output row."""
    row = {"id": name, "prompt_index": prompt_index, "prompt": "?", "caption": f"caption of {name}"}
    row |= {"finish_reason": "stop", "prompt_tokens": 9, "completion_tokens": 5, "image_tokens": 4}
    row |= {"image_hash": "ab", "width": 30, "height": 20, "bytes": 100, "cached": False, "duplicate_of": None}
    row |= {"model": "demo", "model_fingerprint": "cd", "prompt_fingerprint": "ef"}
    return row | {"read_seconds": 0.5, "encode_seconds": 0.25, "answer_seconds": 1.5} | changes


def good(name: str, prompts: int = 1) -> Outcome:
    return Outcome(name, tuple(line(name, index) for index in range(prompts)))


def output(folder: Path, rows: RowFormat = FORMATS[0], job: dict[str, Any] = JOB, **options: Any) -> Output:
    settings = JobSettings(shard_rows=options.pop("shard_rows", 3))
    return Output(folder, job, rows, settings, **options)


@pytest.mark.parametrize("rows", FORMATS, ids=["jsonl", "parquet"])
def test_rows_come_back_as_they_went_in(tmp_path: Path, rows: RowFormat) -> None:
    """B9: names of any kind survive."""
    names = ["a.png", "new\nline.png", "é🎈.png", 'comma, "quotes".png', "x" * 255, printable("raw\udcff.png")]
    with output(tmp_path / "out", rows) as out:
        for name in names:
            assert out.add(good(name, prompts=2))
    with output(tmp_path / "out", rows) as out:
        assert list(out.store.rows()) == [line(name, index) for name in names for index in range(2)]
        assert not out.add(good("raw\\xff.png"))


@pytest.mark.parametrize("rows", FORMATS, ids=["jsonl", "parquet"])
def test_every_row_once_over_stops_and_repeats(tmp_path: Path, rows: RowFormat) -> None:
    """B2, B7: what workers emit again is dropped, in this run and in the next, in whatever order it comes."""
    with output(tmp_path / "out", rows) as out:
        assert [out.add(good(name)) for name in "abab"] == [True, True, False, False]
        assert out.add(Outcome("bad", error="broken"))
        assert not out.add(Outcome("bad", error="broken"))
    with output(tmp_path / "out", rows) as out:
        assert (out.captioned, out.failed) == (2, 1)
        assert [out.add(good(name)) for name in "cbda"] == [True, False, True, False]
        assert not out.add(good("bad"))
        out.flush()
        assert sorted(row["id"] for row in out.store.rows()) == list("abcd")
        assert list(out.failures()) == [{"id": "bad", "error": "broken"}]


def test_rows_last_while_the_job_goes_on(tmp_path: Path) -> None:
    with output(tmp_path / "out", shard_rows=2) as out:
        for name in "abcde":
            out.add(good(name))
        assert [row["id"] for row in out.store.rows()] == list("abcd")


def test_prompts_of_a_row_are_never_torn_apart(tmp_path: Path) -> None:
    with output(tmp_path / "out", shard_rows=2) as out:
        out.add(good("a", prompts=5))
        assert len(list(out.store.rows())) == 5


def test_retry_forgets_the_failures_alone(tmp_path: Path) -> None:
    with output(tmp_path / "out") as out:
        out.add(good("a"))
        out.add(Outcome("b", error="gone for a while"))
    with output(tmp_path / "out", retry=True) as out:
        assert "a" in out.done
        assert "b" not in out.done
        assert out.add(good("b"))
    with output(tmp_path / "out") as out:
        assert (out.captioned, out.failed) == (2, 0)


def test_an_edited_caption_stays(tmp_path: Path) -> None:
    """B3."""
    with output(tmp_path / "out") as out:
        out.add(good("a"))
    (part,) = out.store.parts()
    part.write_text(json.dumps(line("a", caption="by hand")) + "\n")
    with output(tmp_path / "out") as out:
        assert not out.add(good("a"))
        out.add(good("b"))
    assert part.read_text() == json.dumps(line("a", caption="by hand")) + "\n"


def test_another_prompt_or_model_is_refused_and_named(tmp_path: Path) -> None:
    """B5: captions of two prompts never end up in one output."""
    with output(tmp_path / "out") as out:
        out.add(good("a"))
    changed = JOB | {"prompts": ["What is at row 1 column 1?"]}
    with pytest.raises(ConfigError, match=r"prompts was .*Describe the picture.*, is .*row 1 column 1") as caught:
        output(tmp_path / "out", job=changed).__enter__()
    assert "another output, or overwrite" in caught.value.message
    with output(tmp_path / "out", job=changed, overwrite=True) as out:
        assert (out.captioned, list(out.store.rows())) == (0, [])


def test_overwriting_touches_nothing_of_others(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part-000000.jsonl").write_text("not ours")
    with pytest.raises(ConfigError, match="holds other files"):
        output(tmp_path / "out", overwrite=True).__enter__()
    assert (tmp_path / "out" / "part-000000.jsonl").read_text() == "not ours"


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    with output(tmp_path / "out"), pytest.raises(InUse, match="is at work on"):
        output(tmp_path / "out").__enter__()


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files of this process may not grow above ``size`` bytes: the nearest to a full disk without being root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("rows", FORMATS, ids=["jsonl", "parquet"])
def test_a_full_disk_loses_nothing_that_was_finished(tmp_path: Path, rows: RowFormat) -> None:
    with output(tmp_path / "out", rows) as out:
        out.add(good("a"))
    huge = Outcome("b", (line("b", caption=f"{'long ' * 20_000}"),))
    with (
        full_disk(8192),
        pytest.raises((StorageError, ConfigError), match=r"part-000001|too large"),
        output(tmp_path / "out", rows) as out,
    ):
        for name in ("b", "c", "d"):
            out.add(Outcome(name, ({**huge.lines[0], "id": name, "caption": incompressible(name)},)))
    with output(tmp_path / "out", rows) as out:
        assert [row["id"] for row in out.store.rows()] == ["a"]
        assert not list((tmp_path / "out").glob("*.tmp"))
        out.add(huge)
        out.flush()
        assert [row["id"] for row in out.store.rows()] == ["a", "b"]


def incompressible(name: str) -> str:
    from blake3 import blake3

    return blake3(name.encode()).hexdigest(10_000)


def pictures(folder: Path, *names: str) -> Source:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"picture " + name.encode())
    return open_source(str(folder))


def test_sidecars_of_equal_stems(tmp_path: Path) -> None:
    """B10: distinct files, each beside its own picture; no picture is touched."""
    names = ("a.jpg", "a.png", "b.jpg", "sub1/a.jpg", "sub2/a.jpg")
    source = pictures(tmp_path, *names)
    written = write_sidecars(source, [line(name) for name in names], overwrite=False)
    assert written.new == 5
    texts = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.txt")}
    assert texts == {
        "a.jpg.txt": "caption of a.jpg\n",
        "a.png.txt": "caption of a.png\n",
        "b.txt": "caption of b.jpg\n",
        "sub1/a.txt": "caption of sub1/a.jpg\n",
        "sub2/a.txt": "caption of sub2/a.jpg\n",
    }
    assert all((tmp_path / name).read_bytes() == b"picture " + name.encode() for name in names)


def test_sidecars_by_hand_stay(tmp_path: Path) -> None:
    """B3."""
    source = pictures(tmp_path, "a.jpg", "b.jpg")
    (tmp_path / "a.txt").write_text("by hand")
    rows = [line("a.jpg"), line("b.jpg"), line("gone.jpg")]
    assert (write_sidecars(source, rows, overwrite=False).new, (tmp_path / "a.txt").read_text()) == (1, "by hand")
    assert write_sidecars(source, rows, overwrite=True).new == 2
    assert (tmp_path / "a.txt").read_text() == "caption of a.jpg\n"


def test_sidecars_that_have_no_place(tmp_path: Path) -> None:
    source = pictures(tmp_path, "a.jpg")
    with pytest.raises(ConfigError, match="one caption, but there are several prompts"):
        check_sidecars(source, 2)
    (tmp_path / "list.txt").write_text("a.jpg\n")
    with pytest.raises(ConfigError, match="not a folder or a glob"):
        check_sidecars(open_source(str(tmp_path / "list.txt")), 1)


GROWTH = """
import resource, sys
from pathlib import Path
from llm_service.captioning.output import Output
from llm_service.captioning.rows import Outcome
from shared.config import JobSettings
from shared.shards import JsonLines
from tests.llm_service.captioning.test_output import good

with Output(Path(sys.argv[1]), {"source": "many"}, JsonLines(), JobSettings()) as output:
    for number in range(int(sys.argv[2])):
        name = f"folder/{number:09}.png"
        output.add(good(name) if number % 100 else Outcome(name, error="broken"))
with Output(Path(sys.argv[1]), {"source": "many"}, JsonLines(), JobSettings()) as output:
    assert output.captioned + output.failed == int(sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    """B2: writing and reading again ten times as many rows takes at most 64 bytes more for each."""
    peaks = []
    for rows in (20_000, 200_000):
        command = [sys.executable, "-c", GROWTH, str(tmp_path / str(rows)), str(rows)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(1024 * int(run.stdout))
    print(f"peak {peaks[0] >> 20} MiB for 20,000 rows, {peaks[1] >> 20} MiB for 200,000")
    assert peaks[1] - peaks[0] < 64 * 180_000
