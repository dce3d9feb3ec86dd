"""Durable files, stores of shards, the set of ids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shared.durable import append_line, held, read_lines, replacing, write_whole
from shared.errors import ConfigError, InUse, StorageError
from shared.idset import IdSet
from shared.shards import JsonLines, ShardStore, fingerprint

JOB = {"prompt": "Describe the picture.", "model": "demo"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"half of the ne")
        raise RuntimeError("power loss")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_full_disk_leaves_the_store_as_it_was(small_disk: Path) -> None:
    rows = [{"id": str(number), "text": "x" * 1000} for number in range(100)]
    with ShardStore(small_disk / "job", JOB, JsonLines()) as store:
        with pytest.raises(StorageError, match="no space left"):
            for _ in range(50):
                store.write(rows)
        kept = list(store.rows())
    assert len(kept) in range(100, 1100)
    assert len(kept) % 100 == 0
    with ShardStore(small_disk / "job", JOB, JsonLines()) as again:
        assert list(again.rows()) == kept
        assert again.lost() == []


def test_a_lock_on_a_full_disk_is_refused_in_a_sentence(small_disk: Path) -> None:
    with (small_disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(StorageError, match="no space left"), held(small_disk / "lock", "a job"):
        pass
    (small_disk / "ballast").unlink()
    with held(small_disk / "lock", "a job"):
        pass


def test_a_full_disk_does_not_tear_a_manifest(small_disk: Path) -> None:
    path = small_disk / "lines"
    append_line(path, {"first": 1})
    (small_disk / "ballast").write_bytes(b"x" * ((1 << 20) - 4096))
    with pytest.raises(StorageError):
        append_line(path, {"second": "y" * 10_000})
    (small_disk / "ballast").unlink()
    append_line(path, {"third": 3})
    assert list(read_lines(path)) == [{"first": 1}, {"third": 3}]


def test_a_line_cut_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"b": ')
    append_line(path, {"c": 3})
    assert list(read_lines(path)) == [{"a": 1}, {"c": 3}]


def test_rows_come_back_in_the_order_of_their_parts(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "job", JOB, JsonLines()) as store:
        assert store.write([]) is None
        for number in range(12):
            store.write([{"id": str(number)}])
    with ShardStore(tmp_path / "job", dict(reversed(JOB.items())), JsonLines()) as again:
        assert [row["id"] for row in again.rows()] == [str(number) for number in range(12)]
        again.write([{"id": "12"}])
        assert again.parts()[-1].name == "part-000012.jsonl"


def test_another_prompt_is_another_job_and_says_what_differs(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "job", JOB, JsonLines()):
        pass
    other = ShardStore(tmp_path / "job", JOB | {"prompt": "What is it?"}, JsonLines())
    with pytest.raises(ConfigError, match=r"prompt was .Describe the picture..*is .What is it") as caught, other:
        pass
    assert "model" not in caught.value.message
    assert fingerprint(JOB) != other.fingerprint


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holiday\.jpg"), ShardStore(tmp_path, JOB, JsonLines()):
        pass
    assert (tmp_path / "holiday.jpg").exists()


def test_a_part_finished_just_before_a_crash_counts_and_a_deleted_one_is_missed(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "job", JOB, JsonLines()) as store:
        store.write([{"id": "a"}])
        store.write([{"id": "b"}])
    manifest = tmp_path / "job" / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes().splitlines(keepends=True)[0])
    (tmp_path / "job" / ".part-000002.jsonl.1.tmp").write_bytes(b'{"id":')
    with ShardStore(tmp_path / "job", JOB, JsonLines()) as again:
        assert [row["id"] for row in again.rows()] == ["a", "b"]
        assert not list((tmp_path / "job").glob(".*"))
        (tmp_path / "job" / "part-000000.jsonl").unlink()
        assert again.lost() == ["part-000000.jsonl"]
        again.write([{"id": "a"}])
        assert [row["id"] for row in again.rows()] == ["b", "a"]


def test_two_processes_do_not_write_one_store(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from shared.durable import held\n"
        "with held(Path(sys.argv[1]), 'x'): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(InUse, match=f"process {child.pid}"), held(tmp_path / "lock", "x"):
        pass
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with held(tmp_path / "lock", "x"):
        pass


def test_a_killed_writer_leaves_whole_parts(tmp_path: Path) -> None:
    """B2, B7: SIGKILL at any moment; every part that is there can be read, and the store goes on."""
    code = (
        "import sys; from pathlib import Path; from shared.shards import JsonLines, ShardStore\n"
        f"with ShardStore(Path(sys.argv[1]), {JOB!r}, JsonLines()) as store:\n"
        "    print('ready', flush=True)\n"
        "    while True: store.write([{'id': str(n), 'text': 'x' * 200} for n in range(500)])"
    )
    total = 0
    for seed in range(4):
        command = [sys.executable, "-c", code, str(tmp_path / "job")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.05 + 0.037 * seed)
        child.kill()
        child.wait()
        with ShardStore(tmp_path / "job", JOB, JsonLines()) as store:
            rows = sum(1 for _ in store.rows())
            assert rows % 500 == 0
            assert rows >= total
            assert store.lost() == []
            total = rows
    assert total > 0


def test_names_that_are_no_unicode_survive(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    with ShardStore(tmp_path / "job", JOB, JsonLines()) as store:
        store.write([{"id": name}, {"id": "emoji 🎈, comma\nnewline"}])
        assert [row["id"] for row in store.rows()] == [name, "emoji 🎈, comma\nnewline"]
    assert "🎈" in (tmp_path / "job" / "part-000000.jsonl").read_text()


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "job", JOB, JsonLines()) as store:
        part = store.write([{"id": "a"}])
        assert part is not None
        part.path.write_text(json.dumps({"id": "a"}) + "\nnot json\n")
        with pytest.raises(ConfigError, match="line 2"):
            list(store.rows())


def test_a_set_of_many_ids_is_exact_and_small() -> None:
    ids = IdSet(f"row {number}" for number in range(150_000))
    assert len(ids) == 150_000
    assert all(f"row {number}" in ids for number in range(0, 150_000, 7))
    assert not any(f"other {number}" in ids for number in range(1000))
    assert not ids.add("row 3")
    assert ids.add("new")
