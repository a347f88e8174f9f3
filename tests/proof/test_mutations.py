"""The list of planted bugs fits the code of today; all of them are planted and caught in the slow run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.proof.mutations import FAILED, ROOT, Copy, Mutation, mutations, run


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
def test_each_bug_can_be_planted_and_names_its_tests(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert mutation.applied(text) != text
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_there_are_enough() -> None:
    assert len({mutation.name for mutation in mutations()}) == len(mutations()) >= 10


def test_a_bug_is_looked_for_also_when_no_further_test_may_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """.ci/run says until when tests may begin; the tests of a planted bug belong to one that has begun."""
    monkeypatch.setattr("tests.proof.mutations.COPIED", ())
    monkeypatch.setattr("tests.proof.mutations.HURRY", ())  # a profile of tests/conftest.py
    monkeypatch.setenv("OWL_TESTS_UNTIL", "0")
    (tmp_path / "test_it.py").write_text('import os\n\ndef test_it():\n    assert "OWL_TESTS_UNTIL" in os.environ\n')
    code, said = Copy(tmp_path).test(["test_it.py"])
    assert code == FAILED, said


TOGETHER = 6
"""Bugs a test plants: few, so that a limited time cuts off few; not one, since its tests run without any bug first."""
GROUPS = [mutations()[first : first + TOGETHER] for first in range(0, len(mutations()), TOGETHER)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("planted", GROUPS, ids=lambda planted: planted[0].name)
def test_every_planted_bug_is_caught(planted: list[Mutation]) -> None:
    assert run(planted, workers=1 if "PYTEST_XDIST_WORKER" in os.environ else 2) == []
