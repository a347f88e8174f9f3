"""The labelled queries of benchmarks/queries: their keys exist in the emulator's sample rows, there are enough of them,
and those of a group `paraphrase` share no content word with any row that answers them."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hana_emulator.sample import all_rows

ROOT = Path(__file__).parents[2]
QUERIES = ROOT / "benchmarks" / "queries"
TEMPLATES = {
    block["name"]: block["template"]
    for block in tomllib.loads((ROOT / "app/src/demo.toml").read_text())["collections"]
    if block["name"] in ("materials", "notifications")
}
_FUNCTION_WORDS = """
a about after against all am an and any are as at be been but by can could did do does for from had has have he her
his how i if in into is it its me my no not of off on or our out over per she so some than that the their them then
there these they this those to too under up was we were what when where which while who will with without would you
your aber alle als am an auch auf aus bei bis da das dass dem den der des die doch du durch ein eine einem einen
einer eines er es für gegen hat ich ihr im in ist ja kann kein keine man mehr mein mit muss nach nicht noch nur ob
oder ohne sein seine sich sie sind so um und uns unter vom von vor war was wenn wer wie wird zu zum zur über
"""
STOP = frozenset(_FUNCTION_WORDS.split())


def labelled(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (QUERIES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def rows(name: str) -> dict[tuple[str | None, ...], str]:
    """Text by key: what is rendered of a row, the words of the template included."""
    tables = all_rows().tables
    constant = re.sub(r"\{[^}]*\}", " ", TEMPLATES[name])
    if name == "materials":
        long = {row[:3]: row[3] for row in tables["MATERIAL_TEXT"]}
        return {row[:3]: f"{row[3]} {long.get(row[:3])} {constant} EUR" for row in tables["MAKT"] if row[0] == "100"}
    return {row[:2]: f"{row[3]} {row[4]} {constant} {row[6]}" for row in tables["QMEL"] if row[0] == "100"}


def content_words(text: str) -> set[str]:
    return {word for word in re.findall(r"[^\W_]+", text.casefold()) if word not in STOP}


def related(one: str, other: str) -> bool:
    """The same word, or probably one word in two forms, or one within another. Rather yes than no."""
    if one == other:
        return True
    short, long = sorted((one, other), key=len)
    if len(short) < 4:
        return False
    if len(short) >= 5 and short in long:
        return True
    common = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(short))
    return common >= max(4, len(short) - 2)


@pytest.mark.parametrize("name", ["materials", "notifications"])
def test_every_label_is_a_row_that_is_there(name: str) -> None:
    known = rows(name)
    for entry in labelled(name):
        keys = [tuple(key) for key in entry["relevant"]]
        assert keys, entry["query"]
        assert len(set(keys)) == len(keys), entry["query"]
        assert set(keys) <= set(known), entry["query"]


def test_there_are_enough_and_a_third_are_paraphrases() -> None:
    every = [entry for name in TEMPLATES for entry in labelled(name)]
    assert len({entry["query"] for entry in every}) == len(every) >= 60
    assert sum(entry["group"] == "paraphrase" for entry in every) * 3 >= len(every)


def test_the_german_halves_are_alike_and_their_labels_are_rows_in_the_languages_of_their_group() -> None:
    known = rows("materials")
    halves = [labelled("german-tuning"), labelled("german-test")]
    groups = [Counter(entry["group"] for entry in half) for half in halves]
    assert groups[0] == groups[1]
    asked = [entry["query"].casefold() for half in [*halves, *map(labelled, TEMPLATES)] for entry in half]
    assert len(set(asked)) == len(asked)
    for entry in halves[0] + halves[1]:
        target = entry["group"].split()[0].rpartition("-")[2]
        keys = [tuple(key) for key in entry["relevant"]]
        assert len(set(keys)) == len(keys), entry["query"]
        assert set(keys) <= set(known), entry["query"]
        assert {key[2] for key in keys} == {"de": {"D"}, "en": {"E"}, "both": {"D", "E"}}[target], entry["query"]
        language = {"de": {"SPRAS": "D"}, "en": {"SPRAS": "E"}, "both": None}[target]
        assert entry.get("filter") == language, entry["query"]


@pytest.mark.parametrize("name", ["materials", "notifications", "german-tuning", "german-test"])
def test_a_paraphrase_shares_no_content_word_with_its_answers(name: str) -> None:
    known = rows(name if name in TEMPLATES else "materials")
    shared = []
    for entry in labelled(name):
        if entry["group"].endswith("paraphrase"):
            asked = content_words(entry["query"])
            for key in entry["relevant"]:
                found = {(a, b) for a in asked for b in content_words(known[tuple(key)]) if related(a, b)}
                shared += [(entry["query"], *pair) for pair in found]
    assert not set(shared)


@pytest.mark.parametrize(
    ("one", "other", "yes"),
    [
        ("seat", "seated", True),
        ("drivers", "driver", True),
        ("lager", "kugellager", True),
        ("mechanism", "mechanik", True),
        ("fall", "falldämpfer", True),
        ("falling", "falldämpfer", False),
        ("hearing", "heat", False),
        ("rack", "rats", False),
        ("dn", "dns", False),
    ],
)
def test_words_that_count_as_related(one: str, other: str, yes: bool) -> None:
    assert related(one, other) is related(other, one) is yes
