"""Registration, weight selection and configuration of the tower-free classes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from llm_service.vllm_plugin import LOAD_FORMAT, architecture, register
from llm_service.vllm_plugin import loader as loader_module
from llm_service.vllm_plugin.loader import TowerFreeLoader, check_language_tensors, language_tensors
from llm_service.vllm_plugin.overrides import tower_free
from shared.errors import CheckpointError
from shared.families import ISAAC, context_length, family_of, read_config, size_rule
from shared.sizing import NaflexRule
from tools.checkpoints.isaac import write_isaac

TOWER = ISAAC.tower_prefixes


def test_register_is_idempotent_and_leaves_the_stock_model_alone() -> None:
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.models import ModelRegistry

    register()
    before = {name: ModelRegistry.models[name] for name in ModelRegistry.get_supported_archs()}
    register()
    assert {name: ModelRegistry.models[name] for name in ModelRegistry.get_supported_archs()} == before
    assert architecture(ISAAC) in before
    assert "llm_service" not in repr(before["IsaacForConditionalGeneration"])
    extra: dict[str, Any] = {}
    config = SimpleNamespace(load_format=LOAD_FORMAT, model_loader_extra_config=extra, safetensors_load_strategy=None)
    assert isinstance(get_model_loader(config), TowerFreeLoader)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """File name → tensors read from it, from here on."""
    seen: dict[str, list[str]] = {}

    class Spy:
        def __init__(self, path: Path, framework: str) -> None:
            self._names = seen.setdefault(path.name, [])
            self._file = safe_open(path, framework=framework)

        def __enter__(self) -> Spy:
            return self

        def __exit__(self, *_: object) -> None: ...

        def keys(self) -> list[str]:
            return list(self._file.keys())

        def get_tensor(self, name: str) -> torch.Tensor:
            self._names.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(loader_module, "safe_open", Spy)
    return seen


def test_only_language_tensors_are_read(flat: Path, reads: dict[str, list[str]]) -> None:
    got = dict(language_tensors(flat, TOWER))
    weight_map = json.loads((flat / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = {name for name in weight_map if not name.startswith("model.vision_embedding.")}
    assert got.keys() == wanted
    assert sorted(name for names in reads.values() for name in names) == sorted(wanted)
    assert sorted(reads) == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"], (
        "no tower-only file"
    )


def test_a_single_file_without_index(nested: Path, reads: dict[str, list[str]]) -> None:
    got = dict(language_tensors(nested, TOWER))
    assert reads["model.safetensors"]
    assert all(name.startswith("model.text_model.") for name in got)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    """A hostile checkpoint: the only weights are a pickle, which vLLM's own loader would take."""
    write_isaac(tmp_path, sharded=False)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/lookonce-pwned'\ntR.")
    with pytest.raises(CheckpointError, match="no safetensors"):
        list(language_tensors(tmp_path, TOWER))


@pytest.mark.parametrize("fault", ["outside", "missing name", "missing file", "no map", "cut", "list"])
def test_damaged_checkpoints_name_the_file(tmp_path: Path, fault: str) -> None:
    write_isaac(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    name = next(name for name in tree["weight_map"] if not name.startswith(TOWER))
    if fault == "outside":
        tree["weight_map"][name] = "../../etc/passwd"
    elif fault == "missing name":
        tree["weight_map"]["model.nothing"] = tree["weight_map"][name]
    elif fault == "missing file":
        (tmp_path / tree["weight_map"][name]).unlink()
    elif fault == "no map":
        tree = {}
    elif fault == "list":
        tree["weight_map"] = ["a"]
    else:
        file = tmp_path / tree["weight_map"][name]
        file.write_bytes(file.read_bytes()[:100])
    index.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match="safetensors"):
        list(language_tensors(tmp_path, TOWER))
    with pytest.raises(CheckpointError, match="safetensors"):
        check_language_tensors(tmp_path)


def test_checking_reads_nothing(flat: Path, reads: dict[str, list[str]]) -> None:
    check_language_tensors(flat)
    assert reads
    assert not any(reads.values())


def test_open_mrope_sections_are_filled_in() -> None:
    """Published checkpoints leave ``mrope_section`` null."""
    from vllm.transformers_utils.config import uses_mrope
    from vllm.transformers_utils.configs.isaac import IsaacConfig

    def config(section: list[int] | None) -> Any:
        rope = {"rope_type": "default", "mrope_section": section, "mrope_interleaved": True}
        return IsaacConfig(hidden_size=64, num_attention_heads=2, head_dim=32, rope_scaling=rope, rope_theta=1e4)

    made = tower_free(config(None))
    assert uses_mrope(made)
    assert made.text_config.rope_parameters["mrope_section"] == [8, 4, 4]
    assert made.architectures == ["LookonceIsaacForConditionalGeneration"]
    with pytest.raises(CheckpointError, match="mrope_section"):
        tower_free(config([6, 5, 5]))


def test_a_head_tied_in_the_text_configuration_alone_is_tied() -> None:
    """Else vLLM builds a head of its own that no tensor fills."""
    from vllm.transformers_utils.configs.isaac import IsaacConfig

    text = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
    for tied in (True, False):
        assert tower_free(IsaacConfig(text_config={**text, "tie_word_embeddings": tied})).tie_word_embeddings is tied


@pytest.mark.parametrize("lost", ["head", "model.layers.0.k_proj.weight", None])
def test_missing_tensors_are_an_error(lost: str | None) -> None:
    """vLLM by itself would go on with uninitialised memory."""
    from llm_service.vllm_plugin.models import LookonceIsaacForConditionalGeneration as Model

    linear = torch.nn.Linear(1, 1)
    parameters = {"head": linear.weight, "layers.0.qkv_proj.weight": linear.weight}
    fake: Any = SimpleNamespace(named_parameters=parameters.items, family=ISAAC)
    seen = {f"model.layers.0.{part}_proj.weight" for part in "qkv"} - {lost}
    loaded = parameters.keys() - {lost}
    if lost is None:
        Model._check_complete(fake, seen, loaded)
    else:
        with pytest.raises(CheckpointError, match=lost):
            Model._check_complete(fake, seen, loaded)


def test_other_configurations_pass_unchanged() -> None:
    from transformers import PretrainedConfig

    config = PretrainedConfig()
    config.model_type = "llama"
    assert tower_free(config).architectures is None


def test_family_data(flat: Path, nested: Path, tmp_path: Path) -> None:
    for checkpoint in (flat, nested):
        config = read_config(checkpoint)
        assert family_of(config) is ISAAC
        assert size_rule(checkpoint) == NaflexRule(patch_size=16, merge=2, min_patches=16, max_patches=256)
        assert ISAAC.max_tokens(config) == 64
        assert context_length(checkpoint) == 4096
    with pytest.raises(CheckpointError, match="no family for model_type 'x'"):
        family_of({"model_type": "x"})
    with pytest.raises(CheckpointError, match="contradicts"):
        ISAAC.size_rule({"video_patch_size": 14, "vision_config": {"patch_size": 16}})
    with pytest.raises(CheckpointError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        read_config(tmp_path)


def test_the_embedding_must_come_along_or_from_the_cache() -> None:
    from llm_service.vllm_plugin.models import LookonceIsaacForConditionalGeneration as Model

    linear = torch.nn.Linear(4, 4)
    fake: Any = SimpleNamespace(width=4, language_model=linear)
    grid = torch.tensor([[1, 1, 2]])
    (rows,) = Model.embed_multimodal(fake, image_embeds=torch.ones(1, 2, 4, dtype=torch.float16), merged_grid_thw=grid)
    assert rows.dtype == torch.float32
    with pytest.raises(ValueError, match="no tower"):
        Model.embed_multimodal(fake, merged_grid_thw=grid)
    with pytest.raises(ValueError, match="unknown image fields"):
        Model.embed_multimodal(fake, pixel_values=grid)
    with pytest.raises(ValueError, match=r"\[tokens, 4\]"):
        Model.embed_multimodal(fake, image_embeds=torch.ones(1, 2, 5))


CHILD = """
import os, time
from llm_service.vllm_plugin.parent import die_with_parent
die_with_parent(int(os.environ["OWNER"]))
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ | {"OWNER": str(os.getpid())})
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_ends_with_its_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(1)
    assert alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.1)
