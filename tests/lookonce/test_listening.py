"""Addresses of both families, taken and free."""

from __future__ import annotations

import socket

import pytest

from lookonce.checks import check_port
from lookonce.listening import base_url, free_port, listen
from shared.errors import ConfigError

HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::")


def skip_without(host: str) -> None:
    try:
        listen(host, 0).close()
    except OSError:
        pytest.skip(f"cannot listen on {host} here")


@pytest.mark.parametrize("host", HOSTS)
def test_a_free_port_is_free_and_a_taken_one_is_refused(host: str) -> None:
    skip_without(host)
    port = free_port(host)
    check_port(host, port)
    with listen(host, port), pytest.raises(ConfigError, match="choose another with --port"):
        check_port(host, port)
    check_port(host, port)


def test_every_address_of_both_families() -> None:
    skip_without("::")
    if not socket.has_dualstack_ipv6():
        pytest.skip("no sockets of both families here")
    with listen("::", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_no_machine_is_refused_in_words(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}"):
        check_port(host, 8000)


def test_urls() -> None:
    assert base_url("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert base_url("::1", 80) == "http://[::1]:80"
