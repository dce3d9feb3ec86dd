"""Image URLs over HTTP: what is read, what is refused, and that a refusal tells nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from shared import addresses, fetch
from shared.config import ImageSettings
from shared.errors import BadImage, FetchFailed, ImageTooLarge, RequestError
from shared.fetch import ImageFetcher
from tests.shared.sites import Names, Site, response
from tests.shared.url_vectors import BAD_LOCATIONS, KINDS, REFUSED

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
#: loopback addresses; the tests make the first a public one
PUBLIC, PUBLIC_TOO, INSIDE = "127.0.0.9", "127.0.0.10", "127.0.0.1"

Load = Callable[[str], Awaitable[bytes]]


@pytest.fixture
async def sites(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Site, Site]]:
    """Two servers on one port: at an address that counts as public, and at a loopback address."""
    kind_of = addresses.kind_of
    monkeypatch.setattr(
        addresses, "kind_of", lambda address: "public" if address in (PUBLIC, PUBLIC_TOO) else kind_of(address)
    )
    async with contextlib.AsyncExitStack() as stack:
        while True:
            outside = await stack.enter_async_context(Site().running(PUBLIC))
            try:
                inside = await stack.enter_async_context(Site().running(INSIDE, outside.port))
                break
            except OSError:  # somebody else has that port
                continue
        outside.answers["/a.png"] = response(200, PNG)
        inside.answers["/a.png"] = response(200, b"secret")
        yield outside, inside


@pytest.fixture
def outside(sites: tuple[Site, Site]) -> Site:
    return sites[0]


@pytest.fixture
def inside(sites: tuple[Site, Site]) -> Site:
    return sites[1]


@pytest.fixture
def names() -> Names:
    return Names(
        public_test=[[PUBLIC]],
        inside_test=[[INSIDE]],
        mixed_test=[[PUBLIC, INSIDE]],
        rebinding_test=[[PUBLIC], [INSIDE]],
        dead_test=[[PUBLIC_TOO]],
        first_dead_test=[[PUBLIC_TOO, PUBLIC]],
    )


@pytest.fixture
async def load(names: Names) -> AsyncIterator[Load]:
    fetcher = ImageFetcher(ImageSettings(fetch_timeout=1, max_bytes=100_000, max_redirects=3), resolve=names)
    yield fetcher.load
    await fetcher.aclose()


async def refusal(load: Load, url: str) -> str:
    with pytest.raises(RequestError) as caught:
        await load(url)
    assert caught.value.status == 400
    assert "Error" not in caught.value.message
    assert "object at" not in caught.value.message
    return caught.value.message


# what works


async def test_plain(load: Load, outside: Site) -> None:
    assert await load(f"http://public.test:{outside.port}/a.png?token=1#part") == PNG
    head = outside.requests[0].lower()
    assert head.startswith("get /a.png?token=1 http/1.1")
    assert f"host: public.test:{outside.port}" in head
    assert "cookie" not in head
    assert "authorization" not in head


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


# redirects


async def test_redirects_are_followed(load: Load, outside: Site) -> None:
    outside.answers["/1"] = response(301, location="2?x=1")
    outside.answers["/2"] = response(307, location=f"http://public.test:{outside.port}/3")
    outside.answers["/3"] = response(308, location=f"//public.test:{outside.port}/a.png")
    assert await load(f"http://public.test:{outside.port}/1") == PNG


async def test_redirects_are_counted(load: Load, outside: Site) -> None:
    for hop in range(20):
        outside.answers[f"/{hop}"] = response(302, location=f"/{hop + 1}")
    assert "more than 3 times" in await refusal(load, f"http://public.test:{outside.port}/0")
    assert len(outside.requests) == 4


@pytest.mark.parametrize(
    "location",
    BAD_LOCATIONS,
)
async def test_redirects_are_checked(load: Load, outside: Site, inside: Site, location: str) -> None:
    outside.answers["/go"] = response(302, location=location.format(port=outside.port))
    await refusal(load, f"http://public.test:{outside.port}/go")
    assert not inside.connections


# where it may not lead


@pytest.mark.parametrize("url", REFUSED)
async def test_refused_urls(load: Load, outside: Site, inside: Site, url: str) -> None:
    message = await refusal(load, url.format(port=outside.port))
    assert "password" not in message
    assert len(message) < 400
    assert not inside.connections
    assert not outside.connections


@pytest.mark.parametrize(
    "url", ["", "  ", "hello", "/etc/passwd", "//public.test/a.png", "aGVsbG8gd29ybGQ=", "a" * 500]
)
async def test_not_urls(load: Load, url: str) -> None:
    with pytest.raises(BadImage) as caught:
        await load(url)
    assert "data:" in caught.value.message


@pytest.mark.parametrize("url", [None, 7, b"data:,x", {"url": "data:,x"}, ["data:,x"]])
async def test_not_strings(load: Load, url: object) -> None:
    with pytest.raises(BadImage, match="must be a string"):
        await load(url)  # type: ignore[arg-type]


async def test_answers_tell_nothing_about_ports_inside(load: Load, inside: Site) -> None:
    with socket.socket() as closed:
        closed.bind((INSIDE, 0))
        port = closed.getsockname()[1]
        for form in ("http://inside.test:{}/a.png", "http://127.0.0.1:{}/a.png", "https://inside.test:{}/a.png"):
            open_answer = await refusal(load, form.format(inside.port))
            closed_answer = await refusal(load, form.format(port))
            assert open_answer.replace(str(inside.port), "") == closed_answer.replace(str(port), "")
        unknown = await refusal(load, f"http://unknown.test:{port}/a.png")
        assert unknown == (await refusal(load, f"http://inside.test:{port}/a.png")).replace("inside", "unknown")


async def test_rebinding(load: Load, outside: Site, inside: Site, names: Names) -> None:
    """The name is looked up once for a connection; the next look-up is checked anew."""
    url = f"http://rebinding.test:{outside.port}/a.png"
    outside.answers["/last"] = response(200, PNG, connection="close")
    assert await load(url.replace("a.png", "last")) == PNG
    assert names.lookups == ["rebinding.test"]
    assert "no address that may be read" in await refusal(load, url)
    assert names.lookups == ["rebinding.test"] * 2
    assert not inside.connections


async def test_private_hosts_where_permitted(inside: Site, names: Names) -> None:
    fetcher = ImageFetcher(ImageSettings(allow_private_hosts=True), resolve=names)
    assert await fetcher.load(f"http://inside.test:{inside.port}/a.png") == b"secret"
    for url in ("http://169.254.169.254/", "http://[fd00:ec2::254]/", "http://0.0.0.0/", "http://224.0.0.1/"):
        assert "no address that may be read" in await refusal(fetcher.load, url)
    await fetcher.aclose()


async def test_listed_hosts(outside: Site, inside: Site, names: Names) -> None:
    names.answers |= {"a.cdn.test": [[PUBLIC]], "cdn.test": [[PUBLIC]], "evilcdn.test": [[PUBLIC]]}
    limits = ImageSettings(allowed_hosts=("Public.test", ".cdn.test", "inside.test"))
    fetcher = ImageFetcher(limits, resolve=names)
    outside.answers["/go"] = response(302, location=f"http://evilcdn.test:{outside.port}/a.png")
    for host in ("public.test", "PUBLIC.TEST.", "a.cdn.test"):
        assert await fetcher.load(f"http://{host}:{outside.port}/a.png") == PNG
    for host in ("cdn.test", "evilcdn.test", "public.test.evil.test", "x.public.test", PUBLIC):
        assert "not among the permitted" in await refusal(fetcher.load, f"http://{host}:{outside.port}/a.png")
    assert "not among the permitted" in await refusal(fetcher.load, f"http://public.test:{outside.port}/go")
    assert "no address" in await refusal(fetcher.load, f"http://inside.test:{outside.port}/a.png")
    await fetcher.aclose()


async def test_tls_keeps_the_name(outside: Site, names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SNI and certificate go by the name although the connection goes by the address."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=public.test", "-addext", "subjectAltName=DNS:public.test"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *subject]
    try:
        await asyncio.to_thread(
            subprocess.run, [*command, "-keyout", key, "-out", certificate], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl that can make a certificate")
    server_names: list[str] = []
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    server.sni_callback = lambda _, name, __: server_names.append(name)
    client = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(fetch, "_tls", lambda: client)
    fetcher = ImageFetcher(ImageSettings(fetch_timeout=2), resolve=names)
    async with Site().running(PUBLIC, tls=server) as site:
        site.answers["/a.png"] = response(200, PNG)
        assert await fetcher.load(f"https://public.test:{site.port}/a.png") == PNG
        assert server_names == ["public.test"]
        names.answers["other.test"] = [[PUBLIC]]
        assert "no connection" in await refusal(fetcher.load, f"https://other.test:{site.port}/a.png")
    await fetcher.aclose()


async def test_system_resolver(inside: Site) -> None:
    fetcher = ImageFetcher(ImageSettings(allow_private_hosts=True))
    assert await fetcher.load(f"http://localhost:{inside.port}/a.png") == b"secret"
    await fetcher.aclose()
    strict = ImageFetcher(ImageSettings())
    assert "no address" in await refusal(strict.load, f"http://localhost:{inside.port}/a.png")
    await strict.aclose()


def test_redaction() -> None:
    url = httpx.URL("https://user:pw@example.org:8443/a/b.png?X-Amz-Signature=1#f")
    assert fetch.redact(url) == "https://example.org:8443/a/b.png"
    assert len(fetch.redact(httpx.URL("https://example.org/" + "a" * 5000))) < 200
    assert fetch.redact(httpx.URL("http://[2600::1]:80/")) == "http://[2600::1]/"


@pytest.mark.parametrize(
    ("address", "kind"),
    KINDS,
)
def test_kinds_of_addresses(address: str, kind: str) -> None:
    assert addresses.kind_of(address) == kind


async def test_failures_are_of_the_right_class(load: Load) -> None:
    with pytest.raises(FetchFailed):
        await load("ftp://x/")
    with pytest.raises(FetchFailed):
        await load("http://127.0.0.1/")
