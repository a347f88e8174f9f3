"""The command line against the emulator, through the real driver: the whole path and every refusal a database gives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.src.service.service import Service
from app.src.settings import Settings
from hana_emulator.testing import Emulator
from tests.adversity.proxy import AUTHENTICATE, CONNECT, Proxy

pytest.importorskip("hdbcli.dbapi")

STORE = {"HANA_HOST", "HANA_PORT", "HANA_USER", "HANA_PASSWORD", "HANA_ENCRYPT"}
MATERIALS = """
[[collections]]
name = "materials"
source = "SAPDEMO.V_MATERIALS"
key = ["MANDT", "MATNR", "SPRAS"]
where = "MANDT = '100'"
template = "{MAKTX}"
metadata = ["MTART", "SPRAS"]
"""
REPORT = {"collection", "read", "upserted", "unchanged", "empty", "quarantined", "superseded", "deleted", "paused",
          "embedded_texts", "reused_texts", "tokens", "seconds", "rows_per_second", "stages"}  # fmt: skip

Cli = Callable[..., Any]


def variables(emulator: Emulator, prefix: str = "HANA_") -> dict[str, str]:
    names = {name: str(getattr(emulator, name.lower())) for name in ("HOST", "PORT", "USER", "PASSWORD", "SCHEMA")}
    return {prefix + name: value for name, value in (names | {"ENCRYPT": "false"}).items()}


@pytest.fixture
def hana(sample: Emulator) -> Iterator[dict[str, str]]:
    """Variables for the emulator, the test embedder, and a schema of its own for the vectors."""
    execute(sample, 'CREATE SCHEMA "VECTORS"')
    yield variables(sample) | {"OWL_SAP_EMBEDDING__MODEL": "hash:64", "OWL_SAP_STORE__SCHEMA": "VECTORS"}
    execute(sample, 'DROP SCHEMA "VECTORS" CASCADE')


def execute(emulator: Emulator, *statements: str) -> None:
    with closing(emulator.connect(autocommit=True)) as connection:
        for statement in statements:
            connection.cursor().execute(statement)


def query(emulator: Emulator, statement: str) -> list[Any]:
    with closing(emulator.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute(statement)
        rows: list[Any] = cursor.fetchall()
        return rows


def configure(folder: Path, text: str = MATERIALS) -> None:
    (folder / "owl-sap.toml").write_text(text, encoding="utf-8")


def test_the_whole_path(cli: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    configure(tmp_path)
    (first,) = cli("sync", "materials", "--json", **hana).json
    assert set(first) >= REPORT
    assert first["read"] == first["upserted"] + first["empty"] > 500
    (again,) = cli("sync", "--all", "--json", **hana).json
    assert (again["upserted"], again["embedded_texts"]) == (0, 0)
    assert again["unchanged"] == first["upserted"]

    (status,) = cli("status", "materials", "--json", **hana).json
    assert (status["table"], status["schema"], status["dimension"]) == ("OWL_MATERIALS_G1", "VECTORS", 64)
    assert (status["rows"], status["empty"]) == (first["upserted"], first["empty"])

    hits = cli("search", "materials", "swivel chair", "-k", "3", "--filter", '{"SPRAS": "E"}', "--json", **hana).json
    assert len(hits) == 3
    assert set(hits[0]) == {"id", "key", "score", "text", "metadata", "relevance"}
    assert set(hits[0]["key"]) == {"MANDT", "MATNR", "SPRAS"}
    assert {hit["key"]["SPRAS"] for hit in hits} == {"E"}
    assert "chair" in hits[0]["text"]

    report = cli("verify", "materials", "--json", **hana)
    assert (report.code, report.json["ok"], report.json["rows"]) == (0, True, first["upserted"])


def test_output_for_people(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    configure(tmp_path)
    table = ("--output", "table")
    synced = here(*table, "sync", "--all", **hana)
    assert "materials" in synced.out
    assert "rows/s" in synced.err
    assert "materials: ok" in here(*table, "verify", "materials", **hana).out
    assert "chair" in here(*table, "search", "materials", "swivel chair", **hana).out


def test_output_for_programs(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    """Not on a terminal: one JSON object per line with the keys of --json, and progress as such lines on stderr."""
    configure(tmp_path)
    synced = here("sync", "--all", **hana)
    (report,) = lines(synced.out)
    assert set(report) >= REPORT
    progress = [json.loads(line) for line in synced.err.splitlines() if line.startswith("{")]
    assert progress
    assert all(set(line) == {"collection", "done", "total", "rows_per_second"} for line in progress)
    assert (progress[0]["collection"], progress[0]["total"]) == ("materials", report["read"])
    search = ("search", "materials", "swivel chair", "-k", "4")
    for verb in (search, ("status",), ("verify", "materials"), ("doctor",)):
        document = here(*verb, "--json", **hana).json
        records = document if isinstance(document, list) else [document]
        assert [set(line) for line in lines(here(*verb, **hana).out)] == [set(record) for record in records], verb
    assert lines(here(*search, **hana).out) == here(*search, "--json", **hana).json


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_rows_from_one_hana_vectors_in_another(
    here: Cli, tmp_path: Path, hana: dict[str, str], emulator: Emulator, hana_schema: str
) -> None:
    configure(tmp_path)
    both = hana | variables(emulator, "HANA_STORE_") | {"OWL_SAP_STORE__SCHEMA": hana_schema}
    (report,) = here("sync", "materials", "--json", **both).json
    assert report["upserted"] > 500
    assert here("verify", "materials", **both).code == 0
    (elsewhere,) = here("status", "--json", **hana).json
    assert elsewhere["rows"] == 0
    assert here("doctor", **both).code == 0


def test_vectors_in_the_local_store(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    configure(tmp_path)
    local = hana | {"OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": "vectors"}
    assert here("sync", "materials", **local).code == 0
    away = local | {"HANA_PORT": "1"}
    assert here("search", "materials", "swivel chair", "--json", **away).json[0]["key"]["MANDT"] == "100"
    assert (tmp_path / "vectors" / "vectors.sqlite").is_file()


def test_a_filter_that_nothing_passes_says_what_there_is(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    configure(tmp_path)
    assert here("sync", "materials", **hana).code == 0
    run = here("search", "materials", "chair", "--filter", '{"MTARD": "HIBE"}', **hana)
    assert run.code == 0
    assert "MTART, SPRAS" in run.err


def test_a_schema_that_is_not_there_is_told_and_is_no_empty_store(
    here: Cli, tmp_path: Path, hana: dict[str, str]
) -> None:
    configure(tmp_path)
    nowhere = hana | {"OWL_SAP_STORE__SCHEMA": "NOWHERE"}
    for arguments in (["status"], ["search", "materials", "chair"], ["sync", "materials"], ["verify", "materials"]):
        run = here(*arguments, **nowhere)
        assert run.code == 2, (arguments, run.err)
        assert "NOWHERE" in run.err
        assert len(run.err.strip().splitlines()) == 1
    check = next(check for check in here("doctor", "--json", **nowhere).json if check["check"] == "store writable")
    assert not check["ok"]
    assert "NOWHERE" in check["detail"]
    assert "CREATE ANY" in check["fix"]


def test_readiness_needs_the_stores_schema(sample: Emulator, hana: dict[str, str]) -> None:
    login = {name: getattr(sample, name) for name in ("host", "port", "user", "password")} | {"encrypt": False}
    document = {"hana": login, "store": {"schema": "NOWHERE"}, "embedding": {"model": "hash:8"}}
    for schema, ready in (("NOWHERE", False), ("VECTORS", True)):
        document["store"] = {"schema": schema}
        service = Service(Settings.model_validate(document))
        readiness = service.readiness.check()
        assert readiness.checks == {"engine": True, "store": ready}
        assert ready or "NOWHERE" in str(readiness.unavailable)
        service.close()


def test_a_wrong_password(cli: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    configure(tmp_path)
    run = cli("sync", "materials", **hana | {"HANA_PASSWORD": "canary-81"})
    assert run.code == 3
    assert "login refused" in run.err
    assert "not tried again" in run.err
    assert "canary-81" not in run.err
    assert [line for line in run.err.splitlines() if line.startswith("owl-sap:")] == run.err.strip().splitlines()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("V_MATERIALS", "V_MATERIAL", ["SAPDEMO.V_MATERIAL", "V_MATERIALS"]),
        ("SAPDEMO.V", "SAPDEM.V", ["SAPDEM", "SAPDEMO"]),
        ("{MAKTX}", "{MAKT}", ["MAKT", "MAKTX"]),
        ('"MTART"', '"MTARD"', ["MTARD", "MTART"]),
        ('"SPRAS"]\nwhere', '"SPRASS"]\nwhere', ["SPRASS", "SPRAS"]),
        ('key = ["MANDT", "MATNR", "SPRAS"]', "", ["key"]),
        ("MANDT = '100'", "MANDTT = '100'", ["MANDTT"]),
        ("{MAKTX}", "{MAKTX", ["template"]),
    ],
)
def test_what_does_not_fit_the_table(
    here: Cli, tmp_path: Path, hana: dict[str, str], old: str, new: str, words: list[str]
) -> None:
    configure(tmp_path, MATERIALS.replace(old, new, 1))
    run = here("sync", "materials", **hana)
    assert run.code == 2, run.err
    assert all(word in run.err for word in words), run.err
    assert len(run.err.strip().splitlines()) == 1


def test_another_model_is_built_beside_the_one_that_serves(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    configure(tmp_path)
    assert here("sync", "materials", **hana).code == 0
    other = hana | {"OWL_SAP_EMBEDDING__MODEL": "hash:32"}
    built = here("sync", "materials", "--json", **other)
    assert (built.code, built.json[0]["generation"]) == (0, 2)
    assert "--switch" in built.err
    for arguments in (["search", "materials", "chair"], ["verify", "materials"]):
        assert here(*arguments, **other).code == 0
    assert here("status", "--json", **other).json[0]["generation"] == 1


def test_one_failure_does_not_stop_the_others(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    broken = MATERIALS.replace('"materials"', '"broken"').replace("V_MATERIALS", "NOPE")
    configure(tmp_path, broken + MATERIALS)
    run = here("sync", "--all", "--json", **hana)
    assert run.code == 2
    assert [(report["collection"], report["error"] is None) for report in run.json] == [
        ("broken", False),
        ("materials", True),
    ]
    assert run.json[1]["upserted"] > 500
    run = here("--output", "table", "sync", "--all", **hana)
    assert "materials" in run.out
    assert "broken" not in run.out, "a failed collection has no counts"
    *_, last = run.err.splitlines()
    assert re.match(r"owl-sap: broken: .*NOPE.*OWL-1005", last)


SMALL = """
[[collections]]
name = "small"
source = "SMALL.T"
template = "{TEXT}"
"""


@pytest.fixture
def small(sample: Emulator, tmp_path: Path) -> Iterator[None]:
    configure(tmp_path, SMALL)
    rows = [f"INSERT INTO SMALL.T VALUES ('{key}', 'row number {key}')" for key in range(10)]
    execute(
        sample, "CREATE SCHEMA SMALL", "CREATE TABLE SMALL.T (K NVARCHAR(3000) PRIMARY KEY, TEXT NVARCHAR(50))", *rows
    )
    yield
    execute(sample, "DROP SCHEMA SMALL CASCADE")


@pytest.mark.usefixtures("small")
def test_a_bad_row_is_set_aside_and_the_others_go_on(here: Cli, sample: Emulator, hana: dict[str, str]) -> None:
    execute(sample, f"INSERT INTO SMALL.T VALUES ('{'x' * 2500}', 'canary-82')")
    run = here("sync", "small", "--json", **hana)
    assert run.code == 0, run.err
    assert (run.json[0]["upserted"], run.json[0]["quarantined"]) == (10, 1)
    assert "1 rows are in quarantine" in run.err
    assert "canary-82" not in run.err + run.out
    assert here("sync", "small", "--strict", **hana).code == 1
    assert here("status", "--json", **hana).json[0]["quarantined"] == 1


@pytest.mark.usefixtures("small")
def test_many_deletions_pause_and_say_how_to_go_on(here: Cli, sample: Emulator, hana: dict[str, str]) -> None:
    assert here("sync", "small", **hana).code == 0
    execute(sample, "DELETE FROM SMALL.T WHERE K < '5'")
    paused = here("sync", "small", "--json", **hana)
    assert (paused.code, paused.json[0]["paused"], paused.json[0]["deleted"]) == (1, "max_deletes", 0)
    assert "--max-deletes 1" in paused.err
    verified = here("verify", "small", "--json", **hana)
    assert (verified.code, verified.json["orphaned"]) == (1, 5)
    done = here("sync", "small", "--max-deletes", "1", "--json", **hana)
    assert (done.code, done.json[0]["deleted"]) == (0, 5)
    assert here("verify", "small", **hana).code == 0


@pytest.mark.usefixtures("small")
def test_a_search_that_is_not_reranked_says_so_once(
    here: Cli, hana: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert here("sync", "small", **hana).code == 0
    found = here("search", "small", "text", "--json", OWL_SAP_SEARCH__RERANK="builtins:len", **hana)
    assert (found.code, found.err.count("reranked")) == (0, 1)
    assert "rerank" not in caplog.text


@pytest.mark.usefixtures("small")
def test_many_blank_rows_and_another_type_pause_with_the_reason(
    here: Cli, sample: Emulator, hana: dict[str, str]
) -> None:
    execute(sample, *(f"INSERT INTO SMALL.T VALUES ('B{key}', 'more {key}')" for key in range(20)))
    assert here("sync", "small", **hana).code == 0
    execute(sample, "UPDATE SMALL.T SET TEXT = ' ' WHERE K LIKE 'B%'")
    planned = here("plan", "small", "--json", "--no-estimate", **hana)
    assert (planned.json["deleted"], planned.json["emptied"]) == (0, 20)
    expected = "a sync would pause before it deletes more than max_deletes allows: 20 stored rows became blank"
    assert expected in here("plan", "small", **hana).err
    paused = here("sync", "small", "--json", **hana)
    assert (paused.code, paused.json[0]["paused"], paused.json[0]["to_delete"]) == (1, "max_deletes", 0)
    assert paused.json[0]["emptied"] == 20
    assert "20 stored rows became blank" in paused.err
    execute(sample, "ALTER TABLE SMALL.T ALTER (TEXT NCLOB)")
    assert here("plan", "small", "--json", **hana).json["paused"] == "schema_changed"
    retyped = here("sync", "small", "--json", **hana)
    assert (retyped.code, retyped.json[0]["paused"], retyped.json[0]["complete"]) == (1, "schema_changed", False)


def test_doctor_on_a_system_that_is_well(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    configure(tmp_path)
    run = here("doctor", "--json", **hana)
    assert run.code == 0, run.out
    checks = {check["check"]: check["detail"] for check in run.json}
    assert "rows readable" in checks["table of materials"]
    assert "REAL_VECTOR" in checks["vector types"]
    assert "VECTORS" in checks["store writable"]
    assert "can be made and written" in checks["store writable"]
    assert here("sync", "materials", **hana).code == 0
    assert here("doctor", **hana).code == 0, "with the state table there"


def test_doctor_leaves_nothing_in_the_schema(here: Cli, tmp_path: Path, sample: Emulator, hana: dict[str, str]) -> None:
    configure(tmp_path)
    assert here("doctor", **hana).code == 0
    left = query(sample, "SELECT TABLE_NAME FROM SYS.TABLES WHERE SCHEMA_NAME = 'VECTORS'")
    assert left == []


def test_doctor_checks_the_columns_of_a_table(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    configure(tmp_path, MATERIALS.replace("{MAKTX}", "{MAKT}"))
    run = here("doctor", "--json", **hana)
    check = next(check for check in run.json if check["check"] == "table of materials")
    assert (run.code, check["ok"]) == (1, False)
    assert "MAKTX" in check["detail"]


@pytest.mark.parametrize("two_sections", [False, True])
def test_doctor_tries_a_wrong_password_once(
    here: Cli, tmp_path: Path, hana: dict[str, str], two_sections: bool
) -> None:
    """Over all checks of the run, and for a store at the same place with the same user too. A proxy counts."""
    configure(tmp_path)
    with Proxy(int(hana["HANA_PORT"])) as proxy:
        wrong = hana | {"HANA_PORT": str(proxy.port), "HANA_PASSWORD": "canary-86"}
        if two_sections:
            wrong |= {name.replace("HANA_", "HANA_STORE_"): text for name, text in wrong.items() if name in STORE}
        run = here("doctor", "--json", **wrong)
        assert (proxy.requests[AUTHENTICATE], proxy.requests[CONNECT]) == (1, 1)
    assert "canary-86" not in run.out + run.err
    checks = {check["check"]: check for check in run.json}
    assert run.code == 1
    assert checks["hana tcp"]["ok"]
    assert "login refused" in checks["hana login"]["detail"]
    assert "HANA_PASSWORD" in checks["hana login"]["fix"]
    assert ("store hana login" in checks) == two_sections
    assert '"hana login" failed' in checks["table of materials"]["detail"]
