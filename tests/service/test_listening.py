"""What a running service shows to the machine: its open ports and its command lines."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

import psutil

from lookonce.service import RUN_VARIABLE

LISTEN = "0A"


def processes() -> list[psutil.Process]:
    """All of this service, by the marker in their environment."""
    found = [psutil.Process()]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_VARIABLE) == os.environ[RUN_VARIABLE]:
                found.append(process)
    return found


def sockets(process: psutil.Process) -> set[str]:
    """Inodes of its open sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if target.startswith("socket:["):
                    found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def listeners() -> dict[str, tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Address and port of every listening TCP socket of the machine, by inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found[fields[9]] = (ipaddress.ip_address(b"".join(words)), int(port, 16))
    return found


def test_nothing_but_http_listens_beyond_loopback(service: str) -> None:
    """An open Ray is remote code execution (CVE-2023-48022): its ports, Redis's and vLLM's stay on loopback."""
    assert socket.gethostbyname("localhost") == "127.0.0.1"
    everywhere, seen = [], 0
    all_listeners = listeners()
    for process in processes():
        for inode in sockets(process) & set(all_listeners):
            address, port = all_listeners[inode]
            seen += 1
            mapped = getattr(address, "ipv4_mapped", None) or address
            if not mapped.is_loopback:
                everywhere.append(f"{address}:{port} of {' '.join(process.cmdline())[:80]}")
    assert seen > 5, "the service's sockets were not found"
    assert everywhere == []
    assert service.startswith("http://127.0.0.1:")


def test_no_redis_url_and_no_key_in_command_lines(service: str) -> None:
    """Anybody on the machine reads command lines."""
    assert service
    lines = [" ".join(process.cmdline()) for process in processes() if process.pid != os.getpid()]
    assert len(lines) > 5
    assert [line for line in lines if "redis://" in line or "LOOKONCE_API_KEY" in line] == []
