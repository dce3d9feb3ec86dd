"""Which addresses a client's URL may lead to, and a network backend that connects to nothing else.

A name is resolved once, here; every address it has is checked, and the connection goes to an address that was checked.
A name that answers differently the next time (DNS rebinding) gains nothing. `ipaddress.is_global` is not used as a
guard: it calls multicast, NAT64, 6to4 and IPv4-compatible spellings of inside addresses global.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore

#: from a host name and a port to the addresses behind it, as text
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

#: addresses tried of one name
MAX_ATTEMPTS = 4

# services of clouds that answer with credentials; some of these addresses look public
_METADATA = tuple(map(ipaddress.ip_network, ("169.254.169.254", "100.100.100.200", "168.63.129.16", "fd00:ec2::254")))

# kinds that `allow_private_hosts` opens
_INSIDE = {
    "loopback": ("127.0.0.0/8", "::1"),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"),
    "link-local": ("169.254.0.0/16", "fe80::/10"),
}

# kinds that nothing opens
_NEVER = {
    "unspecified": ("0.0.0.0/8", "::"),
    "multicast": ("224.0.0.0/4", "ff00::/8"),
    "reserved": (
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "240.0.0.0/4",
        "2001::/23",  # with Teredo, 2001::/32
        "2001:db8::/32",
        "2620:4f:8000::/48",
        "3fff::/20",
    ),
    "translated": ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16"),
}
_TABLE = tuple(
    (kind, ipaddress.ip_network(network))
    for kinds in (_INSIDE, _NEVER)
    for kind, networks in kinds.items()
    for network in networks
)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")


class AddressRefused(Exception):
    """A name without an address that may be connected to; says no more than that."""


def kind_of(address: str) -> str:
    """``public``, or the reason why an address is not."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if any(parsed in network for network in _METADATA):
        return "metadata"
    for kind, network in _TABLE:
        if parsed in network:
            return kind
    return "public" if parsed.version == 4 or parsed in _GLOBAL_UNICAST else "reserved"


def is_allowed(address: str, allow_private: bool) -> bool:
    """Whether a connection to an address is permitted."""
    kind = kind_of(address)
    return kind == "public" or (allow_private and kind in _INSIDE)


def is_odd_number(host: str) -> bool:
    """Whether a host is an IPv4 address in another spelling than four decimal numbers.

    2130706433, 0x7f.1, 127.1 and 0177.0.0.1 are; parsers disagree on them, so they are refused by name. Like a
    browser, it looks at the last label.
    """
    if ":" in host:
        return False
    labels = host.rstrip(".").split(".")
    if not re.fullmatch(r"[0-9]+|0[xX][0-9a-fA-F]*", labels[-1]):
        return False
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return True
    return False


class Resolver:
    """The system's resolver in threads of its own: names that hang cannot starve the rest of the process."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Addresses of a host in the order in which to try them; empty when it has none."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError):
            return []
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def close(self) -> None:
        """Lets the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects by name, but only to addresses that were checked.

    TLS still sees the name: httpcore takes SNI and the certificate's name from the URL.
    """

    def __init__(self, resolve: Resolve, allow_private: bool) -> None:
        self._resolve = resolve
        self._allow_private = allow_private
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolves, checks all addresses, connects to the first that answers.

        Raises:
            AddressRefused: no address, or one of them is not allowed.
            httpcore.ConnectError, httpcore.ConnectTimeout: nobody answers.
        """
        addresses = await self._addresses(host.strip("[]"), port)
        share = None if timeout is None else timeout / len(addresses)
        for place, address in enumerate(addresses, start=1):
            try:
                return await self._inner.connect_tcp(address, port, share, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if place == len(addresses):
                    raise
        raise AddressRefused  # unreachable: there is at least one address

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            addresses = [str(ipaddress.ip_address(host))]
        except ValueError:
            addresses = list(await self._resolve(host, port))
        if not addresses or not all(is_allowed(address, self._allow_private) for address in addresses):
            raise AddressRefused
        return addresses[:MAX_ATTEMPTS]

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Never: no URL leads to a socket of this machine."""
        raise AddressRefused

    async def sleep(self, seconds: float) -> None:
        """As the inner backend."""
        await asyncio.sleep(seconds)
