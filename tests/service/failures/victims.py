"""The processes of a running service, to be killed or frozen."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import psutil

from lookonce.service import RUN_VARIABLE

#: what the processes of a role are called, in their command line
TITLES = {
    "encoder": "ServeReplica:lookonce:encoder:",
    "language": "ServeReplica:lookonce:language:",
    "ingress": "ServeReplica:lookonce:ingress",
    "door": "ray::Door",
    "engine": "VLLM::EngineCore",
    "redis": "redis-server",
    "controller": "ServeController",
}


def victims(role: str) -> list[int]:
    """Process ids of one role in this process's service."""
    run = os.environ[RUN_VARIABLE]
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if process.status() == psutil.STATUS_ZOMBIE or TITLES[role] not in title:
                continue
            # Redis writes its title over its environment; its socket lies in the run's folder
            if run in title or process.environ().get(RUN_VARIABLE) == run:
                found.append(process.pid)
    return sorted(found)


def send(role: str, number: signal.Signals = signal.SIGKILL) -> list[int]:
    """Sends a signal to all processes of a role; there must be one."""
    pids = victims(role)
    assert pids, f"no {role} process runs"
    for pid in pids:
        os.kill(pid, number)
    return pids


def eventually(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Waits for a condition; returns how long it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - begin
