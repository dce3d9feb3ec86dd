"""``data:`` and ``file:`` URLs."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import ImageSettings
from shared.data_urls import read_data_url
from shared.errors import BadImage, FetchFailed, ImageTooLarge, RequestError
from shared.fetch import ImageFetcher

DATA = bytes(range(256)) + b"\xfb\xff\xfe"
TEXT = base64.b64encode(DATA).decode()
SAFE = base64.urlsafe_b64encode(DATA).decode()

GOOD = [
    f"data:image/png;base64,{TEXT}",
    f"DATA:image/png;base64,{TEXT}",
    f"Data:IMAGE/PNG;BASE64,{TEXT}",
    f"data:image/jpeg;charset=utf-8;base64,{TEXT}",
    f"data:image/jpeg;charset=utf-8;name=a.jpg;base64,{TEXT}",
    f"data:image/jpeg;base64;charset=utf-8,{TEXT}",
    f"data:image/jpeg; base64,{TEXT}",
    f"data:;base64,{TEXT}",
    f"data:text/html;base64,{TEXT}",
    f"data:image/png;base64, {TEXT}",
    f"data:image/png;base64,{TEXT}\n",
    f"  data:image/png;base64,{TEXT}",
    "data:image/png;base64," + "\n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76)),
    "data:image/png;base64," + "\r\n\t ".join(TEXT[at : at + 7] for at in range(0, len(TEXT), 7)),
    f"data:image/png;base64,{SAFE}",
    f"data:image/png;base64,{TEXT.rstrip('=')}",
    f"data:image/png;base64,{SAFE.rstrip('=')}",
    f"data:image/png;base64,{quote(TEXT, safe='')}",
    f"data:image/png;base64,{TEXT.replace('+', '%2B').replace('=', '%3d')}",
    f"data:image/png,{quote(DATA)}",
    f"data:,{quote(DATA, safe='')}",
]

BAD = [
    "data:",
    "data:image/png",
    "data:image/png;base64",
    "data:image/png;base64,",
    "data:image/png;base64,    ",
    "data:,",
    "data:image/png;base64,A",
    "data:image/png;base64,AAAAA",
    "data:image/png;base64,AA===",
    "data:image/png;base64,====",
    "data:image/png;base64,AA=A",
    "data:image/png;base64,AAAA!AAA",
    "data:image/png;base64,AAAA#AAA",
    "data:image/png;base64,AAAÄ",
    "data:image/png;base64,%zz",
    "data:image/png;base64,data:image/png;base64,AAAA",
    "data:image/png;" + "x" * 5000 + ";base64,AAAA",
]


@pytest.fixture
async def fetcher(tmp_path: Path) -> AsyncIterator[ImageFetcher]:
    (tmp_path / "root").mkdir()
    one = ImageFetcher(ImageSettings(max_bytes=1000, file_roots=(tmp_path / "root",)))
    yield one
    await one.aclose()


@pytest.mark.parametrize("url", GOOD)
async def test_good_data_urls(fetcher: ImageFetcher, url: str) -> None:
    assert await fetcher.load(url) == DATA


@pytest.mark.parametrize("url", BAD)
async def test_bad_data_urls(fetcher: ImageFetcher, url: str) -> None:
    with pytest.raises(BadImage) as caught:
        await fetcher.load(url)
    assert "data URL" in caught.value.message


@pytest.mark.parametrize("size", [1001, 5000, 100_000, 1_000_000])
async def test_data_urls_above_the_limit(fetcher: ImageFetcher, size: int) -> None:
    with pytest.raises(ImageTooLarge, match=r"at most 1000|more than 1000"):
        await fetcher.load("data:;base64," + base64.b64encode(bytes(size)).decode())
    with pytest.raises(ImageTooLarge):
        await fetcher.load("data:," + "a" * size)


async def test_largest_data_url() -> None:
    fetcher = ImageFetcher(ImageSettings())
    url = "data:;base64," + base64.b64encode(bytes(32 << 20)).decode()
    begin = time.process_time()
    assert len(await fetcher.load(url)) == 32 << 20
    assert time.process_time() - begin < 2
    await fetcher.aclose()


@given(st.binary(min_size=1, max_size=300), st.booleans(), st.booleans(), st.integers(1, 80))
def test_any_bytes_survive(data: bytes, safe: bool, padded: bool, width: int) -> None:
    text = (base64.urlsafe_b64encode if safe else base64.b64encode)(data).decode()
    text = text if padded else text.rstrip("=")
    lines = "\n".join(text[at : at + width] for at in range(0, len(text), width))
    assert read_data_url(f"data:image/png;base64,{lines}", 300) == data
    assert read_data_url(f"data:image/png;base64,{quote(text)}", 300) == data
    assert read_data_url(f"data:,{quote(data)}", 300) == data


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_text_gives_bytes_or_our_errors(text: str) -> None:
    for url in (f"data:{text}", f"data:;base64,{text}", f"data:{text};base64,AAAA"):
        try:
            assert isinstance(read_data_url(url, 1000), bytes)
        except RequestError as error:
            assert error.status == 400


# files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A root with a picture and every way out of it that a stranger may try."""
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    (root / "a.png").write_bytes(DATA)
    (root / "ä b%20.png").write_bytes(DATA)
    (root / "sub").mkdir()
    (root / "sub" / "b.png").write_bytes(DATA)
    (root / "large.png").write_bytes(bytes(1001))
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "rooted").mkdir()
    (tmp_path / "rooted" / "secret").write_bytes(b"secret")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    (root / "in").symlink_to(root / "a.png")
    (root / "loop").symlink_to(root / "loop")
    (root / "device").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.parametrize(
    "form",
    [
        "file://{root}/a.png",
        "file:{root}/a.png",
        "FILE://{root}/a.png",
        "file://localhost{root}/a.png",
        "file://{root}/sub/b.png",
        "file://{root}/sub/../a.png",
        "file://{root}/%61.png",
        "file://{root}/%C3%A4%20b%2520.png",
        "file://{root}/in",
    ],
)
async def test_files_below_a_root(fetcher: ImageFetcher, tree: Path, form: str) -> None:
    assert await fetcher.load(form.format(root=tree)) == DATA


@pytest.mark.parametrize(
    "form",
    [
        "file:///etc/passwd",
        "file:/etc/passwd",
        "file://{root}/../secret",
        "file://{root}/%2e%2e/secret",
        "file://{root}/%2E%2E%2Fsecret",
        "file://{root}/%252e%252e/secret",
        "file://{root}/sub/../../secret",
        "file://{root}/../rooted/secret",
        "file://{root}ed/secret",
        "file://{root}/out",
        "file://{root}/up/secret",
        "file://{root}/up/root/../secret",
        "file://{root}/loop",
        "file://{root}/device",
        "file://{root}/pipe",
        "file://{root}/sub",
        "file://{root}",
        "file://{root}/missing.png",
        "file://{root}/a.png%00.jpg",
        "file://{root}/a.png?x",
        "file://{root}/a.png#x",
        "file://{root}/a.png/",
        "file://{root}/a.png/.",
        "file://server{root}/a.png",
        "file://127.0.0.1{root}/a.png",
        "file:a.png",
        "file:",
        "file://",
        "file:///",
        "file:///proc/self/environ",
        "file:///dev/zero",
        "file:///%",
        "file:///" + "a" * 5000,
    ],
)
async def test_files_that_are_not(fetcher: ImageFetcher, tree: Path, form: str) -> None:
    with pytest.raises(FetchFailed) as caught:
        await fetcher.load(form.format(root=tree))
    assert str(tree) not in caught.value.message


async def test_outside_and_missing_sound_alike(fetcher: ImageFetcher, tree: Path) -> None:
    messages = set()
    for path in ("/etc/passwd", "/etc/no-such-file", f"{tree}/no-such-file", f"{tree}/out"):
        with pytest.raises(FetchFailed) as caught:
            await fetcher.load(f"file://{path}")
        messages.add(caught.value.message)
    assert len(messages) == 1


async def test_large_files(fetcher: ImageFetcher, tree: Path) -> None:
    with pytest.raises(ImageTooLarge, match="1000 bytes"):
        await fetcher.load(f"file://{tree}/large.png")


async def test_no_roots_no_files(tree: Path) -> None:
    fetcher = ImageFetcher(ImageSettings())
    with pytest.raises(FetchFailed, match="file_roots"):
        await fetcher.load(f"file://{tree}/a.png")
    await fetcher.aclose()


async def test_root_behind_a_link(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)
    fetcher = ImageFetcher(ImageSettings(file_roots=(tmp_path / "link",)))
    assert await fetcher.load(f"file://{tmp_path}/link/a.png") == DATA
    assert await fetcher.load(f"file://{tree}/a.png") == DATA
    await fetcher.aclose()


async def test_swapped_link(fetcher: ImageFetcher, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that turns into a link between the check and the opening."""
    resolve = Path.resolve

    def swap(path: Path, strict: bool = False) -> Path:
        real = resolve(path, strict)
        if path.name == "b.png" and (tree / "sub").is_dir() and not (tree / "sub").is_symlink():
            (tree / "sub").rename(tree / "old")
            (tree.parent / "rooted" / "b.png").write_bytes(b"secret")
            (tree / "sub").symlink_to(tree.parent / "rooted")
        return real

    monkeypatch.setattr(Path, "resolve", swap)
    with pytest.raises(FetchFailed):
        await fetcher.load(f"file://{tree}/sub/b.png")
