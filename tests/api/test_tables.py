"""The routes about tables, through HTTP, over the emulator and the real driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from app.src.service.service import Service
from app.src.settings import Settings
from connector.hana.connection import HanaPool
from tests.api.conftest import serving
from tests.api.test_routes import problem


@pytest.fixture(scope="module")
def client(tables_service: Service) -> Iterator[httpx.Client]:
    with serving(tables_service) as client:
        yield client


@pytest.fixture(scope="module")
def schema(tables_schema: tuple[str, Any]) -> str:
    name, hana = tables_schema
    cursor = hana.cursor()
    for sql in (
        'CREATE COLUMN TABLE "/BIC/AZD00100" ("MANDT" NVARCHAR(3), "/BIC/NO" NVARCHAR(10), "/BIC/TXT" NVARCHAR(200) '
        "COMMENT 'Description', PRIMARY KEY (\"MANDT\", \"/BIC/NO\")) COMMENT 'Orders'",
        'CREATE TABLE "NUMBERS" ("K" INTEGER PRIMARY KEY)',
        'CREATE TABLE "a b%.c" ("K" INTEGER PRIMARY KEY, "NOTE" NCLOB)',
        "INSERT INTO \"/BIC/AZD00100\" VALUES ('100', '1', 'A pump')",
    ):
        cursor.execute(sql)
    hana.commit()
    return name


def test_tables(client: httpx.Client, schema: str) -> None:
    listed = client.get("/v1/tables", params={"schema": schema}).json()
    assert [entry["name"] for entry in listed] == ["/BIC/AZD00100", "NUMBERS", "a b%.c"]
    assert listed[0] == {
        "schema": schema, "name": "/BIC/AZD00100", "kind": "table", "comment": "Orders", "columns": 3, "rows": 1
    }  # fmt: skip
    assert client.get("/v1/tables", params={"schema": schema, "search": "order"}).json() == listed[:1]
    assert client.get("/v1/tables", params={"schema": schema, "search": "%"}).json() == listed[2:]
    assert client.get("/v1/tables", params={"schema": schema, "limit": 1, "offset": 1}).json() == listed[1:2]
    assert schema in {entry["schema"] for entry in client.get("/v1/tables", params={"limit": 1000}).json()}


@pytest.mark.parametrize("encode", [str, lambda name: quote(name, safe="")])
def test_a_table_with_slashes_in_its_name(client: httpx.Client, schema: str, encode: Any) -> None:
    found = client.get(f"/v1/tables/{schema}/{encode('/BIC/AZD00100')}").json()
    assert (found["name"], found["kind"], found["comment"], found["rows"]) == ("/BIC/AZD00100", "table", "Orders", 1)
    assert found["key"] == ["MANDT", "/BIC/NO"]
    assert found["columns"][2] == {
        "name": "/BIC/TXT", "type_name": "NVARCHAR", "length": 200, "scale": 0, "nullable": True,
        "comment": "Description",
    }  # fmt: skip
    proposal = found["proposal"]
    assert (proposal["source"], proposal["template"]) == (f"{schema}./BIC/AZD00100", '{"/BIC/TXT"}')
    assert proposal["where"] == "MANDT = '100'"
    assert proposal["toml"].startswith("[[collections]]")


def test_without_looking_at_rows(client: httpx.Client, schema: str) -> None:
    found = client.get(f"/v1/tables/{schema}//BIC/AZD00100", params={"catalog_only": True}).json()
    assert "where" not in found["proposal"]


def test_a_table_for_which_nothing_can_be_proposed(client: httpx.Client, schema: str) -> None:
    found = client.get(f"/v1/tables/{schema}/NUMBERS").json()
    assert found["proposal"] is None
    assert "no column that looks like text" in found["reason"]


def test_odd_characters_in_a_name(client: httpx.Client, schema: str) -> None:
    found = client.get(f"/v1/tables/{schema}/{quote('a b%.c', safe='')}").json()
    assert found["proposal"]["source"] == f'{schema}."a b%.c"'


def test_the_documented_shapes_are_the_answered_ones(client: httpx.Client, schema: str) -> None:
    shapes = client.get("/openapi.json").json()["components"]["schemas"]
    (entry, *_) = client.get("/v1/tables", params={"schema": schema}).json()
    assert set(shapes["TableBody"]["properties"]) == set(entry)
    found = client.get(f"/v1/tables/{schema}//BIC/AZD00100").json()
    assert set(shapes["TableDetailBody"]["properties"]) == set(found)
    assert set(shapes["ProposalBody"]["properties"]) == set(found["proposal"])
    assert set(shapes["ColumnBody"]["properties"]) == set(found["columns"][0])


def test_what_is_not_there_comes_with_the_nearest_names(client: httpx.Client, schema: str) -> None:
    assert f"Did you mean '{schema}'" in problem(client.get(f"/v1/tables?schema={schema.lower()}"), 404)["detail"]
    assert "'NUMBERS'" in problem(client.get(f"/v1/tables/{schema}/NUMBRS"), 404)["detail"]
    assert "no schema" in problem(client.get("/v1/tables/NOPE/NUMBERS"), 404)["detail"]
    problem(client.get(f"/v1/tables/{schema}/"), 404)
    problem(client.get(f"/v1/tables/{schema}/%00"), 404)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "offset=-1", f"search={'a' * 201}"])
def test_what_is_refused(client: httpx.Client, query: str) -> None:
    assert query.partition("=")[0] in problem(client.get(f"/v1/tables?{query}"), 422)["detail"]


def test_while_hana_is_away(client: httpx.Client, tables_service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    from connector.errors import ConnectionLost

    def away(self: HanaPool, *_: Any, **__: Any) -> Any:
        raise ConnectionLost("the session is gone", code=-10807)

    monkeypatch.setattr(HanaPool, "read", away)
    for path in ("/v1/tables", "/v1/tables/S/T"):
        response = client.get(path)
        problem(response, 503)
        assert response.headers["retry-after"]
    assert 'owl_sap_hana_errors_total{code="-10807"} 2.0' in client.get("/metrics").text


def test_without_a_hana_in_the_settings(tmp_path: Path) -> None:
    store = {"kind": "local", "path": tmp_path / "vectors"}
    service = Service(Settings.model_validate({"store": store, "embedding": {"model": "hash:8"}}))
    with serving(service) as client:
        assert "[hana] host" in problem(client.get("/v1/tables"), 500)["detail"]
    service.close()
