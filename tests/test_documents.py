"""The documents name things that exist: make targets, commands, files, settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lookonce.cli import app
from shared import config

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def names(documents: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in documents]


@pytest.mark.parametrize("path", DOCUMENTS, ids=names(DOCUMENTS))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=names(DOCUMENTS))
def test_files_in_backticks_exist(path: Path) -> None:
    named = re.findall(
        r"`((?:encoder_service|llm_service|shared|lookonce|tests|configs|scripts|tools|requirements)/[\w./-]*)`",
        path.read_text(),
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=names(DOCUMENTS))
def test_make_targets_and_commands_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = {(command.name or command.callback.__name__) for command in app.registered_commands if command.callback}
    text = path.read_text()
    assert set(re.findall(r"\bmake ([a-z][a-z-]+)\b", text)) - {"no"} <= targets
    assert set(re.findall(r"\blookonce (serve|ask|caption|demo|doctor|[a-z]+) (?:--|[A-Z<])", text)) <= commands


def test_python_in_the_readme_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_every_setting_is_in_the_documents() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    sections = [config.EncoderSettings, config.LanguageSettings, config.CacheSettings, config.ImageSettings]
    sections += [config.LocalSettings]
    sections += [config.HttpSettings, config.AccessSettings, config.TenantSettings]
    sections += [config.RaySettings, config.JobSettings, config.LogSettings, config.TelemetrySettings]
    missing = [name for section in sections for name in section.model_fields if f"`{name}`" not in text]
    assert missing == []


def test_every_test_named_in_the_documents_exists() -> None:
    named = {found for path in DOCUMENTS for found in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", path.read_text())}
    assert named, "failures.md names tests"
    assert [f"{file}::{name}" for file, name in sorted(named) if f"def {name}(" not in (ROOT / file).read_text()] == []


def test_every_failure_has_its_test() -> None:
    rows = [line for line in (ROOT / "docs" / "failures.md").read_text().splitlines() if line.startswith("| ")]
    assert [row for row in rows[1:] if not re.search(r"`tests/[\w/]+\.py::test_\w+` \|$", row)] == []
