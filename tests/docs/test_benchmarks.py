"""docs/benchmarks.md shows the committed results as they are, missed bars included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.docs.sections import ROOT, check_section

PAGE = "docs/benchmarks.md"
RESULTS = ROOT / "benchmarks/results"


FOUND: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))
}


def section(results: Mapping[str, Mapping[str, Any]]) -> str:
    return "\n\n".join(part for name, document in results.items() for part in _of(name, document))


def _of(name: str, document: Mapping[str, Any]) -> list[str]:
    about = document["machine"]
    commit = (about.get("commit") or "unknown")[:10]
    load = about.get("load_average")
    before = f", load average {load[0]:.2f} before" if load else ""
    cores = about.get("cores")
    where = ", ".join(filter(None, (about.get("card"), about.get("cpu"), cores and f"{cores} cores")))
    lines = ["| figure | median | target | |", "|---|---|---|---|", *map(_line, document["figures"])]
    return [
        f"### {document['benchmark'].capitalize()}",
        f"`benchmarks/results/{name}.json`: {where}, commit {commit}{before}.",
        "\n".join(lines),
    ]


def _line(figure: Mapping[str, Any]) -> str:
    marks = [] if figure["verdict"] in (None, "met") else [f"**{figure['verdict']}**"]
    if figure["target"] is not None and not marks:
        marks.append("met")
    if figure["disturbed"]:
        marks.append("disturbed: says nothing")
    median = "" if figure["median"] is None else f"{figure['median']:g} {figure['unit']}".strip()
    return f"| {figure['name']} | {median} | {figure['target'] or ''} | {', '.join(marks)} |"


def test_the_page_shows_the_results() -> None:
    check_section(PAGE, "benchmarks", section(FOUND), "tests/docs/test_benchmarks.py")


def test_every_result_is_on_the_page() -> None:
    """In one form: benchmarks/*.py write it through app/src/benchmark/harness.py."""
    for name, document in FOUND.items():
        assert document["figures"], name
        for figure in document["figures"]:
            assert figure["rounds"] or figure["error"], (name, figure["name"])


def test_a_missed_bar_is_shown_as_missed() -> None:
    figure = {"name": "speed", "median": 1.7, "unit": "x", "target": ">= 1.75", "verdict": "missed", "disturbed": True}
    assert _line(figure) == "| speed | 1.7 x | >= 1.75 | **missed**, disturbed: says nothing |"


def test_every_program_is_explained() -> None:
    """One question a file; its head says how to run it."""
    for program in sorted(Path(ROOT / "benchmarks").glob("*.py")):
        head = program.read_text(encoding="utf-8").split('"""')[1]
        assert f"benchmarks/{program.name}" in head, program.name


def test_a_document_becomes_a_section() -> None:
    figure = {"name": "ready", "median": 3.0, "unit": "s", "target": "<= 4", "verdict": "met", "disturbed": False}
    about = {"cpu": "C", "cores": 2, "commit": "0123456789abcdef", "load_average": [0.5, 1.0]}
    document = {"benchmark": "start", "machine": about, "figures": [figure]}
    made = section({"start": document})
    assert "C, 2 cores, commit 0123456789, load average 0.50 before." in made
    assert "| ready | 3 s | <= 4 | met |" in made
    assert section({}) == ""
    on_card = {
        "machine": {"card": "NVIDIA T4"},
        "benchmark": "card",
        "figures": [figure | {"median": None, "verdict": "failed"}],
    }
    made = section({"card-t4": on_card})
    assert "NVIDIA T4, commit unknown." in made
    assert "| ready |  | <= 4 | **failed** |" in made
