"""The texts of a table through HTTP, over the emulator and the real driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.src.access.principal import LOOPBACK
from app.src.access.rows import RowsRefused
from app.src.service.catalog import LONGEST_SAMPLE
from app.src.service.service import Service
from connector.errors import UnknownTable
from connector.sync import sampling
from tests.api.conftest import serving
from tests.api.test_routes import problem

ROWS = 900


@pytest.fixture(scope="module")
def client(tables_service: Service) -> Iterator[httpx.Client]:
    with serving(tables_service) as client:
        yield client


@pytest.fixture(scope="module")
def schema(tables_schema: tuple[str, Any]) -> str:
    name, hana = tables_schema
    cursor = hana.cursor()
    for sql in (
        'CREATE COLUMN TABLE "MARA" ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "MTART" NVARCHAR(4), '
        'PRIMARY KEY ("MANDT", "MATNR"))',
        'CREATE COLUMN TABLE "MAKT" ("MANDT" NVARCHAR(3), "MATNR" NVARCHAR(18), "SPRAS" NVARCHAR(1), '
        '"MAKTX" NVARCHAR(40), PRIMARY KEY ("MANDT", "MATNR", "SPRAS"))',
        'CREATE COLUMN TABLE "/BIC/AZD" ("K" INTEGER PRIMARY KEY, "NOTE" NCLOB, "ERDAT" NVARCHAR(8))',
        'CREATE COLUMN TABLE "BOOK" ("K" INTEGER PRIMARY KEY, "NOTE" NCLOB)',
        'CREATE COLUMN TABLE "NUMBERS" ("K" INTEGER PRIMARY KEY)',
        "INSERT INTO \"MARA\" VALUES ('100', '1', 'ROH')",
        "INSERT INTO \"MAKT\" VALUES ('100', '1', 'E', 'Gear oil')",
        "INSERT INTO \"MAKT\" VALUES ('100', '1', 'D', 'Öl')",
        "INSERT INTO \"MAKT\" VALUES ('200', '1', 'D', 'Other client')",
    ):
        cursor.execute(sql)
    rows = [(number, None if number % 9 == 0 else f"note {number} " + "word " * (number % 30), "20240131")
            for number in range(ROWS)]  # fmt: skip
    cursor.executemany('INSERT INTO "/BIC/AZD" VALUES (?, ?, ?)', rows)
    cursor.execute('INSERT INTO "BOOK" VALUES (?, ?)', (1, "tome " * 9000))
    hana.commit()
    return name


def test_texts_as_they_would_be_embedded(client: httpx.Client, schema: str) -> None:
    found = client.post(f"/v1/tables/{schema}/MARA/preview", json={}).json()
    assert (found["source"], found["template"]) == (f"{schema}.MAKT", "{MAKTX}")
    assert sorted(sample["text"] for sample in found["samples"]) == ["Gear oil", "Öl"], "of the proposed client only"
    assert [sample["tokens"] for sample in found["samples"] if sample["text"] == "Gear oil"] == [2]
    assert (found["sampled"], found["truncated"], sum(found["histogram"].values())) == (2, 0, 2)


def test_a_template_of_ones_own(client: httpx.Client, schema: str) -> None:
    body = {"template": "Note of {ERDAT}: {NOTE}", "samples": 3}
    found = client.post(f"/v1/tables/{schema}//BIC/AZD/preview", json=body).json()
    assert len(found["samples"]) == 3
    assert all(sample["text"].startswith("Note of 2024-01-31") for sample in found["samples"])
    assert found["template"] == body["template"]
    of_mara = client.post(f"/v1/tables/{schema}/MARA/preview", json={"template": "{MATNR} {MTART}"}).json()
    assert (of_mara["source"], of_mara["samples"][0]["text"]) == (f"{schema}.MARA", "1 ROH")
    of_texts = client.post(f"/v1/tables/{schema}/MARA/preview", json={"template": "{SPRAS}: {MAKTX}"}).json()
    assert of_texts["source"] == f"{schema}.MAKT"


def test_a_large_table_is_sampled_all_over(client: httpx.Client, schema: str) -> None:
    path = f"/v1/tables/{schema}//BIC/AZD/preview"
    found = client.post(path, json={"template": "{NOTE}", "samples": 8}).json()
    assert 150 <= found["sampled"] <= 250 < ROWS
    assert found["empty"] + sum(found["histogram"].values()) == found["sampled"]
    assert 0 < found["empty"] < found["sampled"] / 5
    numbers = [int(sample["text"].split()[1]) for sample in found["samples"]]
    assert numbers == sorted(numbers)
    assert numbers[0] < ROWS / 8
    assert numbers[-1] > ROWS * 7 / 8 - ROWS / 8
    assert client.post(path, json={"template": "{NOTE}", "samples": 8}).json() == found, "always the same"
    assert client.post(path, json={"template": "{NOTE}", "samples": 0}).json()["samples"] == []


def test_a_text_as_long_as_a_book(client: httpx.Client, schema: str) -> None:
    found = client.post(f"/v1/tables/{schema}/BOOK/preview", json={"samples": 1}).json()
    (sample,) = found["samples"]
    assert (len(sample["text"]), sample["tokens"]) == (LONGEST_SAMPLE, 9000)
    assert (found["chunked"], found["truncated"], found["histogram"]["513+"]) == (1, 0, 1)


def test_the_documented_shape_is_the_answered_one(client: httpx.Client, schema: str) -> None:
    shapes = client.get("/openapi.json").json()["components"]["schemas"]
    found = client.post(f"/v1/tables/{schema}/MAKT/preview", json={}).json()
    assert set(shapes["PreviewBody"]["properties"]) == set(found)
    assert set(shapes["SampledTextBody"]["properties"]) == set(found["samples"][0])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"template": "{NOTES}"}, "Did you mean 'NOTE'"),
        ({"template": "{NOTE"}, "position 1"),
        ({"template": "no column"}, "names no column"),
        ({"template": "{NOTE}", "where": "1 = 1"}, "where"),
        ({"samples": 51}, "samples"),
        ({"samples": "5"}, "samples"),
    ],
)
def test_what_cannot_be_rendered(client: httpx.Client, schema: str, body: dict[str, Any], said: str) -> None:
    assert said in problem(client.post(f"/v1/tables/{schema}//BIC/AZD/preview", json=body), 422)["detail"]


def test_tables_that_have_no_texts_or_are_not_there(client: httpx.Client, schema: str) -> None:
    without = problem(client.post(f"/v1/tables/{schema}/NUMBERS/preview", json={}), 422)
    assert "no column that looks like text" in without["detail"]
    assert client.post(f"/v1/tables/{schema}/NUMBERS/preview", json={"template": "{K}"}).json()["sampled"] == 0
    assert "'NUMBERS'" in problem(client.post(f"/v1/tables/{schema}/NUMBRS/preview", json={}), 404)["detail"]


def test_a_proposed_text_table_that_is_gone_is_not_found(
    client: httpx.Client, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise UnknownTable("there is no table MAKT")

    monkeypatch.setattr(sampling, "preview", gone)
    problem(client.post(f"/v1/tables/{schema}/MARA/preview", json={}), 404)


def test_nobody_previews_rows_that_they_may_not_see(
    client: httpx.Client, tables_service: Service, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refused(principal: Any, name: str | None = None) -> None:
        asked.append((principal, name))
        raise RowsRefused("row rights")

    monkeypatch.setattr(tables_service.rights, "check_every_row", refused)
    problem(client.post(f"/v1/tables/{schema}/MAKT/preview", json={}), 403)
    assert asked == [(LOOPBACK, None)]
