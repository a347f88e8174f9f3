"""Bugs planted into the product are noticed: 16 of tests/proof/mutations.toml, others with each commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.proof.mutations import FAILED, ROOT, Copy, Mutation, chosen_for_commit, mutations, run


def test_a_bug_is_found_by_its_place_whatever_the_file_and_the_indentation(tmp_path: Path) -> None:
    bug = Mutation("bug", "app/old.py", "Thing.run", "if ready:\n    go()", "go()\ngo()", ("tests/test_it.py",))
    (tmp_path / "app").mkdir()
    moved = tmp_path / "app/moved.py"
    moved.write_text(
        "class Thing:\n  def run(self):\n    if ready:\n      go()\n  def walk(self):\n    if ready:\n      go()\n"
    )
    assert bug.located(tmp_path) == moved
    assert bug.applied(moved.read_text()).startswith("class Thing:\n  def run(self):\n    go()\n    go()\n  def walk")
    moved.write_text("class Thing:\n  def walk(self):\n    if ready:\n      go()\n")
    with pytest.raises(ValueError, match="has changed"):
        bug.located(tmp_path)


def test_a_bug_is_looked_for_also_when_no_further_test_may_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """.ci/run says until when tests may begin; the tests of a planted bug belong to one that has begun."""
    monkeypatch.setattr("tests.proof.mutations.COPIED", ())
    monkeypatch.setattr("tests.proof.mutations.HURRY", ())  # a profile of conftest.py
    monkeypatch.setenv("OWL_TESTS_UNTIL", "0")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to start
    (tmp_path / "test_it.py").write_text('import os\n\ndef test_it():\n    assert "OWL_TESTS_UNTIL" in os.environ\n')
    code, said = Copy(tmp_path).test(["test_it.py"])
    assert code == FAILED, said


TOGETHER = 4  # few, so that a limited time cuts off few; not one, since the tests run once without any bug
CHOSEN, SKIPPED = chosen_for_commit()
GROUPS = [CHOSEN[first : first + TOGETHER] for first in range(0, len(CHOSEN), TOGETHER)]


@pytest.mark.slow
def test_every_bug_finds_its_place_and_its_tests() -> None:
    assert len(CHOSEN) >= 16
    assert len({mutation.name for mutation in mutations()}) == len(CHOSEN) + len(SKIPPED)
    for mutation in mutations():
        assert mutation.located(ROOT).is_file()
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("planted", GROUPS, ids=lambda planted: planted[0].name)
def test_the_planted_bugs_of_this_commit_are_caught(planted: list[Mutation]) -> None:
    assert run(planted, workers=1 if "PYTEST_XDIST_WORKER" in os.environ else 2) == []


@pytest.mark.slow
def test_the_bugs_of_other_commits() -> None:
    pytest.skip("not planted for this commit: " + "; ".join(mutation.name for mutation in SKIPPED))
