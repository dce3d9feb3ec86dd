"""The processes of a service that this process started, and their memory."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from lookonce.service import RUN_VARIABLE

#: Ray names its workers after what they run
REPLICA = "ray::ServeReplica:lookonce:"


def replicas() -> dict[str, psutil.Process]:
    """Serve replicas of this process's own service and vLLM's engines below them, by kind and number.

    A test may have started other services beside it; and Ray adds what a replica does at the moment to its title.
    """
    found: dict[str, psutil.Process] = {}
    run = os.environ.get(RUN_VARIABLE)
    for process in psutil.Process().children(recursive=True):
        try:
            title = process.cmdline()[:1]
            if title and title[0].startswith(REPLICA) and process.environ().get(RUN_VARIABLE) == run:
                found[f"replica {process.pid}"] = process
                engines = [child for child in process.children(recursive=True) if _is_engine(child)]
                found |= {f"engine {engine.pid}": engine for engine in engines}
        except psutil.Error:
            continue
    return found


def _is_engine(process: psutil.Process) -> bool:
    return any(word.startswith("VLLM::") for word in process.cmdline()[:1])


def forget_peaks() -> None:
    """Sets every replica's peak of resident memory to what it has now."""
    for process in replicas().values():
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def peaks() -> dict[str, int]:
    """Peak resident memory of every replica since then, bytes."""
    return {name: _status(process, "VmHWM") for name, process in replicas().items()}


def resident() -> dict[str, int]:
    """Resident memory of every replica, bytes."""
    return {name: _status(process, "VmRSS") for name, process in replicas().items()}


def _status(process: psutil.Process, field: str) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field} of {process}")
