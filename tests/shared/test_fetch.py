"""Image URLs over HTTP: what is read, and what the far end may do wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from shared.config import ImageSettings
from shared.errors import ImageTooLarge
from shared.fetch import ImageFetcher
from shared.keys import bytes_digest
from tests.shared import sites as site_fixtures
from tests.shared.sites import PNG, PUBLIC, Load, Names, Site, refusal, response

# fixtures
sites, outside, inside = site_fixtures.sites, site_fixtures.outside, site_fixtures.inside
names, load = site_fixtures.names, site_fixtures.load


# what works


async def test_plain(load: Load, outside: Site) -> None:
    assert await load(f"http://public.test:{outside.port}/a.png?token=1#part") == PNG
    head = outside.requests[0].lower()
    assert head.startswith("get /a.png?token=1 http/1.1")
    assert f"host: public.test:{outside.port}" in head
    assert "cookie" not in head
    assert "authorization" not in head


async def test_what_is_behind_a_url_now_is_what_counts(load: Load, outside: Site) -> None:
    """C11: another picture under the same URL, with the same ETag and years to live; nothing is found by its URL."""
    forever = {"etag": '"same"', "cache_control": "max-age=31536000, immutable"}
    other = PNG + b"\0"
    for body in (PNG, other, PNG):
        outside.answers["/now"] = response(200, body, **forever)
        assert await load(f"http://public.test:{outside.port}/now") == body
    assert len({bytes_digest(PNG), bytes_digest(other)}) == 2
    assert "if-none-match" not in outside.requests[-1].lower()


async def test_case_and_trailing_dot(load: Load, outside: Site) -> None:
    assert await load(f"HTTP://PUBLIC.test.:{outside.port}/a.png") == PNG


async def test_literal_address(load: Load, outside: Site, names: Names) -> None:
    assert await load(f"http://{PUBLIC}:{outside.port}/a.png") == PNG
    assert not names.lookups


async def test_second_address_when_the_first_is_dead(load: Load, outside: Site) -> None:
    assert await load(f"http://first.dead.test:{outside.port}/a.png") == PNG


async def test_wrong_content_type_is_no_matter(load: Load, outside: Site) -> None:
    outside.answers["/b"] = response(200, PNG, content_type="text/html")
    assert await load(f"http://public.test:{outside.port}/b") == PNG


async def test_chunked_and_until_close(load: Load, outside: Site) -> None:
    body = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    outside.answers["/chunked"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body

    async def until_close(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")

    outside.answers["/close"] = until_close
    assert await load(f"http://public.test:{outside.port}/chunked") == b"abcde"
    assert await load(f"http://public.test:{outside.port}/close") == b"abc"


async def test_connections_are_used_again_and_cookies_are_not(load: Load, outside: Site, names: Names) -> None:
    outside.answers["/cookie"] = response(200, PNG, set_cookie="a=b; Path=/")
    for _ in range(3):
        await load(f"http://public.test:{outside.port}/cookie")
    assert outside.connections == 1
    assert names.lookups == ["public.test"]
    assert not any("cookie:" in request.lower() for request in outside.requests)


async def test_proxies_of_the_environment_take_no_part(
    outside: Site, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    fetcher = ImageFetcher(ImageSettings(), resolve=names)
    assert await fetcher.load(f"http://public.test:{outside.port}/a.png") == PNG
    await fetcher.aclose()


async def test_many_at_once(outside: Site, names: Names) -> None:
    fetcher = ImageFetcher(ImageSettings(), resolve=names)
    found = await asyncio.gather(*(fetcher.load(f"http://public.test:{outside.port}/a.png?{n}") for n in range(150)))
    assert set(found) == {PNG}
    await fetcher.aclose()


# failures of the far end


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (response(404), "status 404"),
        (response(500), "status 500"),
        (response(204), "status 204"),
        (response(304), "status 304"),
        (response(401, www_authenticate="Basic"), "status 401"),
        (response(302), "status 302"),
        (response(200, PNG, content_encoding="gzip"), "content encoding"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 50_000, "not HTTP"),
    ],
)
async def test_bad_answers(load: Load, outside: Site, answer: bytes, words: str) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    outside.answers["/x"] = write
    message = await refusal(load, f"http://public.test:{outside.port}/x?secret")
    assert words in message
    assert f"http://public.test:{outside.port}/x" in message
    assert "secret" not in message


async def test_body_shorter_than_announced(load: Load, outside: Site) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, PNG, length=1000))

    outside.answers["/x"] = write
    assert "broke" in await refusal(load, f"http://public.test:{outside.port}/x")


async def test_nobody_listens(load: Load, outside: Site) -> None:
    assert "no connection" in await refusal(load, f"http://dead.test:{outside.port}/a.png")


async def _silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3)


async def _slow_head(writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc":
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.1)


async def _dripping(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(40):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("answer", [_silent, _slow_head, _dripping])
async def test_one_deadline_for_all_of_it(load: Load, outside: Site, answer: Callable) -> None:
    outside.answers["/x"] = answer
    begin = time.monotonic()
    assert "took longer than 1 s" in await refusal(load, f"http://public.test:{outside.port}/x")
    assert time.monotonic() - begin < 1.5


async def test_slow_redirects_share_the_deadline(load: Load, outside: Site) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.6)
        writer.write(response(302, location="/x"))

    outside.answers["/x"] = slow
    assert "took longer than 1 s" in await refusal(load, f"http://public.test:{outside.port}/x")


async def test_slow_resolver(outside: Site) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(9)
        return [PUBLIC]

    fetcher = ImageFetcher(ImageSettings(fetch_timeout=0.2), resolve=resolve)
    assert "took longer" in await refusal(fetcher.load, f"http://public.test:{outside.port}/a.png")
    await fetcher.aclose()


async def test_announced_size(load: Load, outside: Site) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, b"x" * 10, length=100_001))

    outside.answers["/x"] = write
    with pytest.raises(ImageTooLarge, match="100001 bytes"):
        await load(f"http://public.test:{outside.port}/x")


async def test_endless_body_is_cut_off(load: Load, outside: Site) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    outside.answers["/x"] = endless
    with pytest.raises(ImageTooLarge):
        await load(f"http://public.test:{outside.port}/x")
    assert sent < 20 << 20


async def test_largest_body_allowed(load: Load, outside: Site) -> None:
    outside.answers["/x"] = response(200, b"x" * 100_000)
    assert len(await load(f"http://public.test:{outside.port}/x")) == 100_000
