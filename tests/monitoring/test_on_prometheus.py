"""Every query of the dashboards and every rule, on a real Prometheus that scrapes our own /metrics and a T4's exporter.

The exporter's answer is written by hand (dcgm_t4.prom), and so is what NVML says of a card: there is none here.
"""

from __future__ import annotations

import subprocess

import httpx
import pytest

from tests.adversity.scene import NAME
from tests.monitoring.conftest import Monitored, tool
from tests.monitoring.names import DASHBOARDS, rules
from tests.monitoring.test_dashboards import bare, load

pytest.importorskip("hdbcli")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prometheus")]
"""One Prometheus for all of them: it takes ten seconds to have something to tell."""


def panel_queries() -> list[tuple[str, str, str]]:
    """Title, reference and expression, of everything that a panel asks."""
    return [
        (panel["title"], target["refId"], bare(target["expr"]))
        for path in DASHBOARDS
        for panel in load(path)["panels"]
        for target in panel.get("targets", ())
    ]


def test_all_that_is_scraped_is_up(monitored: Monitored) -> None:
    """Not at every single scrape: each has half a second here, and a look at the store may take a whole one."""
    found = monitored.query("min by (job) (max_over_time(up[10s]))")
    jobs = ("owl-sap-api", "owl-sap-worker", "dcgm-exporter", "prometheus")
    assert {each["metric"]["job"]: each["value"][1] for each in found} == dict.fromkeys(jobs, "1")


def test_a_second_service_is_an_instance_with_its_name(monitored: Monitored) -> None:
    """Not the container's address, which is another one after each deployment."""
    found = {each["metric"]["instance"] for each in monitored.query('up{job="owl-sap-api"}')}
    assert found == {monitored.api.removeprefix("http://"), "replica:8000"}


def test_every_panel_has_data(monitored: Monitored) -> None:
    """In one test: each query takes a millisecond, and what is missing is seen together."""
    missing, asked = [], panel_queries()
    assert len(asked) > 70
    for title, reference, expression in asked:
        finite = [
            point
            for series in monitored.drawn(expression)
            for point in series["values"]
            if point[1] not in ("NaN", "+Inf", "-Inf")
        ]
        if not finite:
            missing.append(f"{title} {reference}: {expression}")
    assert missing == []


def test_every_rule_can_be_evaluated(monitored: Monitored) -> None:
    told = monitored.prometheus.get("/api/v1/rules").json()["data"]["groups"]
    found = {rule["name"]: rule for group in told for rule in group["rules"]}
    assert set(found) == {rule.get("alert") or rule["record"] for rule in rules()}
    assert {name: rule.get("lastError") for name, rule in found.items() if rule["health"] != "ok"} == {}
    for rule in rules():
        monitored.query(rule["expr"])


def test_what_is_recorded_is_there(monitored: Monitored) -> None:
    missing = [rule["record"] for rule in rules() if "record" in rule and not monitored.query(rule["record"])]
    assert missing == []


OF_SPEED = "SearchSlow|EmbedQueueWaitHigh|EventLoopLate|OwlSap(Api|Worker)Down|DcgmExporterDown"
"""Pending for a moment where the tests' own machine is busy: a scrape has half a second, and one search of the six that
takes more than a second is the 95th percentile."""


def test_a_healthy_machine_raises_no_alert(monitored: Monitored) -> None:
    """Pending ones too: a T4 under load, held by its power limit as always, is well."""
    assert monitored.query(f'ALERTS{{alertname!~"{OF_SPEED}"}}') == []
    assert monitored.query('ALERTS{alertstate="firing"}') == []


def test_a_card_is_told_by_dcgm_else_by_our_own_look(monitored: Monitored) -> None:
    found = {each["metric"]["uuid"]: each["value"][1] for each in monitored.query("owl_sap:gpu_utilization:ratio")}
    assert found == {"GPU-11111111-2222-3333-4444-555555555555": "0.98", "GPU-own": "0.97"}


def test_both_processes_know_what_is_stored(monitored: Monitored) -> None:
    """The worker has synced it; the API has never written anything."""
    rows = monitored.query(f'owl_sap_rows{{collection="{NAME}"}}')
    assert {each["metric"]["job"] for each in rows} == {"owl-sap-api", "owl-sap-worker"}
    assert len({each["value"][1] for each in rows}) == 1
    assert float(rows[0]["value"][1]) > 100


def test_promtool_finds_nothing_wrong_with_our_metrics(monitored: Monitored) -> None:
    promtool = tool("promtool")
    for url in (f"{monitored.api}/metrics", monitored.worker):
        told = httpx.get(url, headers=monitored.asking("metrics"), timeout=60).text
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=told, capture_output=True, text=True, check=False, timeout=60
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_who_may_not_look_at_metrics_is_refused(monitored: Monitored) -> None:
    for url in (f"{monitored.api}/metrics", monitored.worker):
        assert httpx.get(url, timeout=60).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Bearer owl_wrong_wrong"}, timeout=60).status_code == 401
        assert httpx.get(url, headers=monitored.asking("search"), timeout=60).status_code == 403
