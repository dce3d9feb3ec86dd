"""Every settings file in ``configs/``: it loads, its model is of a known family, and its numbers fit that model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encoder_service.checkpoints import LAYOUTS, check_encoder
from lookonce.checks import check_models
from shared.config import load_settings
from shared.errors import CheckpointError, ConfigError
from shared.families import context_length, family_of, read_config, size_rule
from tools.checkpoints.isaac import write_isaac
from tools.checkpoints.pixtral import write_pixtral
from tools.checkpoints.radio import Shape, write_radio

CONFIGS = Path(__file__).parent.parent.parent / "configs"
#: read by Ray and Kubernetes, not by us
CLUSTERS = {"kuberay.yaml", "ray-cluster.yaml"}
SHIPPED = [path for path in sorted(CONFIGS.glob("*.yaml")) if path.name not in CLUSTERS]


def edited(folder: Path, change: Callable[[dict[str, Any]], object], file: str = "config.json") -> Path:
    tree = json.loads((folder / file).read_text())
    change(tree)
    (folder / file).write_text(json.dumps(tree))
    return folder


def isaac(folder: Path) -> Path:
    return write_isaac(folder, nested=True, min_patches=256, max_patches=6144, max_positions=40960)


def pixtral(folder: Path) -> Path:
    write_pixtral(folder, "native")
    return edited(folder, lambda p: p["vision_encoder"].update(image_size=1024, patch_size=16), "params.json")


def mistral3(folder: Path) -> Path:
    write_pixtral(folder, "mistral3")
    edited(folder, lambda p: p.update(size={"longest_edge": 1540}), "preprocessor_config.json")
    return edited(folder, lambda c: c["vision_config"].update(image_size=1540, patch_size=14))


def nemotron(folder: Path) -> Path:
    shape = Shape(patch_size=16, tile=512, table=2048, language=True)
    return write_radio(folder, "llama", shape)


def radio(folder: Path) -> Path:
    return write_radio(folder, "old", Shape(patch_size=16, table=2048))


#: a small checkpoint of each published model's layout and image geometry; the demos have their own
PUBLISHED: dict[str, Callable[[Path], Path]] = {
    "isaac-0.1.yaml": isaac,
    "isaac-0.2.yaml": isaac,
    "pixtral-12b.yaml": pixtral,
    "mistral-small-3.1.yaml": mistral3,
    "nemotron-nano-vl-8b.yaml": nemotron,
    "c-radiov2-h.yaml": radio,
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_file_fits_its_model(path: Path, tmp_path: Path) -> None:
    """Whole largest pictures fit into a batch and, with room for text, into the context."""
    (model,) = load_settings(path).models
    checkpoint = PUBLISHED[path.name](tmp_path / "c") if path.name in PUBLISHED else model.checkpoint
    config, rule = read_config(checkpoint), size_rule(checkpoint)
    family = family_of(config)
    assert family.name in LAYOUTS
    tokens = family.max_tokens(config)
    assert tokens * rule.merge**2 <= model.encoder.max_batch_patches
    if family.language_architecture is None:
        return
    assert model.language.max_model_len is not None
    assert tokens + 512 <= model.language.max_model_len
    if path.name in PUBLISHED:
        assert model.language.max_model_len <= max(context_length(checkpoint), 32768)
        if family.rows:  # the file counts the tokens that end rows too
            tokens += rule.merged(9000, 9000).height
        elif family.around:
            tokens += 2
        assert f"a largest picture takes {tokens:,} tokens" in path.read_text(), tokens
    else:
        assert check_encoder(checkpoint).width > 0


def test_every_published_model_has_its_file() -> None:
    assert PUBLISHED.keys() <= {path.name for path in SHIPPED}
    assert {path.name for path in SHIPPED} - PUBLISHED.keys() == {"demo.yaml", "demo-pixtral.yaml"}


def test_models_that_cannot_answer_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """A folder that is not there, a model of no known family: one sentence, at once."""

    def settings(checkpoint: Path) -> Any:
        path = tmp_path / "settings.yaml"
        path.write_text(f"models: [{{name: m, checkpoint: '{checkpoint}'}}]")
        return load_settings(path)

    with pytest.raises(ConfigError, match="model m: there is no folder"):
        check_models(settings(tmp_path / "nowhere"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(CheckpointError, match="bert"):
        check_models(settings(other))
    check_models(settings(radio(tmp_path / "radio")))  # gives embeddings
    check_models(settings(isaac(tmp_path / "isaac")))
