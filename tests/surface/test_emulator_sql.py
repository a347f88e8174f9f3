"""`owl-sap emulator sql`: from arguments and from a pipe."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.hana.prompt import split
from hana_emulator.testing import Emulator, running
from tests.forked import owl_sap
from tests.surface.conftest import ROOT

pytest.importorskip("hdbcli")

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with running("--data", str(tmp_path_factory.mktemp("house") / "data")) as emulator:
        yield emulator
        assert emulator.stop() == 0


@pytest.fixture
def sql(cli: Cli, house: Emulator) -> Cli:
    started = ("emulator", "--output", "table", "sql", "--port", str(house.port))
    return lambda *arguments, **more: cli(*started, *arguments, **more)


def test_statements_from_arguments(sql: Cli) -> None:
    run = sql(
        "CREATE TABLE A1 (K INTEGER, T NVARCHAR(20)); INSERT INTO A1 VALUES (1000, 'it''s; here')",
        "SELECT K, T, NULL AS N FROM A1",
        "DROP TABLE A1;",
    )
    assert run.code == 0, run.err
    assert [word in run.out for word in ("1000", "it's; here", "NULL", "rows: 1")] == [True] * 4


def test_a_batch_says_once_what_it_changed(sql: Cli) -> None:
    inserts = ";".join(f"INSERT INTO A2 VALUES ({number})" for number in range(40))
    run = sql("CREATE TABLE A2 (K INTEGER)", inserts, "SELECT COUNT(*) AS N FROM A2")
    assert (run.code, run.err.splitlines()) == (0, ["41 statements done, 40 rows affected"])
    run = sql("DELETE FROM A2 WHERE K < 10; DELETE FROM A2 WHERE K = 20; DELETE FROM NOSUCH")
    assert run.code == 2
    refused, done = run.err.splitlines()
    assert (done, "259" in refused) == ("2 statements done, 11 rows affected", True)
    assert sql("DROP TABLE A2").err.splitlines() == ["1 statements done, 0 rows affected"]


def test_statements_from_a_pipe(sql: Cli) -> None:
    text = "-- a comment; with a semicolon\nSELECT 'a;b' AS X FROM DUMMY;\n\n/* ; */ SELECT 2 AS Y\nFROM DUMMY"
    run = sql("--json", stdin=text)
    assert run.code == 0, run.err
    assert run.json == [
        {"columns": ["X"], "rows": [["a;b"]], "affected": 1},
        {"columns": ["Y"], "rows": [[2]], "affected": 1},
    ]


def test_into_a_pipe_each_row_is_a_line(cli: Cli, house: Emulator) -> None:
    statements = ("SELECT 1 A, HEXTOBIN('FF') B, NULL C FROM DUMMY", "SELECT 2 A, NULL B, 'x' C FROM DUMMY")
    run = cli("emulator", "sql", "--port", str(house.port), *statements)
    assert run.code == 0, run.err
    assert [json.loads(line) for line in run.out.splitlines()] == [
        {"A": 1, "B": "ff", "C": None},
        {"A": 2, "B": None, "C": "x"},
    ]


def test_values_in_json(sql: Cli) -> None:
    statement = (
        "SELECT TO_REAL_VECTOR('[1,2.5]') V, HEXTOBIN('00FF') B, TO_DATE('2024-02-29') D, "
        "TO_DECIMAL('1.25', 5, 2) N, 1 X, 2 X, NULL Z FROM DUMMY"
    )
    (answer,) = sql("--json", statement).json
    assert answer["columns"] == ["V", "B", "D", "N", "X", "X", "Z"]
    assert answer["rows"] == [[[1.0, 2.5], "00ff", "2024-02-29", "1.25", 1, 2, None]]


def test_tables_keep_two_columns_of_one_name_apart(sql: Cli) -> None:
    run = sql("SELECT 1 X, 2 X, TO_REAL_VECTOR('[1,2,3,4,5,6]') V FROM DUMMY")
    assert "X (2)" in run.out
    assert "(6)" in run.out


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("SELEC 1", 2, ["257"]),
        ("SELECT * FROM NOSUCH", 2, ["259", "NOSUCH"]),
        ("SELECT NOSUCH FROM DUMMY", 2, ["260"]),
        ("SELECT 1/0 FROM DUMMY", 2, ["304"]),
        ("INSERT INTO SYS.TABLES VALUES (1)", 3, ["258"]),
    ],
)
def test_hanas_code_and_text_are_shown(sql: Cli, statement: str, code: int, words: list[str]) -> None:
    run = sql(statement, "SELECT 'not reached' FROM DUMMY")
    assert run.code == code
    assert all(word in run.err for word in words), run.err
    assert "not reached" not in run.out


def test_a_line_that_is_dropped(sql: Cli, house: Emulator) -> None:
    run = sql("""ALTER SYSTEM INJECT FAULT '{"match": "FROM DUMMY", "action": "drop_before"}'""", "SELECT 1 FROM DUMMY")
    assert (run.code, "-10807" in run.err) == (3, True)


def test_a_wrong_password_is_tried_once(sql: Cli, cli: Cli, house: Emulator) -> None:
    counted = "SELECT FAILURES FROM SYS.M_EMULATOR_LOGINS WHERE USER_NAME = 'OWL'"
    before = sql("--json", counted).json[0]["rows"]
    login = {"HANA_HOST": house.host, "HANA_PORT": str(house.port), "HANA_PASSWORD": "canary-21"}
    run = cli("emulator", "sql", "SELECT 1 FROM DUMMY", HANA_ENCRYPT="false", **login)
    assert (run.code, "login refused" in run.err, "canary-21" in run.err) == (3, True, False)
    assert sql("--json", counted).json[0]["rows"][0][0] == before[0][0] + 1


# --- where it leads


def test_the_data_folder_is_enough(cli: Cli, tmp_path: Path) -> None:
    with running("--tls", "--data", str(tmp_path / "kept")) as emulator:
        run = cli("emulator", "sql", "--data", "kept", "--json", "SELECT CURRENT_SCHEMA FROM DUMMY")
        assert run.json[0]["rows"] == [["SAPDEMO"]]
        trusted = {"HANA_HOST": "localhost", "HANA_SSL_TRUST_STORE": "kept/tls/ca.pem"}
        assert cli("emulator", "sql", "SELECT 1 FROM DUMMY", HANA_PORT=str(emulator.port), **trusted).code == 0
        assert cli("emulator", "sql", "--port", str(emulator.port), "SELECT 1 FROM DUMMY").code == 3
        assert emulator.stop() == 0
    gone = cli("emulator", "sql", "--data", "kept", "SELECT 1 FROM DUMMY")
    assert (gone.code, "owl-sap emulator --data kept" in gone.err) == (2, True)


def test_hana_settings_that_lead_to_this_machine_are_taken(cli: Cli, house: Emulator) -> None:
    login = {"HANA_HOST": house.host, "HANA_PORT": str(house.port), "HANA_ENCRYPT": "false"}
    assert cli("emulator", "sql", "SELECT 1 FROM DUMMY", **login).code == 0


@pytest.mark.parametrize("host", ["db.example", "10.0.0.1", "localhost.example"])
def test_a_real_hana_is_never_spoken_to(cli: Cli, host: str) -> None:
    run = cli("emulator", "sql", "SELECT 1 FROM DUMMY", HANA_HOST=host)
    assert (run.code, run.out, host in run.err) == (2, "", True)


def test_without_an_address_it_says_what_to_give(cli: Cli) -> None:
    run = cli("emulator", "sql", "SELECT 1 FROM DUMMY")
    assert (run.code, "--port" in run.err, "--data" in run.err) == (2, True, True)


def test_options_before_the_name_are_refused(cli: Cli) -> None:
    run = cli("emulator", "--port", "5", "sql", "SELECT 1 FROM DUMMY")
    assert (run.code, "owl-sap emulator sql" in run.err) == (2, True)


def test_a_bad_fault_ends_the_start(cli: Cli) -> None:
    run = cli("emulator", "--fault", '{"match": "x"}')
    assert (run.code, run.out, '"action" must be one of' in run.err) == (2, "", True)


# --- cutting


@pytest.mark.parametrize(
    ("text", "statements", "rest"),
    [
        ("", [], ""),
        ("A;B;", ["A", "B"], ""),
        (" A ; ; B", ["A"], " B"),
        ("SELECT ';' X;", ["SELECT ';' X"], ""),
        ("""SELECT "a;b" X; Y""", ['SELECT "a;b" X'], " Y"),
        ("SELECT 'it''s;' X; Y", ["SELECT 'it''s;' X"], " Y"),
        ("SELECT 'open; X", [], "SELECT 'open; X"),
        ("A; SELECT 'open; X", ["A"], " SELECT 'open; X"),
        ("A /* ; */ B; C", ["A /* ; */ B"], " C"),
        ("A /* ; B; C", [], "A /* ; B; C"),
        ("A -- ; x\nB; C", ["A -- ; x\nB"], " C"),
        ("-- only ;\n; X", [], " X"),
        ("1/2-3; X", ["1/2-3"], " X"),
    ],
)
def test_statements_are_cut_outside_quotes_and_comments(text: str, statements: list[str], rest: str) -> None:
    assert split(text) == [*statements, *filter(None, [rest.strip()])]


_BODY = """CREATE TRIGGER T1 AFTER UPDATE ON T REFERENCING NEW ROW N FOR EACH ROW
BEGIN -- END;
  IF :n.A = 1 THEN INSERT INTO L VALUES (CASE WHEN :n.B = 'END;' THEN 1 END); ELSE DELETE FROM L; END IF;
  UPDATE L SET "BEGIN" = CASE :n.A WHEN 2 THEN 'x' END;
END"""
_CREATED = _BODY.replace("CREATE", "create or  replace")
_UNFINISHED = "CREATE TRIGGER T1 AFTER INSERT ON T BEGIN DELETE FROM L; X"


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        (f"A; {_BODY}; B;", ["A", _BODY, "B"]),
        (f"/* first; */ {_CREATED}; B", [f"/* first; */ {_CREATED}", "B"]),
        (_BODY + ";" + _BODY + ";", [_BODY, _BODY]),
        (_UNFINISHED, [_UNFINISHED]),
        ("CREATE TRIGGER T1; X", ["CREATE TRIGGER T1", "X"]),
        ("DROP TRIGGER T1; BEGIN; X", ["DROP TRIGGER T1", "BEGIN", "X"]),
    ],
)
def test_the_body_of_a_trigger_is_not_cut(text: str, statements: list[str]) -> None:
    assert split(text) == statements


def test_a_trigger_can_be_made_at_the_prompt(sql: Cli) -> None:
    run = sql(
        "--json",
        'CREATE TABLE SUBJECT (A INTEGER, B NVARCHAR(9)); CREATE TABLE L (A INTEGER, "BEGIN" NVARCHAR(9));'
        + _BODY.replace("ON T ", "ON SUBJECT ").replace("INTO L VALUES", "INTO L (A) VALUES")
        + "; INSERT INTO SUBJECT VALUES (2, 'b'); UPDATE SUBJECT SET A = 1; SELECT COUNT(*) AS C FROM L;"
        " DROP TABLE SUBJECT; DROP TABLE L",
    )
    assert run.code == 0, run.err
    assert [document["rows"] for document in run.json if document["columns"]] == [[[1]]]


@given(st.lists(st.text(alphabet="ab;'\"-/*\n ", max_size=12), max_size=4))
def test_quoted_parts_are_never_cut(parts: list[str]) -> None:
    text = "".join("SELECT '{}' X;".format(part.replace("'", "''")) for part in parts)
    assert len(split(text)) == len(parts)


@given(st.text(alphabet="ab;'\"-/*\n ", max_size=30))
def test_cutting_loses_nothing(text: str) -> None:
    place = 0
    for statement in split(text):
        assert statement.strip() == statement != ""
        place = text.index(statement, place) + len(statement)


def test_the_verb_logs_in_with_the_schema_named(tmp_path: Path) -> None:
    """SQLAlchemy reflects the current schema only where it is the user's own."""
    arguments = ["emulator", "--port", "0", "--data", str(tmp_path / "data"), "--schema", "OWL"]
    process = owl_sap(*arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process:
        try:
            assert process.stdout is not None
            emulator = Emulator(process, **json.loads(process.stdout.readline()))
            cursor = emulator.connect().cursor()
            cursor.execute("SELECT CURRENT_USER, CURRENT_SCHEMA FROM DUMMY")
            assert (emulator.schema, *cursor.fetchone()) == ("OWL", "OWL", "OWL")
            assert emulator.stop() == 0
        finally:
            process.kill()
