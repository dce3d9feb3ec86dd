"""``lookonce inspect`` on checkpoints of every family, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from encoder_service.checkpoints import load_encoder
from lookonce.cli import app
from lookonce.inspect import inspect, kv_bytes
from shared.families import size_rule
from tools.checkpoints.catalogue import LAYOUTS
from tools.checkpoints.isaac import write_isaac
from tools.checkpoints.pixtral import KINDS, write_pixtral
from tools.checkpoints.radio import write_radio

FAMILIES = {"native": "pixtral", "native-merger": "pixtral", "llava": "pixtral-hf", "mistral3": "mistral3"}


@pytest.mark.parametrize("kind", KINDS)
def test_pixtral_in_every_layout(kind: str, tmp_path: Path) -> None:
    checkpoint = write_pixtral(tmp_path / kind, kind)
    found = inspect(checkpoint)
    assert found.problems == []
    assert found.facts["family"] == FAMILIES[kind]
    tower = load_encoder(checkpoint, "float32").tower
    assert f"{sum(p.numel() for p in tower.parameters()):,} parameters" in found.facts["tower"]
    assert found.facts["language pool"].endswith("for 16 full contexts)")


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_isaac(sharded: bool, nested: bool, tmp_path: Path) -> None:
    checkpoint = write_isaac(tmp_path / "isaac", nested=nested, sharded=sharded)
    found = inspect(checkpoint, sizes=[(64, 32)])
    assert found.problems == []
    assert found.facts["language model"] == "Qwen3ForCausalLM"
    ((width, height, tokens),) = found.tokens
    assert (width, height) == (64, 32)
    assert tokens > 0


def test_an_encoder_by_itself(tmp_path: Path) -> None:
    found = inspect(write_radio(tmp_path / "radio", "native"))
    assert found.problems == []
    assert found.facts["language model"].startswith("none")


def test_the_demo_model_and_the_command(tmp_path: Path) -> None:
    runner = CliRunner()
    answer = runner.invoke(app, ["inspect", "models/demo", "--size", "320x200", "--json"])
    assert answer.exit_code == 0, answer.output
    body = json.loads(answer.stdout)
    assert body["problems"] == []
    assert body["tokens"][0]["width"] == 320
    broken = runner.invoke(app, ["inspect", str(tmp_path)])
    assert broken.exit_code == 1
    assert runner.invoke(app, ["inspect", "models/demo", "--size", "big"]).exit_code == 1
    assert runner.invoke(app, ["inspect", "models/demo", "--size", "0x10"]).exit_code == 1


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_files_cut_short(kept: int, tmp_path: Path) -> None:
    path = write_isaac(tmp_path / "isaac", sharded=False) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    assert any("model.safetensors" in problem for problem in inspect(path.parent).problems)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    checkpoint = write_isaac(tmp_path / "isaac", sharded=True)
    shards = sorted(checkpoint.glob("*.safetensors"))
    shards[-1].unlink()
    (checkpoint / "tokenizer.json").unlink()
    problems = inspect(checkpoint).problems
    assert any(shards[-1].name in problem for problem in problems)
    assert any("tokenizer.json" in problem for problem in problems)


def test_keys_and_values_of_a_token() -> None:
    nested = {
        "text_config": {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    }
    assert kv_bytes(nested, 2) == 2 * 3 * 2 * 64 * 2
    assert kv_bytes({"n_layers": 40, "n_heads": 32, "n_kv_heads": 8, "dim": 5120, "head_dim": 128}, 2) == 163840
    assert kv_bytes({}, 2) is None
    hybrid = {"num_hidden_layers": 4, "hybrid_override_pattern": "M-M*", "num_attention_heads": 2, "head_dim": 32}
    assert kv_bytes({"text_config": hybrid}, 4) == 2 * 1 * 2 * 32 * 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_told_whole(name: str, tmp_path: Path) -> None:
    """Sizes of both halves, tokens of a picture as the prompt has them, memory of each pool, nothing wrong."""
    checkpoint = LAYOUTS[name].write(tmp_path / name)
    found = inspect(checkpoint, "float32", sizes=[(100, 60)])
    assert found.problems == []
    ((_, _, tokens),) = found.tokens
    assert tokens == size_rule(checkpoint).tokens(100, 60)
    tower = load_encoder(checkpoint, "float32").tower
    weights = sum(parameter.nbytes for parameter in tower.parameters())
    assert found.facts["encoder pool"] == f"{weights / 2**20:.1f} MiB of weights for each replica in float32"
    assert "numbers" in found.facts["tower tensors"]
    if LAYOUTS[name].family != "radio":
        assert "numbers" in found.facts["language tensors"]
        assert "bytes of KV a token" in found.facts["language pool"]
