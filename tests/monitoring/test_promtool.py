"""promtool over the rules, and that their unit tests can fail: for every alert one is red when it never fires, and one
when it always does. What scripts/check does on every run, and why that can be trusted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.monitoring.conftest import tool
from tests.monitoring.names import PROMETHEUS, read_yaml

pytestmark = pytest.mark.slow


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [tool("promtool"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_rules_and_their_unit_tests() -> None:
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    assert promtool("check", "rules", "--lint=all", "--lint-fatal", *files).returncode == 0
    tested = promtool("test", "rules", PROMETHEUS / "tests/alerts.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_configuration() -> None:
    checked = promtool("check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def changed(folder: Path, expression: str) -> set[str]:
    """Unit tests that are red once every alert asks for `expression` instead, by the alert's name."""
    shutil.copytree(PROMETHEUS / "rules", folder / "rules")
    shutil.copytree(PROMETHEUS / "tests", folder / "tests")
    path = folder / "rules/alerts.yml"
    told = read_yaml(path)
    for group in told["groups"]:
        for rule in group["rules"]:
            rule |= {"expr": expression, "for": "0m", "annotations": {}}
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump(told, file)
    tested = promtool("test", "rules", folder / "tests/alerts.yml")
    assert tested.returncode != 0
    return set(re.findall(r'alertname="?:? ?"?(\w+)', tested.stdout + tested.stderr))


@pytest.mark.parametrize("expression", ["vector(1) == 0", "vector(1)"], ids=["never", "always"])
def test_an_alert_that_never_or_always_fires_is_found(tmp_path: Path, expression: str) -> None:
    told = read_yaml(PROMETHEUS / "rules/alerts.yml")
    alerts = {rule["alert"] for group in told["groups"] for rule in group["rules"]}
    assert changed(tmp_path, expression) >= alerts
