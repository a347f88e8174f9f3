"""Which metrics there are, with their labels, and which ones an expression asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
from prometheus_client import Histogram
from ruamel.yaml import YAML

from app.src.observe.metrics import FIGURES, Metrics

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "monitoring/prometheus"
COUNTERS = ROOT / "monitoring/dcgm/counters.csv"
DASHBOARDS = sorted((ROOT / "deployment/nvidia-t4/grafana").glob("*.json"))
TARGET = frozenset(("instance", "job"))
DCGM_LABELS = frozenset(("gpu", "UUID", "modelName", "device", "pci_bus_id", "clock_event"))
"""Hostname is not among them: its name has changed between versions of the exporter."""
_PROCESS = (
    "virtual_memory_bytes resident_memory_bytes start_time_seconds cpu_seconds_total open_fds max_fds".split()  # noqa: SIM905
)


def read_yaml(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def ours() -> dict[str, frozenset[str]]:
    """Labels by the name of each series that our /metrics can have, the target's not among them."""
    found: dict[str, frozenset[str]] = {f"owl_sap_process_{name}": frozenset() for name in _PROCESS}
    for metric in vars(Metrics()).values():
        if not hasattr(metric, "_labelnames"):
            continue
        labels, name = frozenset(metric._labelnames), metric._name
        if isinstance(metric, Histogram):
            found |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            found[name + ("_total" if metric._type == "counter" else "")] = labels
    return found | {name: frozenset(labels) for name, (_, labels) in FIGURES.items()}


def counters() -> list[tuple[str, str, str]]:
    """Name, type and help of each line of counters.csv."""
    lines = (line.strip() for line in COUNTERS.read_text(encoding="utf-8").splitlines())
    rows = [tuple(part.strip() for part in line.split(",", 2)) for line in lines if line and not line.startswith("#")]
    assert all(len(row) == 3 for row in rows)
    return rows  # type: ignore[return-value]


@cache
def rules() -> list[dict[str, Any]]:
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    assert files
    return [rule for file in files for group in read_yaml(file)["groups"] for rule in group["rules"]]


@cache
def known() -> dict[str, frozenset[str]]:
    """Labels by name of everything that an expression may ask for. Of recorded series the labels are what their
    expression aggregates by."""
    found = {name: labels | TARGET for name, labels in ours().items()}
    found |= {name: DCGM_LABELS | TARGET for name, _, _ in counters()}
    found["up"] = TARGET
    everything = frozenset().union(*found.values()) | {"alertname", "alertstate", "severity"}
    found["ALERTS"] = everything
    for rule in rules():
        if "record" in rule:
            kept = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
            found[rule["record"]] = frozenset(label.strip() for each in kept for label in each.split(",")) - {"le"}
            if not kept:  # made of recorded ones
                found[rule["record"]] = frozenset.intersection(*(found[name] for name, _ in asked(rule["expr"])))
    return found


def asked(expression: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Each metric that is asked for, with the labels that it is chosen by. Raises ValueError for what is no PromQL."""
    found: list[tuple[str, frozenset[str]]] = []

    def see(node: Any) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            found.append((str(node.name), frozenset(matcher.name for matcher in node.matchers.matchers)))

    promql_parser.walk(promql_parser.parse(expression), see)
    return iter(dict.fromkeys(found))


def unknown(expression: str, names: dict[str, frozenset[str]]) -> list[str]:
    """What is wrong with the names and labels in an expression; [] if nothing is."""
    wrong = []
    for name, labels in asked(expression):
        if name not in names:
            wrong.append(f"there is no metric {name}")
        elif labels - names[name]:
            wrong.append(f"{name} has no label {', '.join(sorted(labels - names[name]))}")
    return wrong
