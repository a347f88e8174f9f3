"""What fields and codes are called, over HTTP: HANA's comments and text tables, as far as HANA and rights allow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.src.access.principal import OPERATOR, Principal
from app.src.service import labels as module
from app.src.service.service import Service
from app.src.settings import Settings
from connector.discovery.labels import value_texts
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import Table, TableRef
from hana_emulator.testing import Emulator
from tests.api.conftest import TableSource, serving, settings_in

TABLES = (
    'CREATE TABLE "MARA" ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18) COMMENT \'Material number\', "MTART" NVARCHAR(4) '
    "COMMENT 'Material type', \"MATKL\" NVARCHAR(9), \"BRGEW\" DECIMAL(13,3) COMMENT ' Gross weight ', "
    '"ERSDA" NVARCHAR(8) COMMENT \'Created on date\', "MAKTX" NVARCHAR(40), PRIMARY KEY ("MANDT", "MATNR"))',
    'CREATE TABLE "T134T" ("MANDT" NVARCHAR(3), "SPRAS" NVARCHAR(1), "MTART" NVARCHAR(4), "MTBEZ" NVARCHAR(25), '
    'PRIMARY KEY ("MANDT", "SPRAS", "MTART"))',
    'CREATE VIEW "V_MARA" AS SELECT * FROM "MARA"',
)
TYPES = (
    ("100", "E", "ERSA", "Spare parts"),
    ("100", "D", "ERSA", "Ersatzteile"),
    ("200", "E", "ERSA", "Spares"),
    ("100", "D", "ROH", "Rohstoff"),
    ("100", "F", "FERT", "Produit fini"),
    ("100", "E", "HALB", " "),
    ("100", "E", "OTHR", "Never used"),
)


@pytest.fixture(scope="module")
def pool(tables_schema: tuple[str, Any], emulator: Emulator) -> Iterator[HanaPool]:
    _, connection = tables_schema
    for statement in TABLES:
        connection.cursor().execute(statement)
    connection.cursor().executemany('INSERT INTO "T134T" VALUES (?, ?, ?, ?)', TYPES)
    rows = [("100", f"{n}", kind, "X", n, "20240131", f"part {n}") for n, kind in enumerate(("ERSA", "ROH", "FERT"))]
    connection.cursor().executemany('INSERT INTO "MARA" VALUES (?, ?, ?, ?, ?, ?, ?)', rows)
    connection.commit()
    login = {each: getattr(emulator, each) for each in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, encrypt=False), size=2) as pool:
        yield pool


def service_over(emulator: Emulator, folder: Path, schema: str, **more: Any) -> Service:
    block = {
        "name": "materials",
        "source": f"{schema}.V_MARA",
        "key": ["MANDT", "MATNR"],
        "where": "MANDT = '100'",
        "template": "{MAKTX}",
        "metadata": ["MTART", "MATKL", "BRGEW", "ERSDA"],
    }
    login = {each: getattr(emulator, each) for each in ("host", "port", "user", "password")} | {"encrypt": False}
    store = {"kind": "local", "path": folder / "vectors"}
    given = {"hana": login, "store": store, "embedding": {"model": "hash:8"}, "collections": [block | more]}
    return Service(Settings.model_validate(given))


def test_fields_are_called_as_in_hana(
    pool: HanaPool, emulator: Emulator, tables_schema: tuple[str, Any], tmp_path: Path
) -> None:
    service = service_over(emulator, tmp_path, tables_schema[0])
    service.sync.run("materials")
    with serving(service) as client:
        fields = client.get("/v1/collections/materials").json()["fields"]
    assert [(field["name"], field["label"], field["type"]) for field in fields] == [
        ("MANDT", "MANDT", "text"),
        ("MATNR", "Material number", "text"),
        ("MTART", "Material type", "text"),
        ("MATKL", "MATKL", "text"),
        ("BRGEW", "Gross weight", "number"),
        ("ERSDA", "Created on date", "date"),
    ]
    values = {field["name"]: field["values"] for field in fields if field["values"]}
    assert values == {"MTART": {"ERSA": "Spare parts", "ROH": "Rohstoff"}}, "of used codes, the client's, in E else D"
    service.close()


def test_codes_of_hidden_rows_have_no_texts(
    pool: HanaPool, emulator: Emulator, tables_schema: tuple[str, Any], tmp_path: Path
) -> None:
    service = service_over(emulator, tmp_path, tables_schema[0], row_rights={"MTART": "kind"})
    service.sync.run("materials")

    def texts(who: Principal) -> dict[str, str]:
        fields = service.labels.fields("materials", (), principal=who)
        return next(field.values for field in fields if field.name == "MTART")

    assert texts(Principal("x", frozenset({"search"}), {"kind": "ROH"})) == {"ROH": "Rohstoff"}
    assert texts(Principal("x", frozenset({"search"}), {"kind": ["ERSA"]})) == {"ERSA": "Spare parts"}
    assert texts(Principal("x", frozenset({"search"}))) == {}
    assert texts(Principal("x", frozenset({"sync"}), {"kind": "ROH"})) == {}, "what rows hold needs the scope search"
    assert len(texts(OPERATOR)) == 2
    service.close()


def test_a_text_that_is_not_certain_is_none(pool: HanaPool, tables_schema: tuple[str, Any]) -> None:
    codes = ["ERSA", "ROH", "FERT", "HALB", "?"]
    assert value_texts(pool, tables_schema[0], "MTART", codes) == {"ERSA": "Ersatzteile", "ROH": "Rohstoff"}
    of_client = value_texts(pool, tables_schema[0], "MTART", codes, where="\"MANDT\" = '200' AND 1 = 1")
    assert of_client == {"ERSA": "Spares"}


def test_without_hana_names_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TableSource()
    service = Service(settings_in(tmp_path), source=source)
    service.sync.run("materials")
    monkeypatch.setattr(source, "describe", lambda ref: 1 / 0)
    with serving(service) as client:
        for _ in range(2):
            fields = client.get("/v1/collections/materials").json()["fields"]
            assert fields[0] == {"name": "MATNR", "label": "MATNR", "type": "text", "values": {}}
    service.close()


def test_while_hana_hangs_names_stay_as_they_are_and_one_thread_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TableSource()
    service = Service(settings_in(tmp_path), source=source)
    service.sync.run("materials")
    asked: list[Any] = []
    hangs = threading.Event()

    def describe(ref: TableRef) -> Table:
        asked.append(ref)
        hangs.wait(60)
        raise OSError("away")

    monkeypatch.setattr(module, "_WAIT", 0.05)
    monkeypatch.setattr(source, "describe", describe)
    with serving(service) as client:
        for _ in range(3):
            assert client.get("/v1/collections/materials").json()["fields"][0]["label"] == "MATNR"
    assert not hangs.is_set()
    assert len(asked) == 1
    hangs.set()
    service.close()


def test_what_was_read_is_kept_while_hana_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TableSource()
    first, *others = source.table.columns
    source.table = Table(source.table.ref, (replace(first, comment="Material number"), *others), ("MATNR",))
    service = Service(settings_in(tmp_path), source=source)
    asked: list[Any] = []
    away = threading.Event()
    real = source.describe

    def describe(ref: TableRef) -> Table:
        asked.append(ref)
        if len(asked) == 1:
            return real(ref)
        away.set()
        raise OSError("away")

    def label() -> str:
        return service.labels.fields("materials", ("MATNR",), principal=OPERATOR)[0].label

    monkeypatch.setattr(source, "describe", describe)
    assert [label(), label()] == ["Material number"] * 2
    assert len(asked) == 1, "read once"
    service.labels._kept["materials", ""].until = 0.0
    assert label() == "Material number"
    assert away.wait(60)
    assert [label(), label()] == ["Material number"] * 2
    assert len(asked) == 2, "asked in vain, and not again at once"
    service.close()
