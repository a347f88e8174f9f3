"""tables, introspect and plan as a person runs them, against the emulator with its sample tables."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.src.core.backends.packaged import PACKAGED, PackagedModel
from app.src.service import languages
from hana_emulator.testing import Emulator

Cli = Callable[..., Any]

NOTIFICATIONS = """
[[collections]]
name = "notifications"
source = "SAPDEMO.QMEL"
where = "MANDT = '100'"
template = "{QMTXT}. {LTEXT}"
metadata = ["QMART"]
"""


@pytest.fixture
def hana(sample: Emulator) -> dict[str, str]:
    """Variables for the emulator, the test embedder and a local store that is not there yet."""
    return {
        "HANA_HOST": sample.host,
        "HANA_PORT": str(sample.port),
        "HANA_USER": sample.user,
        "HANA_PASSWORD": sample.password,
        "HANA_ENCRYPT": "false",
        "OWL_SAP_EMBEDDING__MODEL": "hash:64",
        "OWL_SAP_STORE__KIND": "local",
        "OWL_SAP_STORE__PATH": "vectors",
    }


def in_hana(hana: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in hana.items() if not name.startswith("OWL_SAP_STORE")} | {
        "OWL_SAP_STORE__SCHEMA": "SAPDEMO"
    }


def execute(sample: Emulator, *statements: str) -> None:
    with closing(sample.connect(autocommit=True)) as connection:
        for statement in statements:
            connection.cursor().execute(statement)


# -------------------------------------------------------------------------------------------------------------- tables


def test_tables(cli: Cli, here: Cli, hana: dict[str, str]) -> None:
    listed = cli("tables", "--json", **hana).json
    assert {"schema": "SAPDEMO", "name": "MAKT", "kind": "table", "comment": "Material descriptions", "columns": 4,
            "rows": 786} in listed  # fmt: skip
    views = [entry["name"] for entry in here("tables", "SAPDEMO", "--search", "v_mat", "--json", **hana).json]
    assert views == ["V_MATERIALS"]
    shown = here("tables", "SAPDEMO", "--limit", "2", **hana)
    assert "KNA1" in shown.out
    assert "MARA" not in shown.out
    assert "raise --limit" in shown.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["tables", "SAPDEM"], 2, ["no schema 'SAPDEM'", "'SAPDEMO'"]),
        (["introspect", "SAPDEMO.MARAA"], 2, ["SAPDEMO.MARAA", "'MARA'"]),
        (["introspect", "sapdemo.MARA"], 2, ["'SAPDEMO'", "case-sensitive"]),
        (["introspect", "MARA"], 2, ["SCHEMA.TABLE"]),
        (["introspect", "SAPDEMO.MARA", "--name", "a b"], 2, ["'a b'", "letters, digits"]),
        (["introspect", "SAPDEMO.NOTEXT"], 2, ["no column that looks like text", "K, N"]),
        (["introspect"], 2, ["TABLE"]),
    ],
)
def test_what_is_not_there(
    here: Cli, sample: Emulator, hana: dict[str, str], arguments: list[str], code: int, words: list[str]
) -> None:
    execute(sample, "CREATE TABLE SAPDEMO.NOTEXT (K INTEGER PRIMARY KEY, N DOUBLE)")
    try:
        run = here(*arguments, **hana)
    finally:
        execute(sample, "DROP TABLE SAPDEMO.NOTEXT")
    assert (run.code, run.out) == (code, "")
    assert all(word in run.err for word in words), run.err


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["tables"], marks=pytest.mark.slow),
        pytest.param(["introspect", "SAPDEMO.MARA"], marks=pytest.mark.slow),
        ["plan", "notifications"],
    ],
)
def test_without_hana(here: Cli, tmp_path: Path, hana: dict[str, str], arguments: list[str]) -> None:
    (tmp_path / "owl-sap.toml").write_text(NOTIFICATIONS, encoding="utf-8")
    away = here(*arguments, **hana | {"HANA_PORT": "1", "OWL_SAP_HANA__CONNECT_TIMEOUT": "0.2"})
    assert (away.code, away.out) == (3, "")
    unset = here(*arguments, **{name: value for name, value in hana.items() if not name.startswith("HANA_")})
    assert (unset.code, unset.out) == (2, "")
    assert "[hana] host" in unset.err


# ---------------------------------------------------------------------------------------------------------- introspect


@pytest.mark.parametrize(
    "table",
    [
        "MARA",
        "QMEL",
        "V_MATERIALS",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("MAKT", "MATERIAL_TEXT", "KNA1")),
    ],
)
def test_a_proposal_works_as_it_stands(here: Cli, tmp_path: Path, hana: dict[str, str], table: str) -> None:
    proposed = here("introspect", f"SAPDEMO.{table}", "--name", "tried", **hana)
    assert proposed.code == 0, proposed.err
    assert "# " in proposed.out
    (tmp_path / "owl-sap.toml").write_text(proposed.out, encoding="utf-8")
    planned = here("plan", "tried", "--json", "--no-estimate", **hana)
    assert planned.code == 0, planned.err
    (report,) = here("sync", "tried", "--json", **hana).json
    assert report["upserted"] == planned.json["new"] > 100
    assert report["tokens"] == planned.json["tokens"]


def test_the_proposal_as_json(here: Cli, hana: dict[str, str]) -> None:
    document = here("introspect", "SAPDEMO.QMEL", "--json", **hana).json
    (block,) = tomllib.loads(document["toml"])["collections"]
    assert block == {
        name: document[name] for name in ("name", "source", "key", "where", "template", "metadata", "changes")
    }
    assert (block["key"], block["template"]) == (["MANDT", "QMNUM"], "{QMTXT}. {LTEXT}")
    assert set(document["reasons"]) <= set(block)
    assert tomllib.loads(here("introspect", "SAPDEMO.QMEL", **hana).out) == {"collections": [block]}


def test_a_table_whose_texts_stand_elsewhere(here: Cli, hana: dict[str, str]) -> None:
    document = here("introspect", "SAPDEMO.MARA", "--json", **hana).json
    assert (document["source"], document["template"]) == ("SAPDEMO.MAKT", "{MAKTX}")
    assert "SAPDEMO.MARA has no text of its own" in document["reasons"]["source"]
    assert document["create_view"].startswith('CREATE VIEW "SAPDEMO"."V_MARA"')
    assert "WHEN 'E' THEN 1 WHEN 'D' THEN 2 ELSE 3" in document["create_view"]
    german = here("introspect", "SAPDEMO.MARA", "--language", "de", "--json", **hana).json
    assert "WHEN 'D' THEN 1 WHEN 'E' THEN 2 ELSE 3" in german["create_view"]


def test_a_name_that_is_taken_gets_a_number(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    (tmp_path / "owl-sap.toml").write_text(NOTIFICATIONS.replace('"notifications"', '"qmel"'), encoding="utf-8")
    assert here("introspect", "SAPDEMO.QMEL", "--json", **hana).json["name"] == "qmel-2"


def test_only_the_catalogue(here: Cli, hana: dict[str, str]) -> None:
    document = here("introspect", "SAPDEMO.V_MATERIALS", "--catalog-only", "--json", **hana).json
    assert "where" not in document
    assert "NOT PROVEN UNIQUE" in document["reasons"]["key"]


# ---------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("place", [pytest.param("local", marks=pytest.mark.slow), "hana"])
def test_a_plan_writes_nothing_and_says_what_sync_does(
    here: Cli, tmp_path: Path, sample: Emulator, hana: dict[str, str], place: str
) -> None:
    (tmp_path / "owl-sap.toml").write_text(NOTIFICATIONS, encoding="utf-8")
    variables = hana if place == "local" else in_hana(hana)
    first = here("plan", "notifications", "--json", **variables)
    assert first.code == 0, first.err
    plan = first.json
    assert {"rows", "new", "changed", "deleted", "tokens", "truncated", "duplicates", "estimated_seconds",
            "samples"} <= set(plan)  # fmt: skip
    assert (plan["rows"], plan["changed"], plan["deleted"], plan["truncated"]) == (545, 0, 0, 0)
    assert plan["new"] + plan["empty"] == 545
    assert plan["estimated_seconds"] > 0
    assert len(plan["samples"]) == 5
    assert not (tmp_path / "vectors").exists()
    assert [entry["name"] for entry in here("tables", "SAPDEMO", "--search", "OWL_", "--json", **variables).json] == []

    (report,) = here("sync", "notifications", "--json", **variables).json
    assert (report["upserted"], report["tokens"]) == (plan["new"], plan["tokens"])
    execute(sample, "UPDATE SAPDEMO.QMEL SET QMTXT = 'Entirely new words' WHERE QMNUM = '000010000105'")
    again = here("plan", "notifications", "--json", **variables).json
    assert (again["new"], again["changed"], again["unchanged"]) == (0, 1, plan["new"] - 1)
    execute(sample, "UPDATE SAPDEMO.QMEL SET QMTXT = 'Accident: fall on puddle' WHERE QMNUM = '000010000105'")


def test_a_plan_for_people(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    (tmp_path / "owl-sap.toml").write_text(NOTIFICATIONS, encoding="utf-8")
    run = here("plan", "notifications", "--samples", "2", **hana)
    assert run.code == 0
    assert "notifications: about" in run.err
    (line,) = run.out.splitlines()  # into a pipe, one object a collection: the document
    assert len(json.loads(line)["samples"]) == 2
    tables = here("--output", "table", "plan", "notifications", "--samples", "2", **hana).out
    assert all(title in tables for title in ("a sync would do", "Texts as they"))
    narrow = here("--output", "table", "plan", "notifications", **hana | {"COLUMNS": "80"})
    assert re.search(r"about [\d.]+ s, without writing \(reading took", narrow.err), narrow.err
    assert "a sync would run without a pause" in narrow.err
    assert re.search(r"[\d,]+ long texts are split into chunks, so no text is truncated", narrow.err), narrow.err
    quiet = here("plan", "notifications", "--samples", "0", "--no-estimate", "--json", **hana).json
    assert (quiet["estimated_seconds"], quiet["samples"]) == (None, [])


def test_a_plan_tells_of_the_brake(here: Cli, tmp_path: Path, sample: Emulator, hana: dict[str, str]) -> None:
    (tmp_path / "owl-sap.toml").write_text(NOTIFICATIONS, encoding="utf-8")
    assert here("sync", "notifications", **hana).code == 0
    narrow = NOTIFICATIONS.replace("MANDT = '100'", "MANDT = '100' AND QMART = 'M1'")
    (tmp_path / "owl-sap.toml").write_text(narrow, encoding="utf-8")
    run = here("plan", "notifications", "--json", **hana)
    assert (run.code, run.json["paused"]) == (0, "max_deletes")
    assert run.json["deleted"] > 300
    assert "--max-deletes 1" in here("plan", "notifications", "--no-estimate", **hana).err


def test_what_cannot_be_planned(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    (tmp_path / "owl-sap.toml").write_text(NOTIFICATIONS, encoding="utf-8")
    unknown = here("plan", "notification", **hana)
    assert (unknown.code, 'did you mean "notifications"' in unknown.err) == (2, True)
    assert here("sync", "notifications", **hana).code == 0
    # Another model is no error: the plan is that of the generation which a sync would build.
    other = here("plan", "notifications", "--json", **hana | {"OWL_SAP_EMBEDDING__MODEL": "hash:32"})
    assert (other.code, other.json["new"] > 0, other.json["unchanged"]) == (0, True, 0)
    nowhere = here("plan", "notifications", **in_hana(hana) | {"OWL_SAP_STORE__SCHEMA": "NOWHERE"})
    assert (nowhere.code, "NOWHERE" in nowhere.err) == (2, True)
    small = here("plan", "notifications", **in_hana(hana) | {"OWL_SAP_STORE__SCHEMA": "sapdemo"})
    assert (small.code, "Did you mean 'SAPDEMO'" in small.err) == (2, True)
    wrong = here("plan", "notifications", **hana | {"HANA_PASSWORD": "canary-91"})
    assert (wrong.code, "canary-91" in wrong.err) == (3, False)


def test_a_model_is_proposed_that_knows_the_rows(
    here: Cli, hana: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    english = hana | {"OWL_SAP_EMBEDDING__MODEL": "all-MiniLM-L6-v2"}
    known = {
        "all-MiniLM-L6-v2": PackagedModel("sys", "", {}, ("en",)),
        "use-multilingual": PackagedModel("sys", "", {}, ("en", "de")),
    }
    monkeypatch.setattr(languages, "PACKAGED", known)
    document = here("introspect", "SAPDEMO.V_MATERIALS", "--json", **english).json
    assert document["model"] == "use-multilingual"
    assert set(document["languages"]) == {"de", "en"}
    assert re.fullmatch(
        r"\d+ of 200 sampled rows are German; all-MiniLM-L6-v2 knows only English", document["reasons"]["model"]
    )
    (block,) = tomllib.loads(document["toml"])["collections"]
    assert block["model"] == "use-multilingual"
    assert f"# {document['reasons']['model']}" in document["toml"]
    assert here("introspect", "SAPDEMO.V_MATERIALS", "--json", **english).json == document  # always the same
    # The test embedder's languages are not known, and the service's notifications are English.
    for table, variables in (("V_MATERIALS", hana), ("QMEL", english)):
        other = here("introspect", f"SAPDEMO.{table}", "--json", **variables).json
        assert (other["model"], "model" in tomllib.loads(other["toml"])["collections"][0]) == (None, False)
    # A model whose package is not installed would fail the next sync.
    known["use-multilingual"] = PackagedModel("no_such_package", "", {}, ("en", "de"), extra="multilingual")
    absent = here("introspect", "SAPDEMO.V_MATERIALS", "--json", **english).json
    assert (absent["model"], "model" in tomllib.loads(absent["toml"])["collections"][0]) == (None, False)
    assert 'add model = "use-multilingual"' in absent["notes"][0]
    assert "multilingual" in absent["notes"][0]


def test_init_writes_the_proposed_model_into_the_block(
    here: Cli, tmp_path: Path, hana: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED, "use-multilingual", PackagedModel("sys", "", {}, ("en", "de")))
    english = hana | {"OWL_SAP_EMBEDDING__MODEL": "all-MiniLM-L6-v2"}
    made = here("init", "--table", "SAPDEMO.V_MATERIALS", "--yes", **english)
    assert (made.code, "are German; all-MiniLM-L6-v2 knows only English" in made.err) == (0, True)
    (block,) = tomllib.loads((tmp_path / "owl-sap.toml").read_text("utf-8"))["collections"]
    assert block["model"] == "use-multilingual"


def test_sync_and_search_warn_of_languages_on_stderr(
    here: Cli, tmp_path: Path, hana: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"hash:64": PackagedModel("sys", "", {}, ("en",))}  # the test embedder passes for an English model
    monkeypatch.setattr(languages, "PACKAGED", known | {"use-multilingual": PackagedModel("sys", "", {}, ("en", "de"))})
    block = here("introspect", "SAPDEMO.V_MATERIALS", "--name", "tried", **hana).out
    (tmp_path / "owl-sap.toml").write_text(block.replace('model = "use-multilingual"', ""), encoding="utf-8")
    planned = here("plan", "tried", "--no-estimate", **hana)
    assert re.search(r"languages of 200 sampled rows: \d+ \w+, \d+ \w+", planned.err), planned.err
    synced = here("sync", "tried", **hana)
    (german,) = re.findall(r"tried: (\d+) of 200 sampled rows are German; hash:64 knows only English", synced.err)
    assert 80 < int(german) < 120  # half of the rows, by SPRAS where the text does not decide
    assert "owl-sap generations tried --switch" in synced.err
    assert "sampled rows" not in here("sync", "tried", **hana).err
    asked = here("search", "tried", "bequemer Stuhl bei Rückenschmerzen", "-k", "1", **hana)
    assert (asked.code, asked.err.count("the search text is German")) == (0, 1)
    assert "search text" not in here("search", "tried", "office chair", "-k", "1", **hana).err
