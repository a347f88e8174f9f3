"""The dashboards as files: Grafana cannot be had here, so their form is held to what Grafana 12 reads. Their queries
run on a real Prometheus in test_on_prometheus.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.monitoring.names import DASHBOARDS, ROOT, asked, counters, known, ours, read_yaml, rules, unknown

PANEL_TYPES = {"row", "timeseries", "stat", "gauge", "table", "heatmap"}
"""Of Grafana's core; nothing is installed."""
UNITS = {
    *("none", "short", "percentunit", "bytes", "Bps", "celsius", "watt", "hertz", "s", "reqps", "rowsps"),
}
"""Ids of Grafana's own list (packages/grafana-data, valueFormats/categories.ts), as far as they are used."""
WIDTH = 24
BOARD_KEYS = {
    *(
        "uid",
        "title",
        "description",
        "tags",
        "schemaVersion",
        "version",
        "editable",
        "graphTooltip",
        "timezone",
        "refresh",
    ),
    *(
        "time",
        "timepicker",
        "fiscalYearStartMonth",
        "weekStart",
        "liveNow",
        "links",
        "annotations",
        "templating",
        "panels",
    ),
}
PANEL_KEYS = {
    *("id", "type", "title", "description", "datasource", "targets", "fieldConfig", "options", "gridPos"),
    "transformations",
}
TARGET_KEYS = {"refId", "datasource", "expr", "legendFormat", "editorMode", "range", "instant", "format"}
VARIABLE_KEYS = {
    *("name", "type", "label", "description", "datasource", "definition", "query", "regex", "hide", "multi", "sort"),
    *("includeAll", "allValue", "current", "options", "refresh", "skipUrlSync"),
}
"""Fields of Grafana's own schema (kinds/dashboard), as far as they are used: a misspelt one is dropped silently."""
Panel = dict[str, Any]


@cache
def load(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def panels() -> list[tuple[str, Panel]]:
    return [(path.stem, panel) for path in DASHBOARDS for panel in load(path)["panels"]]


def bare(expression: str) -> str:
    """With Grafana's variables filled in."""
    for name, value in (("$__rate_interval", "5m"), ("$instance", ".*"), ("$collection", ".*"), ("$uuid", ".*")):
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def queries() -> Iterator[tuple[str, str]]:
    for stem, panel in panels():
        for target in panel.get("targets", ()):
            yield f"{stem}: {panel['title']} {target['refId']}", bare(target["expr"])
    for path in DASHBOARDS:
        for each in load(path)["annotations"]["list"]:
            if "expr" in each:
                yield f"{path.stem}: annotation", bare(each["expr"])


def test_both_are_there_and_have_names_that_stay() -> None:
    assert {path.stem: load(path)["uid"] for path in DASHBOARDS} == {
        "t4-gpu-dashboard": "owl-sap-t4-gpu",
        "sync-search-dashboard": "owl-sap-sync-search",
    }
    assert not list((ROOT / "monitoring").rglob("*dashboard*.json")), "one file each, not two copies"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_form(path: Path) -> None:
    board = load(path)
    assert board["schemaVersion"] >= 39
    assert set(board) == BOARD_KEYS, "an id, for one, belongs to one Grafana; the uid is what stays"
    assert board["title"]
    assert board["description"]
    assert "owl-sap" in board["tags"]
    ids = [panel["id"] for panel in board["panels"]]
    assert sorted(set(ids)) == sorted(ids)
    names = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "instance"} <= names
    for variable in board["templating"]["list"]:
        assert variable["type"] in ("datasource", "query")
        assert set(variable) <= VARIABLE_KEYS
        if variable["type"] == "query":
            assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            series, label = variable["definition"].removeprefix("label_values(").rstrip(")").split(", ")
            assert label in known()[series], variable["definition"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_no_panel_lies_over_another_or_leaves_the_grid(path: Path) -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in load(path)["panels"]]
    for title, at in places:
        assert at["x"] >= 0, title
        assert at["w"] > 0, title
        assert at["x"] + at["w"] <= WIDTH, title
    for (one, a), (other, b) in itertools.combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one} lies over {other}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_no_gap_between_rows_of_panels(path: Path) -> None:
    """Grafana would move panels up, and what stands in the file would not be what one sees."""
    places = [panel["gridPos"] for panel in load(path)["panels"]]
    for at in places:
        if at["y"] > 0:
            above = [each for each in places if each["y"] + each["h"] == at["y"]]
            assert any(each["x"] < at["x"] + at["w"] and at["x"] < each["x"] + each["w"] for each in above), at


@pytest.mark.parametrize(
    ("stem", "panel"), panels(), ids=lambda value: value if isinstance(value, str) else value["title"]
)
def test_a_panel_tells_what_it_shows(stem: str, panel: Panel) -> None:
    assert panel["type"] in PANEL_TYPES
    assert panel["title"]
    if panel["type"] == "row":
        assert (panel["collapsed"], panel["panels"]) == (False, [])
        return
    assert set(panel) <= PANEL_KEYS
    assert len(panel["description"]) > 8
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    refs = [target["refId"] for target in panel["targets"]]
    assert sorted(set(refs)) == refs
    for target in panel["targets"]:
        assert set(target) <= TARGET_KEYS
        assert target["datasource"] == panel["datasource"]
        assert target["legendFormat"] or panel["type"] == "table"
        assert target["range"] is not target["instant"]
    defaults = panel["fieldConfig"]["defaults"]
    unit = panel["options"]["yAxis"]["unit"] if panel["type"] == "heatmap" else defaults.get("unit")
    assert unit in UNITS or panel["type"] == "table", unit
    for override in panel["fieldConfig"]["overrides"]:
        assert all(each["value"] in UNITS for each in override["properties"] if each["id"] == "unit")
    steps = [step["value"] for step in defaults.get("thresholds", {}).get("steps", [])]
    assert steps[:1] in ([], [None]), "the first threshold is the base"
    assert steps[1:] == sorted(steps[1:])


@pytest.mark.parametrize(("where", "expression"), list(queries()), ids=lambda value: value[:60])
def test_a_query_asks_for_what_there_is(where: str, expression: str) -> None:
    assert unknown(expression, known()) == [], where


def test_a_panel_over_another_would_be_found(tmp_path: Path) -> None:
    board = json.loads(DASHBOARDS[0].read_text(encoding="utf-8"))
    board["panels"][2]["gridPos"] = board["panels"][1]["gridPos"]
    path = tmp_path / "board.json"
    path.write_text(json.dumps(board))
    with pytest.raises(AssertionError, match="lies over"):
        test_no_panel_lies_over_another_or_leaves_the_grid(path)


def test_every_counter_of_dcgm_is_for_something() -> None:
    """Shown or recorded; or here, with what it is for."""
    by_hand = {
        "DCGM_FI_DEV_MEM_CLOCK": "beside the other clock, for who looks at one card",
        "DCGM_FI_DEV_MEM_COPY_UTIL": "as NVIDIA's dashboard 12239 shows it",
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "energy per million texts, docs/monitoring.md",
        "DCGM_FI_DEV_FB_RESERVED": "what is missing between used, free and what is printed on the card",
        "DCGM_FI_DEV_RETIRED_PENDING": "our own owl_sap_gpu_retired_pages_pending raises the alert",
    }
    used = {name for _, expression in queries() for name, _ in asked(expression)}
    used |= {name for rule in rules() for name, _ in asked(rule["expr"])}
    assert {name for name, _, _ in counters()} - used == set(by_hand)


def test_what_the_issue_wants_watched_is_shown() -> None:
    """By words of the issue: rows, lag, quarantine, checkpoint age, queue wait, batch tokens, padding ratio ..."""
    shown = {name for _, expression in queries() for name, _ in asked(expression)}
    shown |= {name for rule in rules() if rule.get("record") in shown for name, _ in asked(rule["expr"])}
    wanted = {
        *("owl_sap_rows", "owl_sap_rows_synced_total", "owl_sap_sync_lag_seconds", "owl_sap_quarantined_rows"),
        *("owl_sap_checkpoint_age_seconds", "owl_sap_embed_wait_seconds_bucket", "owl_sap_embed_batch_tokens_bucket"),
        *("owl_sap_engine_padded_tokens_total", "owl_sap_sync_stage_seconds_total", "owl_sap_hana_errors_total"),
        *("owl_sap_engine_out_of_memory_total", "owl_sap_http_requests_total", "owl_sap_gpu_throttle", "owl_sap_jobs"),
    }
    assert wanted <= shown
    assert wanted <= set(ours())


def test_grafana_is_provisioned_with_the_data_source_that_the_dashboards_take() -> None:
    folder = ROOT / "monitoring/grafana/provisioning"
    (source,) = read_yaml(folder / "datasources/prometheus.yml")["datasources"]
    assert (source["type"], source["isDefault"], source["editable"]) == ("prometheus", True, False)
    scraped = read_yaml(ROOT / "monitoring/prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped
    for path in DASHBOARDS:
        variable = next(each for each in load(path)["templating"]["list"] if each["name"] == "datasource")
        assert variable["query"] == source["type"]
        assert variable["current"]["value"] == source["uid"]
