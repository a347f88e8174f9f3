"""docs/benchmarks.md shows the committed results as they are, missed bars included."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.src.benchmark.harness import Figure, Target
from benchmarks import embed, quality, rest, scale, search, start, sync, together
from benchmarks import load as crowd
from tests.adversity import kills
from tests.docs.sections import ROOT, check_section

PAGE = "docs/benchmarks.md"
RESULTS = ROOT / "benchmarks/results"
WRITER = "tests/docs/test_benchmarks.py"
QUOTING = (PAGE, "README.md", "docs/hana.md", "docs/models.md", "docs/scale.md")  # quote figures between two marks
QUOTE = re.compile(r"(<!-- = ([\w-]+): (.+?) -->).*?(<!-- / -->)")
LOADS = ("short", "skewed", "long")
PEERS = ("sentence-transformers", "infinity", "onnx", "openvino", "onnx-int8")

FOUND: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))
}

# Present goals, by a figure's name or a part of it.
GOALS: dict[str, Mapping[str, Target]] = {
    "hana": sync.TARGETS,
    "kills": kills.TARGETS,
    "load": crowd.TARGETS,
    "multilingual": {f"{peer} / ours": goal for each in embed.MULTILINGUAL.values() for peer, goal in each.items()},
    "peers": {
        **embed.TARGETS,
        **{f"{own}, {load}: cosine": goal for own, goal in embed.COSINE.items() for load in LOADS},
        **{f"{own}, {load}: overlap": goal for own, goal in embed.OVERLAP.items() for load in LOADS},
    },
    "quality": quality.TARGETS,
    "ray": scale.TARGETS,
    "rest": {"small": rest.RATE},
    "scale": scale.TARGETS,
    "search": search.TARGETS | {f"{rows:,} rows, store": goal for rows, goal in search.STORE.items()},
    "start": start.TARGETS,
    "sync": sync.TARGETS,
    "together": together.TARGETS,
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
        f"### {name.capitalize()}",
        f"`benchmarks/results/{name}.json`: {where}, commit {commit}{before}.",
        "\n".join(lines),
    ]


def _line(figure: Mapping[str, Any]) -> str:
    marks = [] if figure["verdict"] in (None, "met") else [f"**{figure['verdict']}**"]
    if figure["disturbed"]:
        marks.append("disturbed: says nothing")
    elif figure["verdict"] == "met":
        marks.append("met")
    median = "" if figure["median"] is None else f"{figure['median']:g} {figure['unit']}".strip()
    return f"| {figure['name']} | {median} | {figure['target'] or ''} | {', '.join(marks)} |"


def today(file: str, name: str) -> Target | None:
    """Return the program's present goal of a figure, which may be newer than the results."""
    whole = f", {name.replace(': ', ', ')}, "
    return next(
        (goal for part, goal in GOALS.get(file, {}).items() if f", {part.replace(': ', ', ')}, " in whole), None
    )


def quote(file: str, name: str) -> str:
    """Return a figure for a sentence: three digits, and the goal it missed."""
    figures = {each["name"]: each for each in FOUND.get(file, {"figures": []})["figures"]}
    figure = figures.get(name)
    if figure is None or figure["median"] is None:
        return "not measured"
    goal = today(file, name)
    missed = goal is not None and Figure(name, [figure["median"]], target=goal).verdict == "missed"
    digits = float(f"{figure['median']:.3g}")
    shown = f"{digits:,.0f}" if digits >= 100 else f"{digits:g}"
    shown += f" (goal {goal[0]} {goal[1]:g} **missed**)" if goal and missed else ""
    return shown + (" (disturbed)" if figure["disturbed"] else "")


def glance(document: Mapping[str, Any]) -> str:
    """Return one table of all precisions, loads and peers: their seconds over ours."""
    found = {each["name"]: each for each in document["figures"]}
    about, lines = document["machine"], [f"| ours | texts | {' | '.join(PEERS)} | cosine | overlap |"]
    lines.append("|---|---|" + "---|" * (len(PEERS) + 2))
    for own in ("fp32", "bf16", "int8"):
        for load in ("short", "skewed", "long"):
            names = [f"{own}, {load}: {peer} / ours" for peer in PEERS]
            names += [f"{own}, {load}: cosine", f"{own}, {load}: overlap"]
            cells = [quote("peers", name) if name in found else "" for name in names]
            if any(cells):
                lines.append(f"| {own} | {load} | {' | '.join(cells)} |")
    for load in ("short", "skewed", "long"):
        theirs = [found.get(f"fp32, {load}: {peer} / ours", {}).get("their_overlap", "") for peer in PEERS]
        if any(theirs):
            lines.append(f"| their overlap | {load} | {' | '.join(map(str, theirs))} | | |")
    # The first version of each is that of the peer's own package.
    versions = [f"{name} ({' '.join(next(iter(each.items())))})" for name, each in document["peers"].items()]
    machine = [about["cpu"], f"{about['cores']} cores", *about.get("instructions", ()), f"torch {about['torch']}"]
    return "\n".join([*lines, "", f"{', '.join(machine)}. Peers: {'; '.join(versions)}."])


def test_the_page_shows_the_results() -> None:
    check_section(PAGE, "benchmarks", section(FOUND), WRITER)


def test_the_page_shows_all_peers_at_a_glance() -> None:
    check_section(PAGE, "peers", glance(FOUND["peers"]), WRITER)


@pytest.mark.parametrize("file", QUOTING)
def test_quoted_figures_are_those_of_the_results(file: str) -> None:
    """`<!-- = FILE: FIGURE -->2.5<!-- / -->` quotes the median of a figure in benchmarks/results/FILE.json."""
    path = ROOT / file
    text = path.read_text(encoding="utf-8")
    assert QUOTE.search(text), "no figure is quoted"
    wanted = QUOTE.sub(lambda match: f"{match[1]}{quote(match[2], match[3])}{match[4]}", text)
    if os.environ.get("OWL_WRITE_DOCS"):
        path.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        pytest.fail(f"{file} quotes other figures; write them: OWL_WRITE_DOCS=1 ./scripts/test {WRITER}")


def test_a_quote_is_judged_by_the_present_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = {"name": "overlap, local", "median": 1.25, "target": "<= 1.3", "verdict": "met", "disturbed": False}
    monkeypatch.setitem(FOUND, "sync", {"figures": [figure]})
    for goal, shown in ((1.3, "1.25"), (1.2, "1.25 (goal <= 1.2 **missed**)")):
        monkeypatch.setitem(GOALS, "sync", {"overlap, local": ("<=", goal)})
        assert quote("sync", "overlap, local") == shown


def test_every_quoted_goal_is_known() -> None:
    quoted = {match.groups()[1:3] for file in QUOTING for match in QUOTE.finditer((ROOT / file).read_text("utf-8"))}
    for file, name in quoted:
        judged = any(figure["target"] for figure in FOUND[file]["figures"] if figure["name"] == name)
        assert not judged or today(file, name), (file, name)


def test_every_result_is_on_the_page() -> None:
    """In one form: benchmarks/*.py write it through app/src/benchmark/harness.py."""
    for name, document in FOUND.items():
        assert document["figures"], name
        for figure in document["figures"]:
            assert figure["rounds"] or figure["error"], (name, figure["name"])


def test_a_missed_bar_is_shown_as_missed() -> None:
    figure = {"name": "speed", "median": 1.7, "unit": "x", "target": ">= 1.75", "verdict": "missed", "disturbed": True}
    assert _line(figure) == "| speed | 1.7 x | >= 1.75 | **missed**, disturbed: says nothing |"
    assert _line(figure | {"verdict": "met"}) == "| speed | 1.7 x | >= 1.75 | disturbed: says nothing |"


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
