"""docs/guides.md: each recommendation has one of few answers, each variable of the guides is answered, and what an
answer names is there.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from pydantic import BaseModel

from app.src.settings import Settings
from tests.docs.sections import ROOT
from tests.docs.variables_by_card import guides_variables

PAGE = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
ANSWERS = ("done", "measured", "declined", "not ours")
GUIDES = 5


def sections() -> dict[str, list[tuple[str, str, str]]]:
    """Heading -> (recommendation, answer, reason) of its table."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for part in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        heading, _, text = part.partition("\n")
        rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
        cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
        assert all(len(row) == 3 for row in cells), heading
        found[heading] = [(row[0], row[1], row[2]) for row in cells]
    return found


ROWS = [row for rows in sections().values() for row in rows]


def test_every_guide_has_its_part() -> None:
    assert len(sections()) == GUIDES
    assert all(len(rows) >= 8 for rows in sections().values())
    assert len(ROWS) > 80


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_recommendation_has_an_answer_and_a_reason(row: tuple[str, str, str]) -> None:
    recommendation, answer, reason = row
    assert answer in ANSWERS
    if answer in ("declined", "measured"):
        assert len(reason) >= 8, recommendation
    if answer == "measured":
        assert re.search(r"\d|benchmarks\.md", reason), "a measurement has a figure"


def test_the_answers_are_explained() -> None:
    explained = set(re.findall(r"\*\*([a-z ]+)\*\*:", PAGE))
    assert explained == set(ANSWERS) == set(Counter(answer for _, answer, _ in ROWS))


@pytest.mark.parametrize("name", sorted(guides_variables()))
def test_every_variable_is_answered(name: str) -> None:
    assert re.search(rf"`{name}\b[^`]*`", "\n".join(recommendation for recommendation, _, _ in ROWS)), name


def test_settings_that_it_names_exist() -> None:
    known = set(_settings(Settings))
    named = set(re.findall(r"`((?:embedding|tensorrt|store|sync|api|worker|state)\.[a-z_]+)`", PAGE))
    assert len(named) >= 8
    assert named <= known


def _settings(model: type[BaseModel], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += _settings(inner, path + ".")
        else:
            found.append(path)
    return found


def test_files_that_it_names_exist() -> None:
    named = set(re.findall(r"`((?:app|connector|docs|scripts|benchmarks)/[\w./-]+)`", PAGE))
    linked = {target for target in re.findall(r"\]\(([^)#\s]+)", PAGE) if "://" not in target}
    assert len(linked) >= 8
    assert {name for name in named if not (ROOT / name).exists()} == set()
    assert {link for link in linked if not (ROOT / "docs" / link).exists()} == set()
