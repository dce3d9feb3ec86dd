"""M8: the compiled language model, rotation of three rows of positions included, on the locked torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.llm_service.plans import Run
from tests.llm_service.test_equivalence import CONVERSATIONS, check, perform
from tools.checkpoints.isaac import write_isaac


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_and_eager_answer_alike(redis_url: str, tmp_path: Path) -> None:
    checkpoint = write_isaac(tmp_path / "isaac", seed=31)
    chosen = {name: CONVERSATIONS[name] for name in ("text", "one", "three", "image last")}
    runs = [Run(name, str(checkpoint), options={"enforce_eager": name == "eager"}) for name in ("eager", "compiled")]
    results = perform(runs, checkpoint, redis_url, tmp_path, chosen, TORCHDYNAMO_DISABLE="0")
    check(results["compiled"], results["eager"][0])
    entries = map(json.loads, (tmp_path / "result.jsonl").read_text().splitlines())
    operations = {entry["name"]: entry["compiled"] for entry in entries}
    # a handful belongs to a helper of vLLM's sampler, which is compiled in any case
    assert operations["eager"] < 50 < operations["compiled"], operations
