"""From an image URL to bytes: ``data:``, ``http(s):`` and, where permitted, ``file:``.

The caller of a service decides where the service connects; so each hop of each URL is checked (`shared.addresses`),
one deadline holds for the whole of it, and bytes are counted while they arrive. No proxy, netrc, cookie or credential
of this machine takes part. A refused address and a name that does not exist get the same answer, and nothing is
connected to before the check: an answer tells nothing about ports inside.
"""

from __future__ import annotations

import asyncio
import functools
import re
import ssl
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpcore
import httpx

from shared.addresses import AddressRefused, CheckedBackend, Resolve, Resolver, is_odd_number
from shared.config import ImageSettings
from shared.data_urls import read_data_url
from shared.errors import BadImage, FetchFailed, ImageTooLarge
from shared.local_files import read_file_url

MAX_URL_LENGTH = 8192
#: payloads above this many characters are decoded beside the event loop
_INLINE_CHARACTERS = 256 << 10
_CONNECTIONS = 64

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}):")
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\xa0\\\u2028\u2029\ufeff]")
_USERINFO = re.compile(r"[^/?#]*//[^/?#]*@")  # httpx drops an empty one
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"User-Agent": "lookonce", "Accept": "image/*, */*;q=0.1", "Accept-Encoding": "identity"}
_FORMS = "send a data: or an http(s) URL"


class ImageFetcher:
    """Reads image URLs within limits.

    Args:
        limits: sizes, times, hops, and what may be connected to.
        resolve: replaces the system's resolver.
    """

    def __init__(self, limits: ImageSettings, *, resolve: Resolve | None = None) -> None:
        self._limits = limits
        self._roots = tuple(root.resolve() for root in limits.file_roots)
        self._allowed_hosts = tuple(host.lower().rstrip(".") for host in limits.allowed_hosts)
        self._resolver = Resolver()
        self._client = httpx.AsyncClient(
            transport=_Transport(CheckedBackend(resolve or self._resolver, limits.allow_private_hosts)),
            headers=_HEADERS,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            timeout=limits.fetch_timeout,
            follow_redirects=False,
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()
        self._resolver.close()

    async def load(self, url: str) -> bytes:
        """Bytes of the image behind a URL; whether they are one is for `shared.images` to say.

        Raises:
            BadImage: not a URL, or a data URL that cannot be read.
            FetchFailed: a URL that may not or cannot be read.
            ImageTooLarge: more bytes than allowed.
        """
        if not isinstance(url, str):
            raise BadImage(f"an image URL must be a string; {_FORMS}")
        url = url.strip(" \t\r\n") if url[:64].lstrip().lower().startswith("data:") else url
        scheme = _SCHEME.match(url)
        if scheme is None:
            raise BadImage(_not_a_url(url))
        match scheme.group(1).lower():
            case "data":
                if len(url) < _INLINE_CHARACTERS:
                    return read_data_url(url, self._limits.max_bytes)
                return await asyncio.to_thread(read_data_url, url, self._limits.max_bytes)
            case "http" | "https":
                return await self._load_http(url)
            case "file":
                return await asyncio.to_thread(read_file_url, url, self._roots, self._limits.max_bytes)
            case other:
                raise FetchFailed(f"image URLs of the scheme {other}: are not accepted; {_FORMS}")

    async def _load_http(self, text: str) -> bytes:
        url = self._check(text)
        try:
            async with asyncio.timeout(self._limits.fetch_timeout):
                for _ in range(self._limits.max_redirects + 1):
                    found = await self._hop(url)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except (TimeoutError, httpx.TimeoutException) as error:
            raise FetchFailed(
                f"the image at {redact(url)} took longer than {self._limits.fetch_timeout:g} s"
            ) from error
        except AddressRefused as error:
            raise FetchFailed(f"the host of {redact(url)} has no address that may be read") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            raise FetchFailed(f"the image at {redact(url)} could not be read: {_reason(error)}") from error
        raise FetchFailed(
            f"the image URL redirects more than {self._limits.max_redirects} times, last to {redact(url)}"
        )

    async def _hop(self, url: httpx.URL) -> bytes | httpx.URL:
        """One request: the body, or where it redirects to."""
        limit = self._limits.max_bytes
        async with self._client.stream("GET", url) as response:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                location = response.headers["location"]
                if _UNSAFE.search(location):
                    raise FetchFailed(f"{redact(url)} redirects to something that is not a URL")
                return self._check(str(url.join(location)))
            if response.status_code != 200:
                raise FetchFailed(f"the image at {redact(url)} was answered with status {response.status_code}")
            if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise FetchFailed(f"the image at {redact(url)} comes with a content encoding that was not asked for")
            announced = response.headers.get("content-length", "")
            if announced.isdecimal() and int(announced[:20]) > limit:
                raise ImageTooLarge(
                    f"the image at {redact(url)} has {announced[:20]} bytes; at most {limit} are allowed"
                )
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > limit:
                    raise ImageTooLarge(f"the image at {redact(url)} has more than {limit} bytes")
            return bytes(body)

    def _check(self, text: str) -> httpx.URL:
        """Parses a URL, the one time that this happens, and checks everything but addresses."""
        if len(text) > MAX_URL_LENGTH:
            raise FetchFailed(f"the image URL has more than {MAX_URL_LENGTH} characters")
        if _UNSAFE.search(text):
            raise FetchFailed("the image URL holds backslashes, spaces or control characters; percent-encode them")
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise FetchFailed("the image URL cannot be parsed") from error
        if url.scheme not in ("http", "https"):
            raise FetchFailed(f"image URLs may not redirect to the scheme {url.scheme[:30]}:")
        host = url.raw_host.decode("ascii").lower()
        if not host:
            raise FetchFailed("the image URL has no host")
        if url.port is not None and not 0 < url.port < 65536:
            raise FetchFailed("the image URL's port is not between 1 and 65535")
        if url.userinfo or _USERINFO.match(text):
            raise FetchFailed(f"the image URL {redact(url)} carries credentials, which are not accepted")
        if is_odd_number(host):
            raise FetchFailed("the image URL's host is a number; write an IPv4 address as four decimal numbers")
        if self._allowed_hosts and not self._is_listed(host.rstrip(".")):
            raise FetchFailed(f"the host of {redact(url)} is not among the permitted ones")
        return url

    def _is_listed(self, host: str) -> bool:
        return any(host.endswith(entry) if entry.startswith(".") else host == entry for entry in self._allowed_hosts)


@functools.cache
def _tls() -> ssl.SSLContext:
    """Certificates of the public web; reading them takes tens of milliseconds, so once."""
    return httpx.create_ssl_context(trust_env=False)


class _Transport(httpx.AsyncHTTPTransport):
    """httpx's transport over a pool with our network backend, which httpx has no argument for."""

    def __init__(self, backend: httpcore.AsyncNetworkBackend) -> None:
        super().__init__(verify=_tls(), trust_env=False)
        self._pool: Any = httpcore.AsyncConnectionPool(
            ssl_context=_tls(),
            max_connections=_CONNECTIONS,
            max_keepalive_connections=_CONNECTIONS // 4,
            keepalive_expiry=15.0,
            network_backend=backend,
        )


def redact(url: httpx.URL) -> str:
    """A URL for messages: scheme, host, port and the start of the path; no credentials, no query."""
    host = f"[{url.host}]" if ":" in url.host else url.host
    port = "" if url.port is None else f":{url.port}"
    path = url.raw_path.partition(b"?")[0].decode("ascii", "replace")
    return f"{url.scheme}://{host}{port}{path if len(path) <= 120 else path[:120] + '…'}"


def _not_a_url(text: str) -> str:
    if not text.strip():
        return f"the image URL is empty; {_FORMS}"
    if len(text) > 64 and re.fullmatch(r"[A-Za-z0-9+/_=\s-]{64}", text[:64]):
        return "the image URL is bare base64; put data:image/png;base64, before it"
    return f"the image URL has no scheme; {_FORMS}"


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        return "no connection"
    if isinstance(error, httpx.ProtocolError):
        return "the connection broke or is not HTTP"
    return "the transfer broke off"
