"""Sockets that listen, and how their addresses are written."""

from __future__ import annotations

import socket

#: connections that wait to be accepted, at most
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Args:
        host: IPv4 or IPv6 address, or a name; ``::`` takes IPv4 connections as well where the system can.
        port: 0 for a free one.

    Raises:
        OSError: the address is taken, or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def base_url(host: str, port: int) -> str:
    """Where an HTTP server at an address is reached."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now."""
    with listen(host, 0) as probe:
        port: int = probe.getsockname()[1]
        return port
