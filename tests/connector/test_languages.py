"""Languages of rows and search texts: the sample tables' rows (SPRAS says which), labelled queries, codes and names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from connector.discovery.languages import SAMPLE, iso, of_rows, of_text, present
from connector.discovery.sap_tables import LANGUAGE_NAMES as NAMES
from hana_emulator.sample.rows import generate

QUERIES = Path(__file__).parents[2] / "benchmarks" / "queries"


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    """Material names by SAP's language key."""
    found: dict[str, list[str]] = {"E": [], "D": []}
    for _, _, language, name in generate().tables["MAKT"]:
        found[language].append(name)
    return found


def queries(direction: str) -> list[str]:
    lines = (QUERIES / "german-tuning.jsonl").read_text("utf-8").splitlines()
    return [each["query"] for each in map(json.loads, lines) if each["group"].startswith(direction)]


def test_queries_by_language():
    assert [query for query in queries("en-") if of_text(query) not in (None, "en")] == []
    german = [query for query in queries("de-") if len(query.split()) >= 3]
    found = [of_text(query) for query in german]
    assert set(found) <= {"de", None}
    assert found.count("de") >= 0.75 * len(german) > 30


@pytest.mark.parametrize(
    "text", ["6205-2Z", "M8x40 DIN 933", "100194", "24 V", "", " \n", "SKF 6205", "Bosch GSR 18V", "📦"]
)
def test_codes_and_names_have_no_language(text):
    assert of_text(text) is None


def test_a_technical_name_with_codes_and_capitals():
    assert of_text("Sechskantschraube M8x40 DIN 933") in ("de", None)
    assert of_text("DICHTUNG FÜR DIE PUMPENWELLE") == of_text("Dichtung für die Pumpenwelle") == "de"
    assert of_text("vanne de sécurité de la chaudière") == "fr"


def test_rows_of_one_language(names):
    assert present(of_rows(names["E"][:SAMPLE])) == ["en"]
    assert present(of_rows(names["D"][:SAMPLE])) == ["de"]
    assert present(of_rows(["Sechskantschraube M8x40 DIN 933", "Sechskantmutter M8 DIN 934", "Zylinderschraube"])) == [
        "de"
    ]


def test_rows_of_two_languages_are_always_judged_alike(names):
    mixed = [*names["E"][:100], *names["D"][:100]]
    counts = of_rows(mixed)
    assert set(present(counts)) == {"en", "de"}
    assert of_rows(mixed) == counts
    assert min(counts.values()) > 50


def test_a_key_decides_where_the_text_does_not(names):
    assert of_rows(["DIN 125", "M8"], ["D", "D"]) == {"de": 2}
    english = names["E"][:SAMPLE]
    wrong = of_rows([f"{name}. Keep it dry and away from sunlight." for name in english], ["D"] * len(english))
    assert present(wrong) == ["en"]  # English texts under the German key are a usual mistake
    assert of_rows([], []) == of_rows(["4711"]) == {}


@pytest.mark.parametrize(
    ("key", "code"),
    [("E", "en"), ("D", "de"), ("EN", "en"), ("de", "de"), ("en_GB", "en"), ("de-AT", "de"), ("1", "zh"), ("Z", ""),
     ("", ""), (None, ""), ("xx", ""), (" ", "")],
)  # fmt: skip
def test_language_keys(key, code):
    assert iso(key) == code
    assert not code or code in NAMES


def test_nothing_is_loaded_before_a_text_is_judged():
    code = "import sys, app.src.cli.application, app.src.service.service; print('py3langid' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
