"""Speed of the cache's transport, next to plain redis-py and to the least that a socket must do.

python -m benchmarks.cache [--rounds 15]

Sides of one size take turns in one run, so that a busy machine slows all. ``raw`` is a hand-written exchange over
a blocking socket into memory that was touched before: no deadlines, no parser, no checks. ``operation`` is the whole
thing that the service does: the transport and the record's checks (XXH3 of the payload, finite values).
``local tier`` is the same operation with the record in the node's shared memory: ``first use`` when this process has
not mapped it yet, ``again`` when it has.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import redis
import torch

from shared.cache import AsyncEmbeddingCache, EmbeddingCache
from shared.cache.buffers import Lender
from shared.cache.connections import ThreadConnections, deadline
from shared.cache.links import WireLink
from shared.cache.links_aio import AsyncWireLink
from shared.config import CacheSettings, LocalSettings
from shared.keys import Namespace
from shared.local_redis import find_server
from shared.records import HEADER_BYTES, encode_record
from shared.sizing import Grid

#: tokens of width 1152 in bfloat16: 1, 4.7 (a 512×512 image) and 16 MB
WIDTH = 1152
TOKENS = {"1 MB": 434, "4.7 MB": 2048, "16 MB": 6944}
KEY = Namespace("bench", "0" * 64, "1" * 64).embedding_key("2" * 64)
DEADLINE = 30.0
FIRST_USE = "get local tier, first use"

Sides: TypeAlias = dict[str, Callable[[], object]]


def serve(folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """A Redis on both kinds of sockets, and its URLs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = folder / "redis.sock"
    words = ["--port", port, "--bind", "127.0.0.1", "--unixsocket", path, "--save", "", "--maxmemory", "512mb"]
    process = subprocess.Popen([str(find_server()), *map(str, words)], stdout=subprocess.DEVNULL)
    while not path.exists():
        time.sleep(0.05)
    return process, {"unix": f"unix://{path}", "TCP": f"redis://127.0.0.1:{port}"}


class Raw:
    """The limit: one exchange over a blocking socket."""

    def __init__(self, url: str, size: int) -> None:
        if url.startswith("unix://"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(url.removeprefix("unix://"))
        else:
            self.socket = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.size = size
        self.memory = memoryview(bytearray(os.urandom(64) * (size // 64 + 1)))

    def get(self) -> None:
        name = KEY.encode()
        self.socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
        start = self.socket.recv(32)
        got = len(start) - start.index(b"\r\n") - 2
        while got < self.size + 2:
            got += self.socket.recv_into(self.memory[got : self.size + 2])

    def put(self, value: bytes) -> None:
        name = KEY.encode()
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, self.size)
        rest = [memoryview(head), memoryview(value), memoryview(b"\r\n")]
        while rest:
            sent = self.socket.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]
        assert self.socket.recv(5) == b"+OK\r\n"


def sides(url: str, record: bytes, loop: asyncio.AbstractEventLoop) -> tuple[Sides, Sides]:
    """What is measured, each moving the record once, and what is done before some of them."""
    raw, plain = Raw(url, len(record)), redis.Redis.from_url(url)
    settings = CacheSettings(timeout=DEADLINE)
    address = ThreadConnections(settings, url).address
    assert address is not None
    link, async_link = WireLink(address, Lender()), AsyncWireLink(address, Lender())
    parts = (record[:HEADER_BYTES], memoryview(record)[HEADER_BYTES:])
    cache, async_cache = EmbeddingCache(settings, url), AsyncEmbeddingCache(settings, url)
    # records up to a quarter of it are kept
    tier = EmbeddingCache(settings.model_copy(update={"local": LocalSettings(mib=128)}), url)
    cache.put(KEY, parts)
    tier.fetch(KEY)
    assert tier.local.settle(), "not stored"
    folder = tier.local.folder
    assert folder is not None
    assert folder.get(KEY) is not None, "not stored"
    with deadline(DEADLINE):
        link.open()
    loop.run_until_complete(async_link.open())

    def ours(*command: object) -> object:
        with deadline(DEADLINE):
            return link.exchange([command])  # type: ignore[list-item]

    def ours_async(*command: object) -> object:
        return loop.run_until_complete(async_link.exchange([command]))  # type: ignore[list-item]

    work = {
        "put raw": lambda: raw.put(record),
        "put redis-py": lambda: plain.set(KEY, record),
        "put threads": lambda: ours("SET", KEY, parts),
        "put asyncio": lambda: ours_async("SET", KEY, parts),
        "put operation": lambda: cache.put(KEY, parts),
        "get raw": raw.get,
        "get redis-py": lambda: plain.get(KEY),
        "get threads": lambda: ours("GET", KEY),
        "get asyncio": lambda: ours_async("GET", KEY),
        "get operation": lambda: cache.fetch(KEY),
        FIRST_USE: lambda: tier.fetch(KEY),
        "get local tier, again": lambda: tier.fetch(KEY),
        "get operation, asyncio": lambda: loop.run_until_complete(async_cache.fetch(KEY)),
    }
    return work, {FIRST_USE: folder.mappings.clear}


def measure(work: Sides, before: Sides, rounds: int) -> dict[str, float]:
    """Median seconds of each side; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 2):
        for name, run in work.items():
            before.get(name, int)()
            begin = time.perf_counter()
            run()
            if turn >= 2:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        server, urls = serve(Path(folder))
        try:
            print(f"{os.cpu_count()} cores, load {load:.1f}, median of {rounds}\n")
            print("| side | size | over | ms | GB/s | × redis-py | of raw |\n|---|---|---|---:|---:|---:|---:|")
            for size, tokens in TOKENS.items():
                values = torch.from_numpy(np.random.default_rng(0).standard_normal((tokens, WIDTH), np.float32))
                record = encode_record(KEY, values.bfloat16(), Grid(2, 2 * tokens), 2)
                for kind, url in urls.items():
                    seconds = measure(*sides(url, record, loop), rounds)
                    for name, took in seconds.items():
                        verb = name.split()[0]
                        speed = f"{took * 1e3:.2f} | {len(record) / took / 1e9:.2f}"
                        ratios = f"{seconds[f'{verb} redis-py'] / took:.1f} | {seconds[f'{verb} raw'] / took:.2f}"
                        print(f"| {name} | {size} | {kind} | {speed} | {ratios} |", flush=True)
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
