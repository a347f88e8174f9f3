"""Alertmanager's file: names that there are, and nobody is told until somebody is named. Where amtool (Debian's package
prometheus-alertmanager) is on PATH, by that too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.monitoring.names import PROMETHEUS, ROOT, known, read_yaml, rules

FILE = ROOT / "monitoring/alertmanager/alertmanager.yml"
CONFIG: dict[str, Any] = read_yaml(FILE)
ALERTS = {str(rule["alert"]): rule for rule in rules() if "alert" in rule}
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]+)"')


def routes(route: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield route
    for below in route.get("routes", ()):
        yield from routes(below)


def matched(matchers: list[str]) -> dict[str, list[str]]:
    """What a rule of inhibition is about: values of labels."""
    found = [MATCHER.fullmatch(matcher) for matcher in matchers]
    return {label[1]: label[3].split("|") for label in found if label} if all(found) else {}


def documented() -> list[dict[str, Any]]:
    """The receivers of docs/monitoring.md."""
    text = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- tested: receivers -->\n```yaml\n(.+?)```", text, re.S)
    assert found
    receivers: list[dict[str, Any]] = YAML(typ="safe").load(found[1])["receivers"]
    return receivers


def test_prometheus_tells_it_and_it_tells_nobody() -> None:
    told = read_yaml(PROMETHEUS / "prometheus.yml")["alerting"]["alertmanagers"]
    assert told == [{"static_configs": [{"targets": ["alertmanager:9093"]}]}]
    assert CONFIG["receivers"] == [{"name": "nobody"}], "as it comes it makes no connection"
    assert {route["receiver"] for route in routes(CONFIG["route"])} == {"nobody"}


def test_its_rules_are_about_alerts_and_labels_that_there_are() -> None:
    everything = frozenset().union(*known().values()) | {"alertname"}
    assert set(CONFIG["route"]["group_by"]) <= everything
    for route in routes(CONFIG["route"]):
        for matcher in route.get("matchers", ()):
            found = MATCHER.fullmatch(matcher)
            assert found
            assert found[1] == "severity"
            assert found[3] in {rule["labels"]["severity"] for rule in ALERTS.values()}
    for rule in CONFIG["inhibit_rules"]:
        for end in ("source_matchers", "target_matchers"):
            about = matched(rule[end])
            assert set(about) <= everything, rule
            assert set(about["alertname"]) <= set(ALERTS), rule
        assert set(rule.get("equal", ())) <= everything


def test_a_store_that_is_away_hides_no_other_reason_why_the_service_is_not_ready() -> None:
    hidden = [matched(rule["target_matchers"]) for rule in CONFIG["inhibit_rules"]]
    assert [each["check"] for each in hidden if each["alertname"] == ["OwlSapNotReady"]] == [["store"]]


def test_the_receivers_of_the_documentation_have_all_that_they_need(tmp_path: Path) -> None:
    receivers = {each["name"]: each for each in documented()}
    assert set(receivers) == {"nobody", "operators", "chat"}
    (mail,), (hook,) = receivers["operators"]["email_configs"], receivers["chat"]["webhook_configs"]
    assert {"to", "from", "smarthost", "auth_username", "auth_password"} <= set(mail)
    assert hook["url"].startswith("https://")
    amtool = shutil.which("amtool")
    if amtool is not None:
        told = CONFIG | {"receivers": list(receivers.values()), "route": CONFIG["route"] | {"receiver": "operators"}}
        with (tmp_path / "told.yml").open("w", encoding="utf-8") as file:
            YAML(typ="safe").dump(told, file)
        command = [amtool, "check-config", str(FILE), str(tmp_path / "told.yml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
