"""Dashboard and alerts: well formed, and every alert comes when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROMETHEUS = ROOT / "configs" / "prometheus"
RULES = [
    rule for group in yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
BOARD: dict[str, Any] = json.loads((ROOT / "configs" / "grafana" / "lookonce.json").read_text())


def expressions() -> dict[str, str]:
    """Every expression of panels and alerts, by where it stands."""
    found = {rule["alert"]: rule["expr"] for rule in RULES}
    for panel in BOARD["panels"]:
        found |= {f"{panel['title']} {target['refId']}": target["expr"] for target in panel["targets"]}
    return found


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:lookonce_\w+|vllm:\w+)", re.sub(r'"[^"]*"', "", expression)))


def test_panels_do_not_lie_on_each_other() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places) >= 10
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places)


@pytest.mark.parametrize("place", expressions())
def test_expressions_ask_for_something_and_close_their_brackets(place: str) -> None:
    expression = expressions()[place]
    assert metrics_of(expression) or expression.startswith("sum(up{")
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


def test_every_alert_has_a_test_that_it_comes_and_one_that_it_does_not() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yaml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    names = {rule["alert"] for rule in RULES}
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == names
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == names


@pytest.mark.parametrize(
    "command",
    [["check", "config", "prometheus.yaml"], ["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]],
)
def test_prometheus_agrees(command: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it comes with prometheus")
    done = subprocess.run([promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
