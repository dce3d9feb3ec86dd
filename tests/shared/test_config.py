"""The settings tree: what it takes, what it refuses, and that the shipped files are good."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import load_settings
from shared.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
MINIMAL = "models: [{name: m, checkpoint: weights}]\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


#: for Ray and Kubernetes, not for us; held against their schemas in tests/test_clusters.py
OTHERS = ("ray-cluster.yaml", "kuberay.yaml")
SHIPPED = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if path.name not in OTHERS]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    assert load_settings(path).models


def test_a_relative_checkpoint_is_relative_to_the_file(tmp_path: Path) -> None:
    assert load_settings(written(tmp_path, MINIMAL)).models[0].checkpoint == tmp_path / "weights"


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKONCE_HTTP__PORT", "9001")
    settings = load_settings(written(tmp_path, MINIMAL + "http: {port: 9000, host: 0.0.0.0}\n"))
    assert (settings.http.port, settings.http.host) == (9001, "0.0.0.0")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("htpp: {port: 1}", "htpp"),
        ("http: {prt: 1}", "http.prt"),
        ("http: {port: 99999}", "http.port"),
        ("cache: {timeout: 0}", "cache.timeout"),
        ("models: []", "models"),
        ("models: [{name: 'a:b', checkpoint: x}]", "models.0.name"),
        ("models: [{name: a, checkpoint: x}, {name: a, checkpoint: y}]", "differ"),
        ("models: [{name: a, checkpoint: x, encoder: {min_replicas: 3, max_replicas: 2}}]", "min_replicas"),
        ("models: [{name: a, checkpoint: x, language: {dtype: int8}}]", "models.0.language.dtype"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    whole = text if text.startswith("models") else MINIMAL + text
    with pytest.raises(ConfigError, match=named):
        load_settings(written(tmp_path, whole))


def test_an_unknown_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKONCE_HTTP__PRT", "1")
    with pytest.raises(ConfigError, match="prt"):
        load_settings(written(tmp_path, MINIMAL))


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "just words"])
def test_a_file_that_is_no_tree_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_settings(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_settings(tmp_path / "nowhere.yaml")


def test_asking_for_another_model_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="configured: m"):
        load_settings(written(tmp_path, MINIMAL)).model("x")
