"""The engine's processes: they end with their owner, and both executors carry embeddings."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from shared.config import CacheSettings, LanguageSettings, ModelSettings
from shared.errors import Unavailable
from tests.llm_service.conftest import EngineThread
from tests.llm_service.desk import Desk, tokens
from tests.llm_service.pictures import Picture, embed
from tests.llm_service.test_plugin import alive

OWNER = """
import asyncio, sys
from pathlib import Path
from llm_service.engine import LanguageEngine
from shared.config import CacheSettings, LanguageSettings, ModelSettings
from shared.errors import Unavailable

async def main():
    model = ModelSettings(name="x", checkpoint=Path(sys.argv[1]), language=LanguageSettings(max_model_len=256))
    await LanguageEngine(model, CacheSettings(), sys.argv[2]).start()
    print("ready", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def descendants(pid: int) -> set[int]:
    """All living processes below this one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.slow
def test_the_engine_ends_with_a_killed_owner(flat: Path, redis_url: str, tmp_path: Path) -> None:
    """A6."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path.cwd()), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, str(script), str(flat), redis_url]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert owner.stdout is not None
    try:
        assert any(line.strip() == "ready" for line in owner.stdout)
        engine = descendants(owner.pid)
        assert engine
    finally:
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + 30
    while left := [pid for pid in engine if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.slow
def test_scheduler_and_worker_in_different_processes(
    flat: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with tensor parallelism: the embeddings travel in the step's metadata."""
    from llm_service.engine import engine as module

    ours = module.engine_args
    monkeypatch.setattr(module, "engine_args", lambda *args: replace(ours(*args), distributed_executor_backend="mp"))
    before = descendants(os.getpid())
    model = ModelSettings(name="x", checkpoint=flat, language=LanguageSettings(max_model_len=256))
    thread = EngineThread(module.LanguageEngine(model, CacheSettings(), redis_url))
    try:
        thread.run(thread.engine.start(), timeout=300)
        desk = Desk(thread, flat, redis.Redis.from_url(redis_url))
        images = desk.embed(Picture(1, 96, 96), Picture(5, 256, 250))
        assert tokens(desk.ask(images)) == tokens(desk.ask(images, inline=True))
        desk.check_alive()
        for pid in descendants(os.getpid()) - before:
            if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            for _ in range(50):
                desk.ask([])
                time.sleep(0.1)
        with pytest.raises(Unavailable):
            thread.run(thread.engine.check_health())
    finally:
        thread.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_payload_pickles_as_one_buffer(dtype: torch.dtype) -> None:
    from llm_service.vllm_plugin.connector_base import Payload

    tensor = torch.randn(300, 64).to(dtype)
    buffers: list[Any] = []
    data = pickle.dumps(Payload(tensor), protocol=5, buffer_callback=buffers.append)
    assert len(data) < 500
    assert [buffer.raw().nbytes for buffer in buffers] == [tensor.nbytes]
    again = pickle.loads(data, buffers=buffers)  # noqa: S301
    assert again.tensor.dtype == dtype
    assert torch.equal(again.tensor, tensor)
    assert again.tensor.data_ptr() == tensor.data_ptr(), "no copy"


def test_embeddings_of_the_tests_are_not_degenerate(flat: Path) -> None:
    """If all pictures embedded alike, the comparisons here would prove little."""
    one, other = (embed(flat, Picture(seed, 96, 96)).rows for seed in (1, 6))
    assert (one - other).abs().mean() > 0.1
    assert (one[0] - one[-1]).abs().mean() > 0.1
