"""Turns, medians, ratios, targets, and what marks a figure as disturbed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.src.benchmark.harness import Figure, Report, Rounds, Work, commit, interleaved, machine
from benchmarks.program import at_least, at_most, main


def test_works_take_turns_and_change_places() -> None:
    order: list[str] = []

    def work(name: str) -> Work:
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    rounds = interleaved({"a": work("a"), "b": work("b")}, 3)
    assert "".join(order) == "ba" + "ab" + "ba" + "ab"
    assert rounds.took == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}, "the round that warms up does not count"


def test_cpu_seconds_give_a_ratio_of_their_own() -> None:
    rounds = interleaved({"a": lambda: (2.0, 6.0), "b": lambda: (1.0, 2.0), "c": lambda: 1.0}, 2)
    figure = rounds.ratio("speed", "a", "b")
    assert (figure.rounds, figure.more["cpu_ratio"]) == ([2.0, 2.0], 3.0)
    assert "cpu_ratio" not in rounds.ratio("speed", "a", "c").more


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        interleaved({"a": lambda: 1.0}, 0)


def test_a_ratio_is_taken_round_by_round() -> None:
    rounds = Rounds({"theirs": [2.0, 9.0, 6.0], "ours": [1.0, 3.0, 3.0]})
    figure = rounds.ratio("speed", "theirs", "ours", at_least(1.9), texts=5)
    assert figure.rounds == [2.0, 3.0, 2.0]
    assert (figure.median, figure.target) == (2.0, at_least(1.9))
    assert figure.as_dict()["ours seconds"] == 3.0
    assert figure.as_dict()["texts"] == 5


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (at_least(1.75), 1.75, "met"),
        (at_least(1.75), 1.7, "missed"),
        (at_most(0.6), 0.6, "met"),
        (at_most(0.6), 0.7, "missed"),
    ],
)
def test_a_figure_is_judged_by_its_target(target: object, value: float, verdict: str) -> None:
    figure = Figure("f", [value], target=target)  # type: ignore[arg-type]
    assert figure.verdict == verdict


def test_rounds_that_scatter_are_disturbed() -> None:
    quiet, loud = Figure("q", [1.0, 1.1, 1.05]), Figure("l", [1.0, 1.0, 1.4])
    assert not quiet.disturbed
    assert loud.disturbed
    assert not Figure("wide", [1.0, 1.4], scatter=2.0).disturbed


def test_a_disturbed_figure_is_never_met() -> None:
    loud = [1.0, 1.0, 1.4]
    assert Figure("l", loud, target=at_least(0.5)).verdict is None
    assert Figure("l", loud, target=at_least(2)).verdict == "missed"


def test_a_program_runs_the_parts_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def speed(given: object, report: Report) -> Iterator[Figure]:
        report.notes.append("noted")
        yield Figure("speed", [2.0, 2.0], target=at_least(3.0))

    def never(given: object, report: Report) -> Iterator[Figure]:
        raise AssertionError("not asked for")

    out = tmp_path / "new" / "made.json"
    main("made", "doc", {"speed": speed, "never": never}, arguments=["speed", "--rounds", "2", "--out", str(out)])
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["figures"][0] | {"rounds": []} == {
        "name": "speed",
        "median": 2.0,
        "unit": "x",
        "rounds": [],
        "disturbed": False,
        "target": ">= 3",
        "verdict": "missed",
    }
    assert written["options"] == {"rounds": 2}
    assert written["notes"] == ["noted"]
    assert written["machine"]["cores"] >= 1
    shown = capsys.readouterr().out
    assert "missed" in shown
    assert "noted" in shown


def test_what_was_measured_before_a_part_fails_is_kept(tmp_path: Path) -> None:
    def speed(given: object, report: Report) -> Iterator[Figure]:
        yield Figure("speed", [2.0])

    def broken(given: object, report: Report) -> Iterator[Figure]:
        raise RuntimeError("no room")

    out = tmp_path / "made.json"
    with pytest.raises(RuntimeError, match="no room"):
        main("made", "doc", {"speed": speed, "broken": broken}, arguments=["--out", str(out)])
    written = json.loads(out.read_text(encoding="utf-8"))
    assert [figure["name"] for figure in written["figures"]] == ["speed"]
    assert written["notes"] == ["incomplete: broken ended with RuntimeError: no room"]


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("made", "doc", {"speed": lambda given, report: []}, arguments=["sped"])
    assert "no part sped; parts: speed" in capsys.readouterr().err


def test_the_machine_names_versions_that_are_there() -> None:
    found = machine(("numpy", "no-such-package"))
    assert found["numpy"]
    assert "no-such-package" not in found
    assert found["memory_bytes"] > 0


def test_the_commit_is_of_our_own_checkout_only(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    root = tmp_path.resolve()
    assert commit(root) is None, "no checkout"
    git("init", "--quiet")
    (tmp_path / "file").write_text("a", encoding="utf-8")
    git("add", "file")
    git("commit", "--quiet", "-m", "one")
    clean = commit(root)
    assert clean
    assert len(clean) == 40
    (tmp_path / "file").write_text("b", encoding="utf-8")
    assert commit(root) == f"{clean}+"
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert commit(inside.resolve()) is None, "an environment inside somebody's checkout is not that checkout"
