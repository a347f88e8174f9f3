"""`owl-sap search` over the emulator's sample tables: every mode and option, both stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hana_emulator.testing import Emulator
from tests.surface.conftest import Cli, Run

CONFIGURATION = """
[[collections]]
name = "materials"
source = "SAPDEMO.V_MATERIALS"
key = ["MANDT", "MATNR", "SPRAS"]
where = "MANDT = '100'"
template = "{MAKTX}. Number {MATNR}"
metadata = ["MTART", "SPRAS"]
"""
Search = Callable[..., Run]
SLOW_LOCAL, SLOW_HANA = (pytest.param(kind, marks=pytest.mark.slow) for kind in ("local", "hana"))


@pytest.fixture(params=["local", "hana"])
def search(request: pytest.FixtureRequest, here: Cli, tmp_path: Path, sample: Emulator) -> Search:
    """`search("text", "--option", ...)` in a collection that is synced."""
    (tmp_path / "owl-sap.toml").write_text(CONFIGURATION)
    place = {name: str(getattr(sample, name.lower())) for name in ("HOST", "PORT", "USER", "PASSWORD")}
    variables = {f"HANA_{name}": value for name, value in place.items()} | {
        "HANA_ENCRYPT": "false",
        "OWL_SAP_EMBEDDING__MODEL": "hash:64",
        "OWL_SAP_STORE__KIND": request.param,
        "OWL_SAP_STORE__SCHEMA": "SAPDEMO",
    }
    if request.param == "local":
        variables["OWL_SAP_STORE__PATH"] = "vectors"
    assert here("sync", "materials", **variables).code == 0

    def run(*arguments: str, **more: str) -> Run:
        return here("search", "materials", *arguments, **variables | more)

    return run


@pytest.mark.parametrize("search", ["local"], indirect=True)
def test_a_card_that_is_asked_for_and_missing(search: Search) -> None:
    """The hashing model computes on no card. Words need no vectors, so nobody asks where these are."""
    refused = search("chair", OWL_SAP_STORE__SCAN="gpu")
    assert refused.code == 2
    assert '[store] scan = "gpu"' in refused.err
    assert search("chair", "--mode", "keyword", OWL_SAP_STORE__SCAN="gpu").code == 0


@pytest.mark.parametrize("search", [SLOW_LOCAL, "hana"], indirect=True)
def test_every_mode_and_option(search: Search) -> None:
    english = ("--filter", json.dumps({"SPRAS": "E"}), "--json")
    words = search("swivel chair", "--mode", "keyword", *english).json
    assert all("chair" in hit["text"].lower() or "swivel" in hit["text"].lower() for hit in words)
    assert "swivel chair" in words[0]["text"].lower()
    assert {hit["key"]["SPRAS"] for hit in words} == {"E"}
    scores = [hit["score"] for hit in words]
    assert scores == sorted(scores, reverse=True)

    number = words[0]["key"]["MATNR"]
    for written in (number, number.lstrip("0")):
        assert search(written, "--mode", "keyword", *english).json[0]["key"]["MATNR"] == number

    both = search("swivel chair", "--mode", "hybrid", "-k", "5", *english).json
    assert len(both) == 5
    assert both[0]["key"]["MATNR"] in {hit["key"]["MATNR"] for hit in words[:3]}, "three sizes of one chair"
    assert all(hit["score"] <= 1.5 for hit in both)

    assert search("swivel chair", "-k", "5", *english).json == both, "the default for a text"
    by_vector = [*english, "--mode", "vector"]
    near = search("swivel chair", "-k", "5", *by_vector).json
    least = near[1]["score"]
    kept = search("swivel chair", "-k", "5", "--min-score", str(least), *by_vector).json
    assert [hit["id"] for hit in kept] == [hit["id"] for hit in near if hit["score"] >= least]

    spread = search("swivel chair", "-k", "5", "--mmr", "0.2", *by_vector).json
    assert spread[0]["id"] == near[0]["id"]
    assert [hit["id"] for hit in spread] != [hit["id"] for hit in near]
    assert search("swivel chair", "-k", "5", "--mmr", "1", *by_vector).json == near


@pytest.mark.parametrize("search", ["local", SLOW_HANA], indirect=True)
def test_words_need_no_model_and_notes_go_to_stderr(search: Search) -> None:
    nowhere = {"OWL_SAP_EMBEDDING__MODEL": "/no/such/model"}
    run = search("chair", "--mode", "keyword", "--json", **nowhere)
    assert (run.code, run.err) == (0, "")
    assert run.json
    serving = search("chair", "--mode", "hybrid", "--json", **nowhere)
    assert (serving.code, bool(serving.json)) == (0, True), "a query is embedded by the model that serves"

    noted = search("chair", "--mode", "keyword", "--filter", '{"MTARD": "HIBE"}', "--json")
    assert (noted.code, noted.json) == (0, [])
    assert "MTARD" in noted.err
    assert "MTART, SPRAS" in noted.err
    shown = search("chair", "--mode", "keyword")
    assert "chair" in shown.out.lower()


def test_nothing_in_a_text_is_syntax_and_bad_filters_are_refused(search: Search) -> None:
    hostile = search('"chair" OR (NOT * NEAR/2 -text:x) % \' ; DROP TABLE records', "--mode", "keyword", "--json")
    assert hostile.code == 0
    assert any("chair" in hit["text"].lower() for hit in hostile.json)
    assert search("((", "--mode", "keyword", "--json").json == []
    bad = search("chair", "--mode", "hybrid", "--filter", '{"MTART": {"$foo": 1}}')
    assert (bad.code, "$foo" in bad.err) == (2, True)
