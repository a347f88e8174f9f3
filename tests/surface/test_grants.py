"""`owl-sap grants` on the emulator: a user with just these rights can do everything, is refused beyond, and misses each
one that is taken from him.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from app.src.api.server import create_app
from app.src.cli import app
from app.src.service.service import Service
from app.src.settings import load
from connector.hana.privileges import excess
from connector.model import TableRef
from hana_emulator.testing import Emulator

pytest.importorskip("hdbcli")

METHODS = {
    "full": "{}",
    "hashed": '{ method = "full", hash = "server" }',
    "marked": '{ method = "watermark", column = "AT", delay = "0s" }',
    "logged": '{ method = "log" }',
    "rowid": '{ method = "rowid" }',
    "delta": '{ method = "delta", delay = "0s" }',
}
PASSWORD = "Right-1"
_numbers = count(1)


@dataclass
class Place:
    """A schema with a table for each method of finding changes, and a technical user who may do nothing yet."""

    emulator: Emulator
    folder: Path
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        self.run(f"CREATE SCHEMA {self.source}", f"CREATE TABLE {self.source}.OTHER (K INTEGER PRIMARY KEY)")
        for name in METHODS:
            columns = "K INTEGER PRIMARY KEY, TXT NVARCHAR(50), AT TIMESTAMP"
            self.run(
                f"CREATE COLUMN TABLE {self.source}.{name.upper()} ({columns})",
                f"INSERT INTO {self.source}.{name.upper()} VALUES (1, 'a pump', CURRENT_UTCTIMESTAMP)",
                f"INSERT INTO {self.source}.{name.upper()} VALUES (2, 'a chair', CURRENT_UTCTIMESTAMP)",
            )
        records = 'K INTEGER, "Change_Type" NVARCHAR(1), "Change_Date" TIMESTAMP'
        self.run(f'CREATE TABLE {self.source}."DELTA_Delta" ({records})')
        self.run(f'CREATE USER {self.user} PASSWORD "{PASSWORD}" NO FORCE_FIRST_PASSWORD_CHANGE')
        blocks = [
            f'[[collections]]\nname = "{name}"\nsource = "{self.source}.{name.upper()}"\ntemplate = "{{TXT}}"\n'
            f"changes = {changes}\n"
            for name, changes in METHODS.items()
        ]
        (self.folder / "owl-sap.toml").write_text("\n".join(blocks), encoding="utf-8")

    @property
    def source(self) -> str:
        return f"SRC{self.number}"

    @property
    def vectors(self) -> str:
        return f"VECTORS{self.number}"

    @property
    def user(self) -> str:
        return f"TECH{self.number}"

    def run(self, *statements: str, **login: str) -> list[tuple[Any, ...]]:
        with closing(self.emulator.connect(autocommit=True, **login)) as connection:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def refused(self, statement: str) -> int:
        """The code with which HANA refuses it to the technical user."""
        from hdbcli import dbapi

        with pytest.raises(dbapi.Error) as caught:
            self.run(statement, user=self.user, password=PASSWORD)
        return int(caught.value.errorcode)

    def variables(self, user: str = "") -> dict[str, str]:
        return {
            "HANA_HOST": self.emulator.host,
            "HANA_PORT": str(self.emulator.port),
            "HANA_ENCRYPT": "false",
            "HANA_USER": user or self.user,
            "HANA_PASSWORD": PASSWORD if not user else self.emulator.password,
            "OWL_SAP_STORE__SCHEMA": self.vectors,
            "OWL_SAP_EMBEDDING__MODEL": "hash:16",
            "OWL_SAP_SYNC__PAGE_ROWS": "10",
        }

    def cli(self, *arguments: str, user: str = "") -> Result:
        config = str(self.folder / "owl-sap.toml")
        return CliRunner().invoke(app, ["--config", config, *arguments], env=self.variables(user))

    def grants(self, *arguments: str) -> list[str]:
        done = self.cli("grants", "--json", *arguments)
        assert done.exit_code == 0, done.stderr
        return [statement["sql"] for statement in json.loads(done.stdout)]

    def ready(self) -> list[str]:
        """The log put in by the owner of the table, the grants run."""
        assert self.cli("changes", "install", "logged", "--apply", user=self.emulator.user).exit_code == 0
        statements = self.grants()
        self.run(*statements)
        return statements

    def change(self, name: str) -> None:
        """One row changed, and one more."""
        new = next(_numbers) + 10
        table = f"{self.source}.{name.upper()}"
        self.run(
            f"UPDATE {table} SET TXT = 'a pump of {new}', AT = CURRENT_UTCTIMESTAMP WHERE K = 1",
            f"INSERT INTO {table} VALUES ({new}, 'number {new}', CURRENT_UTCTIMESTAMP)",
        )
        if name == "delta":
            record = f"INSERT INTO {self.source}.\"DELTA_Delta\" VALUES ({{}}, 'A', CURRENT_UTCTIMESTAMP)"
            self.run(record.format(1), record.format(new))

    def failing(self, *names: str) -> set[str]:
        """The collections, of `names` or of all, for which something does not work of what a service does."""
        verbs = ("sync {}", "search {} pump", "quarantine list {}", "quarantine retry {}", "status {}")
        used = {name: verbs if name == "full" else verbs[:2] for name in names or METHODS}
        for name in used:
            self.change(name)
        return {
            name for name, some in used.items() for verb in some if self.cli(*verb.format(name).split()).exit_code != 0
        }


@pytest.fixture
def place(emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in list(os.environ):
        if name.startswith(("OWL_SAP_", "HANA_")):
            monkeypatch.delenv(name)
    made = Place(emulator, tmp_path)
    yield made
    made.run(f"DROP USER {made.user} CASCADE", f"DROP SCHEMA {made.source} CASCADE")


def test_with_just_these_rights_everything_works_and_nothing_else(place: Place) -> None:
    place.ready()
    assert place.failing() == set()
    assert place.failing("marked", "logged", "rowid", "delta") == set(), (
        "after the first run, which compares everything"
    )
    for name in METHODS:
        assert place.cli("verify", name).exit_code == 0
    assert json.loads(place.cli("changes", "install", "logged", "--json").stdout)["complete"]
    examined = {check["check"]: check for check in json.loads(place.cli("doctor", "--json").stdout)}
    assert [name for name, check in examined.items() if not check["ok"]] == []
    assert "no rights beyond those needed" in examined["hana rights"]["detail"]

    source = place.source
    for statement in (
        f"SELECT * FROM {source}.OTHER",
        f"INSERT INTO {source}.FULL VALUES (9, 'x', NULL)",
        f"UPDATE {source}.FULL SET TXT = 'x'",
        f"DELETE FROM {source}.FULL",
        f"INSERT INTO {source}.OWL_LOG_LOGGED (K) VALUES (1)",
        f"DROP TABLE {source}.OWL_LOG_LOGGED",
        f"CREATE TABLE {source}.MINE (K INTEGER)",
        f"GRANT SELECT ON {source}.FULL TO PUBLIC",
        "CREATE SCHEMA MORE",
        'CREATE USER MORE PASSWORD "Right-1"',
    ):
        assert place.refused(statement) == 258, statement


@pytest.mark.slow
def test_each_right_is_needed(place: Place) -> None:
    statements = place.ready()
    assert place.failing() == set()
    single = [
        (name, on)
        for statement in statements
        if statement.startswith("GRANT")
        for names, on in [statement.removeprefix("GRANT ").rpartition(" TO ")[0].split(" ON ")]
        for name in names.split(", ")
    ]
    assert len(single) == len(METHODS) + 3
    for name, on in single:
        place.run(f"REVOKE {name} ON {on} FROM {place.user}")
        concerned = next(each for each in METHODS if each.upper() in on)
        other = "marked" if concerned == "hashed" else "hashed"
        assert place.failing(concerned, other) == {concerned}, f"{name} on {on}"
        place.run(f"GRANT {name} ON {on} TO {place.user}")
    assert place.failing() == set()


@pytest.mark.slow
def test_the_schema_is_needed_and_create_any_is_what_stands_in_for_it(place: Place) -> None:
    assert place.cli("changes", "install", "logged", "--apply", user=place.emulator.user).exit_code == 0
    statements = place.grants()
    schema = [statement for statement in statements if statement.startswith("CREATE SCHEMA")]
    assert schema == [f'CREATE SCHEMA "{place.vectors}" OWNED BY "{place.user}"']
    place.run(*(statement for statement in statements if statement not in schema))
    assert place.failing("full") == {"full"}
    place.run(f"CREATE SCHEMA {place.vectors}")
    assert place.failing("full") == {"full"}
    place.run(f"GRANT CREATE ANY ON SCHEMA {place.vectors} TO {place.user}")
    assert place.failing("full", "logged") == set()


def test_the_rights_to_put_a_log_in(place: Place) -> None:
    statements = place.grants("--setup")
    assert [statement.split(" ON ")[0] for statement in statements] == ["GRANT CREATE ANY", "GRANT TRIGGER"]
    place.run(f'GRANT SELECT ON {place.source}.LOGGED TO "{place.user}"', f"CREATE SCHEMA {place.vectors}")
    for missing in statements:
        place.run(*(statement for statement in statements if statement != missing))
        done = place.cli("changes", "install", "logged", "--apply")
        assert done.exit_code == 3, missing
        place.cli("changes", "install", "logged", "--apply", "--drop", user=place.emulator.user)
        for statement in statements:
            if statement != missing:
                place.run(statement.replace("GRANT", "REVOKE", 1).replace(" TO ", " FROM "))
    place.run(*statements)
    assert place.cli("changes", "install", "logged", "--apply").exit_code == 0


def test_who_only_searches_needs_to_read_the_vectors(place: Place) -> None:
    writer = place.emulator.user
    place.run(f"CREATE SCHEMA {place.vectors}")
    assert place.cli("sync", "full", user=writer).exit_code == 0
    statements = place.grants("--search-only")
    assert statements == [f'GRANT SELECT ON SCHEMA "{place.vectors}" TO "{place.user}"']
    assert place.cli("search", "full", "pump").exit_code == 3
    place.run(*statements)
    for mode in ("vector", "keyword", "hybrid"):
        found = place.cli("search", "full", "pump", "--mode", mode, "--json")
        assert found.exit_code == 0, found.stderr
        assert json.loads(found.stdout)[0]["text"] == "a pump"
    assert place.cli("status", "full").exit_code == 0
    assert place.cli("sync", "full").exit_code != 0
    assert place.refused(f"SELECT * FROM {place.source}.FULL") == 258

    settings = load(place.folder / "owl-sap.toml", environ=place.variables()).settings
    service = Service(settings)
    with TestClient(create_app(service), base_url="http://127.0.0.1") as client:
        assert client.get("/health/ready").status_code == 200
        answer = client.post("/v1/collections/full/search", json={"query": "pump"})
        assert (answer.status_code, answer.json()["hits"][0]["key"]) == (200, {"K": 1})
    place.run(f"DROP SCHEMA {place.vectors} CASCADE")


def test_doctor_says_what_is_more_than_needed(place: Place) -> None:
    def told() -> str:
        checks = {check["check"]: check for check in json.loads(place.cli("doctor", "--json").stdout)}
        assert checks["hana rights"]["ok"], "a warning, no fault"
        return str(checks["hana rights"]["detail"])

    place.ready()
    assert "no rights beyond those needed" in told()
    place.run(f"CREATE ROLE KEEPER{place.number}", f"GRANT DATA ADMIN TO KEEPER{place.number}")
    more = {
        f"KEEPER{place.number}": "DATA ADMIN",
        f"INSERT ON {place.source}.FULL": f"INSERT on {place.source}.FULL",
        f"SELECT ON SCHEMA {place.source}": f"SELECT on schema {place.source}",
    }
    place.run(*(f"GRANT {grant} TO {place.user}" for grant in more))
    found = told()
    assert all(words in found for words in (*more.values(), "owl-sap grants")), found
    place.run(*(f"REVOKE {grant} FROM {place.user}" for grant in more), f"DROP ROLE KEEPER{place.number}")
    assert "no rights beyond those needed" in told()


def test_only_hanas_own_schemas_are_passed_over() -> None:
    """Their names begin like those of other people's."""
    places = ("SYS", "_SYS_BIC", "SYSTEM", "SYS_SALES", "SYSPROD")
    held = tuple(("SELECT", on) for place in places for on in (place, TableRef(place, "T")))
    assert excess("TECH", held, [], ()) == [
        *("SELECT on SYSPROD.T", "SELECT on SYSTEM.T", "SELECT on SYS_SALES.T"),
        *("SELECT on schema SYSPROD", "SELECT on schema SYSTEM", "SELECT on schema SYS_SALES"),
    ]


GOLDEN = """
[hana]
host = "erp.example"
user = "owl"
password = "canary-password"
[store]
schema = "Vectors"
[store.hana]
host = "cloud.example"
user = "Owl@cloud"
password = "canary-password"
[[collections]]
name = "materials"
source = "SAPABAP1.MARA"
template = "{MAKTX}"
[[collections]]
name = "materials-in-german"
source = "SAPABAP1.MARA"
template = "{MAKTG}"
[[collections]]
name = "orders"
source = 'SAPABAP1."/BIC/AZD00100"'
template = "{TXT}"
changes = { method = "log", log = 'LOGS."odd name"' }
"""


def test_the_file_as_it_is_printed(tmp_path: Path) -> None:
    """Names with slashes, quotes and blanks, two systems, one table under two collections."""
    (tmp_path / "owl-sap.toml").write_text(GOLDEN, encoding="utf-8")
    done = CliRunner().invoke(app, ["--config", str(tmp_path / "owl-sap.toml"), "grants"])
    assert done.exit_code == 0, done.stderr
    assert "canary" not in done.stdout
    golden = Path(__file__).with_name("grants.sql")
    if os.environ.get("OWL_WRITE_GOLDEN"):
        golden.write_text(done.stdout, encoding="utf-8")
    assert done.stdout == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("document", "arguments", "words"),
    [
        ('[hana]\nuserkey = "OWL"\n[store]\nschema = "V"\n', [], "--user NAME"),
        ('[hana]\nuser = "u"\n[store]\nschema = "V"\n', ["--setup"], 'method = "log"'),
        ('[hana]\nuser = "u"\n[store]\nkind = "local"\npath = "v"\n', ["--search-only"], "no rights are needed"),
        ('[hana]\nuser = "u"\n[store]\nkind = "local"\npath = "v"\n', [], "no rights are needed"),
    ],
)
def test_where_there_is_nothing_to_grant(tmp_path: Path, document: str, arguments: list[str], words: str) -> None:
    (tmp_path / "owl-sap.toml").write_text(document, encoding="utf-8")
    done = CliRunner().invoke(app, ["--config", str(tmp_path / "owl-sap.toml"), "grants", *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in " ".join(done.stderr.split())


def test_a_schema_of_his_own_name_is_his_already(tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text('[hana]\nuser = "owl"\n[store]\nschema = "OWL"\n', encoding="utf-8")
    done = CliRunner().invoke(app, ["--config", str(tmp_path / "owl-sap.toml"), "grants"])
    assert done.exit_code == 2
