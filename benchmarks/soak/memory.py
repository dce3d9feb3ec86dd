"""Memory of every process below one, and of what a service keeps in shared memory and in Redis."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
#: what a process is called here, by what its command line holds; the first that fits
ROLES = (
    (r"ServeReplica:[^:]+:encoder:", "encoder"),
    (r"ServeReplica:[^:]+:language:", "language"),
    (r"ServeReplica:[^:]+:ingress", "ingress"),
    (r"^VLLM::", "engine"),
    (r"redis-server", "redis"),
    (r"multiprocessing\.resource_tracker", "resource tracker"),
    (r"multiprocessing\.spawn", "spawned"),
    (r"lookonce\.cli serve|bin/lookonce serve", "serve"),
    (r"/gcs_server ", "ray gcs"),
    (r"/raylet ", "ray raylet"),
    (r"/autoscaler/_private/monitor\.py", "ray monitor"),
    (r"/dashboard/dashboard\.py", "ray dashboard"),
    (r"/log_monitor\.py", "ray log monitor"),
    # ProxyActor, ServeController, DashboardAgent, IDLE; a title goes on with what the actor does at the moment
    (r"^ray::(\w+)", r"ray \1"),
)


@dataclass(frozen=True)
class Use:
    """Memory of one process, bytes.

    Attributes:
        own: USS, what ends with it.
        fair: PSS, its own and its share of what it has in common with others.
        resident: RSS.
        shared: its share of shared memory, part of PSS.
    """

    own: int
    fair: int
    resident: int
    shared: int


def role(process: psutil.Process) -> str:
    """What a process does; its program's name where nothing is known about it."""
    words = process.cmdline()
    line = " ".join(words)
    for pattern, name in ROLES:
        if match := re.search(pattern, line):
            return match.expand(name)
    return Path(words[0]).name if words else "ended"


def use(pid: int) -> Use:
    """Memory of one process.

    Raises:
        OSError: it has ended, or belongs to somebody else.
    """
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        fields[name.rstrip(":")] = int(value) << 10
    return Use(fields["Private_Clean"] + fields["Private_Dirty"], fields["Pss"], fields["Rss"], fields["Pss_Shmem"])


def processes(root: int) -> dict[str, Use]:
    """Memory of a process and of all below it, by role and number."""
    found = {}
    top = psutil.Process(root)
    for process in (top, *top.children(recursive=True)):
        # one that ends while it is looked at is missing
        with contextlib.suppress(psutil.Error, OSError, KeyError):
            found[f"{role(process)} {process.pid}"] = use(process.pid)
    return found


def shared_memory(root: int) -> int:
    """Bytes of shared memory that a process and all below it have mapped, each page once: object store and tier."""
    return sum(used.shared for used in processes(root).values())


def stores(cache_url: str) -> dict[str, int]:
    """Bytes in Redis (``used_memory``), in the node's tier, and in use of shared memory by anybody."""
    with redis.Redis.from_url(cache_url) as client:
        used = int(client.info("memory")["used_memory"])
    tier = [path for path in SHARED_MEMORY.glob("lookonce-*/**/*") if path.is_file()]
    disk = os.statvfs(SHARED_MEMORY)
    sizes = []
    for path in tier:
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_blocks * 512)
    return {
        "redis entries": used,
        "local tier": sum(sizes),
        "/dev/shm": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
    }
