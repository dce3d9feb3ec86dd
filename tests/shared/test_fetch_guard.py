"""Image URLs that must not lead anywhere, and that a refusal tells nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from shared import addresses, fetch
from shared.config import ImageSettings
from shared.errors import BadImage, FetchFailed
from shared.fetch import ImageFetcher
from tests.shared import sites as site_fixtures
from tests.shared.sites import INSIDE, PNG, PUBLIC, Load, Names, Site, refusal, response
from tests.shared.url_vectors import BAD_LOCATIONS, KINDS, REFUSED

# fixtures
sites, outside, inside = site_fixtures.sites, site_fixtures.outside, site_fixtures.inside
names, load = site_fixtures.names, site_fixtures.load


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
