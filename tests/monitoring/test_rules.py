"""Alerts, recording rules and counters.csv: names that exist, annotations that help, a test each way for every alert.
What promtool says of them is scripts/check's matter (step monitoring), and tests/monitoring/test_promtool.py's.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.monitoring.names import COUNTERS, PROMETHEUS, ROOT, counters, known, ours, read_yaml, rules, unknown

ALERTS = [rule for rule in rules() if "alert" in rule]
CASE = re.compile(r"(\w+) (fires|is quiet): .+")


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_there_is(rule: dict[str, str]) -> None:
    assert unknown(rule["expr"], known()) == []


def test_a_wrong_name_or_label_is_found() -> None:
    assert unknown("owl_sap_rowz > 0", known()) == ["there is no metric owl_sap_rowz"]
    assert unknown('rate(owl_sap_rows{colection="a"}[5m])', known()) == ["owl_sap_rows has no label colection"]
    with pytest.raises(ValueError, match="unclosed"):
        unknown("sum by (owl_sap_rows", known())


def kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_and_what_to_do(alert: dict[str, dict[str, str]]) -> None:
    name, said = str(alert["alert"]), alert["annotations"]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(said) == {"summary", "description", "runbook"}
    assert len(said["summary"]) < 120
    assert said["description"].endswith(".")
    assert said["runbook"] == f"docs/operations.md#alert-{kebab(name)}"
    assert "for" in alert


def test_alerts_have_names_of_their_own() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert sorted(set(names)) == sorted(names)
    assert len(names) >= 30


def test_every_alert_is_tested_to_fire_and_to_keep_quiet() -> None:
    said = [CASE.fullmatch(case["name"]) for file in unit_tests() for case in read_yaml(file)["tests"]]
    assert all(said)
    wanted = {(str(alert["alert"]), way) for alert in ALERTS for way in ("fires", "is quiet")}
    assert {match.groups() for match in said if match} == wanted


def unit_tests() -> list[Path]:
    return sorted((PROMETHEUS / "tests").glob("*.yml"))


def test_power_capping_is_in_no_alert() -> None:
    """A T4 under load is held by its power limit nearly always."""
    for rule in rules():
        assert "POWER_VIOLATION" not in rule["expr"], rule
        assert "sw_power_cap" not in rule["expr"], rule


def test_every_file_of_rules_is_loaded() -> None:
    assert read_yaml(PROMETHEUS / "prometheus.yml")["rule_files"] == ["rules/*.yml"]


def test_the_token_comes_from_its_file_and_only_there() -> None:
    config = read_yaml(PROMETHEUS / "prometheus.yml")
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert set(jobs) == {"owl-sap-api", "owl-sap-worker", "dcgm-exporter", "prometheus"}
    for name, job in jobs.items():
        asks = {"type": "Bearer", "credentials_file": "/run/secrets/metrics_token"}
        assert job.get("authorization") == (asks if name.startswith("owl-sap") else None)


def test_counters_are_what_dcgm_exporter_takes() -> None:
    """DCGM FIELD, type, help: three parts, a known type, no field twice, none that a T4 does not have."""
    rows = counters()
    names = [name for name, _, _ in rows]
    assert len(set(names)) == len(names)
    for name, kind, text in rows:
        assert re.fullmatch(r"DCGM_(FI_DEV|FI_PROF|EXP)_[A-Z_]+", name), name
        assert kind in ("gauge", "counter"), name
        assert text.endswith("."), name
    absent = {"DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_FAN_SPEED", "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"}
    assert not absent & set(names)
    wanted = {"THERMAL_VIOLATION", "POWER_VIOLATION", "XID_ERRORS", "FB_USED", "FB_FREE", "FB_RESERVED"}
    assert {f"DCGM_FI_DEV_{name}" for name in wanted} <= set(names)
    assert {f"DCGM_FI_PROF_{name}_ACTIVE" for name in ("PIPE_TENSOR", "SM", "DRAM", "GR_ENGINE")} <= set(names)


def test_the_files_are_where_the_compose_file_mounts_them() -> None:
    compose = (ROOT / "docker-compose.t4-optimized.yml").read_text(encoding="utf-8")
    for path in (COUNTERS, PROMETHEUS, ROOT / "monitoring/grafana/provisioning", ROOT / "deployment/nvidia-t4/grafana"):
        assert path.exists()
        assert f"./{path.relative_to(ROOT)}:" in compose
    provider = read_yaml(ROOT / "monitoring/grafana/provisioning/dashboards/owl-sap.yml")["providers"][0]
    assert f"./deployment/nvidia-t4/grafana:{provider['options']['path']}:ro" in compose
    service = read_yaml(ROOT / "docker-compose.t4-optimized.yml")["services"]
    told = service["worker"]["environment"]
    assert str(told["OWL_SAP_WORKER__METRICS_PORT"]) == "8001", "where prometheus.yml looks for the worker"
    assert told["OWL_SAP_WORKER__METRICS_HOST"] == "0.0.0.0"
    assert told["OWL_SAP_ACCESS__KEYS"] == service["api"]["environment"]["OWL_SAP_ACCESS__KEYS"]


def test_names_of_ours_are_all_ours() -> None:
    assert all(name.startswith("owl_sap_") for name in ours())
