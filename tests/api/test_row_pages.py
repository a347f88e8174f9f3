"""Rows page by page over HTTP: their order, filters, cursors, the export as CSV, and whose rows they are."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.access.principal import OPERATOR
from app.src.api import search as routes
from app.src.api.export import cell
from app.src.service import browse
from app.src.service.service import Service
from app.src.settings import Settings
from connector.model import Column, Table
from connector.sync.documents import NewDocument
from owl_sap_client import Client
from tests.api.conftest import MATERIALS, TableSource, serving, settings_in
from tests.api.test_document_routes import with_notes

ROWS = "/v1/collections/materials/rows"
COLUMNS = (
    Column("MATNR", "NVARCHAR", 18),
    Column("MAKTX", "NVARCHAR", 400),
    Column("MTART", "NVARCHAR", 4),
    Column("BRGEW", "DECIMAL", 13, 3),
    Column("PRIOK", "NVARCHAR", 1),
)
DANGEROUS = {
    "=1+1": "'=1+1",
    "+cmd|' /C calc'!A0": "'+cmd|' /C calc'!A0",
    "-2+3": "'-2+3",
    "@SUM(A1)": "'@SUM(A1)",
    "\t=1": "'\t=1",
    "\r=1": "'\r=1",
    "\n=1": "'\n=1",
    "＝1": "'＝1",
    "-12.50": "-12.50",
    "+49": "+49",
    "-": "'-",
    "a=b": "a=b",
    "": "",
}


@pytest.fixture(scope="module")
def source() -> TableSource:
    from decimal import Decimal

    source = TableSource()
    source.table = Table(MATERIALS, COLUMNS, primary_key=("MATNR",))
    source.rows_by_key = {
        f"{number:03}": {
            "MATNR": f"{number:03}",
            "MAKTX": f"part {number}",
            "MTART": ("FERT", "ROH", None)[number % 3],
            "BRGEW": None if number == 4 else Decimal(number * 7 % 25) / 2,
            "PRIOK": str(number % 10),
        }
        for number in range(25)
    }
    return source


def settings_for(folder: Path) -> Settings:
    block = {"name": "materials", "source": "S.MARA", "template": "{MAKTX}", "metadata": ["MTART", "BRGEW", "PRIOK"]}
    return Settings.model_validate(settings_in(folder).model_dump(by_alias=True) | {"collections": [block]})


@pytest.fixture(scope="module")
def service(source: TableSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(settings_for(tmp_path_factory.mktemp("pages")), source=source)
    service.sync.run("materials")
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with serving(service) as client:
        yield client


def pages(client: httpx.Client, **query: Any) -> list[list[dict[str, Any]]]:
    found = []
    while True:
        answer = client.get(ROWS, params=query)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["rows"])
        if (after := answer.json()["next"]) is None:
            return found
        query["after"] = after


def every_row(client: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    return [row for page in pages(client, **query) for row in page]


def keys(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["key"]["MATNR"]) for row in rows]


def test_rows_come_by_key_each_once_and_whole(client: httpx.Client) -> None:
    found = pages(client, limit=10)
    assert [len(page) for page in found] == [10, 10, 5]
    assert keys([row for page in found for row in page]) == list(range(25))
    assert found[0][1] == {
        "id": '["001"]',
        "key": {"MATNR": "001"},
        "text": "part 1",
        "metadata": {"MTART": "ROH", "BRGEW": "3.5", "PRIOK": "1"},
        "chunks": ["part 1"],
    }
    for sort in ("-key", "-MATNR"):
        assert keys(every_row(client, sort=sort, limit=7)) == list(reversed(range(25)))
    assert len(pages(client, limit=25)) == 1, "no empty page at the end"


def test_decimals_sort_as_numbers_and_missing_ones_last(client: httpx.Client) -> None:
    order = sorted((number for number in range(25) if number != 4), key=lambda number: number * 7 % 25)
    assert keys(every_row(client, sort="BRGEW", limit=4)) == [*order, 4]
    assert keys(every_row(client, sort="-BRGEW", limit=4)) == [*reversed(order), 4]
    by_text = every_row(client, sort="MTART", limit=4)
    assert [row["metadata"]["MTART"] for row in by_text] == ["FERT"] * 9 + ["ROH"] * 8 + [None] * 8


def test_a_filter_holds_on_every_page(client: httpx.Client) -> None:
    where = json.dumps({"$and": [{"MTART": "ROH"}, {"BRGEW": {"$gte": 4}}]})
    wanted = [number for number in range(25) if number % 3 == 1 and number != 4 and number * 7 % 25 / 2 >= 4]
    assert keys(every_row(client, filter=where, limit=2)) == wanted


def test_pages_stay_in_step_while_rows_change(tmp_path: Path, source: TableSource) -> None:
    """The row of the cursor is deleted, others come and go: of those that stay none is skipped or told twice."""
    own = TableSource()
    own.table, own.rows_by_key = source.table, {key: dict(row) for key, row in source.rows_by_key.items()}
    service = Service(settings_for(tmp_path), source=own)
    with serving(service) as client:
        service.sync.run("materials")
        first = client.get(ROWS, params={"limit": 10}).json()
        for key in ("009", "012"):
            del own.rows_by_key[key]
        own.rows_by_key["0005"] = own.rows_by_key["005"] | {"MATNR": "0005"}
        service.sync.run("materials")
        rest = client.get(ROWS, params={"limit": 50, "after": first["next"]}).json()
        assert keys(rest["rows"]) == [number for number in range(10, 25) if number != 12]
    service.close()


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"sort": "NOPE"}, "sort: no metadata field has this name; declared are: MTART, BRGEW, PRIOK"),
        ({"sort": "a'b"}, "sort: no metadata field"),
        ({"after": "x"}, "after: not a cursor"),
        ({"after": "{cursor}", "sort": "-key"}, "this cursor belongs to sort=key"),
        ({"filter": "{"}, "filter: must be a JSON object"),
        ({"filter": "[" * 4000}, "filter: must be a JSON object"),
        ({"filter": "[1]"}, "filter: must be a JSON object"),
        ({"filter": '{"MTART": {"$nope": 1}}'}, "unknown operator"),
        ({"filter": '{"MTART": {"$gt": 1}}'}, "some stored values have another type"),
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
    ],
)
def test_what_cannot_be_asked_is_refused(client: httpx.Client, query: dict[str, Any], says: str) -> None:
    cursor = client.get(ROWS, params={"limit": 1}).json()["next"]
    given = {
        name: value.replace("{cursor}", cursor) if isinstance(value, str) else value for name, value in query.items()
    }
    for accept in ("application/json", "text/csv"):
        answer = client.get(ROWS, params=given, headers={"Accept": accept})
        assert answer.status_code == 422, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert says in answer.text.replace('\\"', '"')


@pytest.mark.parametrize(
    "content",
    [
        ["key", None, False, None, 1],
        ["key", None, False, None, "\0"],
        ["key", None, False, None],
        ["key", "a'); --", False, "x", "y"],
        ["key", "MTART", 1, 2.0, "y"],
        ["key", "MTART", True, "2", "y"],
        ["key", "MTART", True, True, "y"],
        ["key", "MTART", False, {"type": "date", "date": "2024-01-01"}, "y"],
        ["key", "MTART", False, "x" * 6000, "y"],
        {"key": 1},
        None,
    ],
)
def test_a_forged_cursor_is_refused(client: httpx.Client, content: Any) -> None:
    after = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    answer = client.get(ROWS, params={"after": after})
    assert answer.status_code == 422
    assert "not a cursor" in answer.json()["detail"]


def test_a_collection_without_rows(service: Service, tmp_path: Path) -> None:
    notes = Service(with_notes(tmp_path), source=TableSource())
    with serving(notes) as client:
        assert client.get("/v1/collections/notes/rows").json() == {"rows": [], "next": None}
        assert client.get("/v1/collections/materials/rows").status_code == 404, "never synced"
        assert client.get("/v1/collections/nobody/rows").status_code == 404
    notes.close()


def test_long_texts_make_a_page_shorter(
    service: Service, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browse, "MOST_CHARACTERS", 20)
    found = pages(client, limit=20)
    assert [len(page) for page in found] == [3] * 4 + [2] * 6 + [1]
    assert keys([row for page in found for row in page]) == list(range(25))
    monkeypatch.setattr(browse, "MOST_CHARACTERS", 1)
    assert [len(page) for page in pages(client, limit=20)] == [1] * 25, "one row can always be read"


# ----------------------------------------------------------------------------------------------------------------- CSV


def exported(client: httpx.Client, **query: Any) -> list[list[str]]:
    answer = client.get(ROWS, params=query, headers={"Accept": "text/csv"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/csv; header=present; charset=utf-8"
    return list(csv.reader(io.StringIO(answer.content.decode("utf-8"), newline=""), strict=True))


def test_all_rows_are_exported_in_order(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_EXPORTED_AT_ONCE", 4)
    head, *lines = exported(client, sort="-BRGEW", filter='{"MTART": "FERT"}', limit=1)
    assert head == ["id", "MATNR", "text", "MTART", "BRGEW", "PRIOK"]
    assert lines[0] == ['["021"]', "021", "part 21", "FERT", "11", "1"]
    assert [int(line[1]) for line in lines] == sorted(range(0, 25, 3), key=lambda number: -(number * 7 % 25))
    assert len(exported(client)) == 26


def test_cells_are_quoted_and_never_formulas(tmp_path: Path) -> None:
    notes = Service(with_notes(tmp_path), source=TableSource())
    texts = ['two\r\nlines, "quoted" and äöü 😀', *DANGEROUS]
    written = [
        NewDocument(f"{at:02}", text or "x", {"NUMBER": -1.5, "FLAG": True, "ODD": {"a": [1]}, "NOTE": text})
        for at, text in enumerate(texts)
    ]
    with serving(notes) as client:
        notes.documents.put("notes", written, principal=OPERATOR)
        answer = client.get("/v1/collections/notes/rows", headers={"Accept": "text/csv"})
        assert 'filename="notes.csv"' in answer.headers["content-disposition"]
        assert answer.content.endswith(b"\r\n")
        head, first, *others = csv.reader(io.StringIO(answer.text, newline=""), strict=True)
        assert head == ["id", "text", "FLAG", "NOTE", "NUMBER"]
        assert first == ["00", texts[0], "true", texts[0], "-1.5"]
        assert [line[3] for line in others] == list(DANGEROUS.values())
    notes.close()


def test_every_cell_is_safe() -> None:
    for given, written in DANGEROUS.items():
        assert cell(given) == written
    assert [cell(value) for value in (None, True, -3, 2.5, {"ä": 1})] == ["", "true", "-3", "2.5", '{"ä": 1}']


def test_a_broken_export_does_not_look_whole(
    client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_EXPORTED_AT_ONCE", 4)
    real, calls = service.browse.page, iter(range(9))

    def failing(*given: Any, **more: Any) -> Any:
        if next(calls) == 2:
            raise OSError("for the test")
        return real(*given, **more)

    monkeypatch.setattr(service.browse, "page", failing)
    with pytest.raises(httpx.RemoteProtocolError):
        client.get(ROWS, headers={"Accept": "text/csv"})


def test_an_export_ends_with_the_right_to_it(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_more(scope: Any) -> bool:
        return False

    assert len(exported(client)) == 26, "one page is asked for only once"
    monkeypatch.setattr(routes, "_EXPORTED_AT_ONCE", 4)
    monkeypatch.setattr(routes, "still_may", no_more)
    with pytest.raises(httpx.RemoteProtocolError):
        client.get(ROWS, headers={"Accept": "text/csv"})


# -------------------------------------------------------------------------------------------------------------- others


def test_the_client_reads_them_all(client: httpx.Client) -> None:
    with Client(str(client.base_url)) as ours:
        rows = list(ours.all_rows("materials", sort="-BRGEW", filter={"MTART": "ROH"}, limit=3))
        assert [row.id for row in rows] == [
            row["id"] for row in pages(client, sort="-BRGEW", filter='{"MTART":"ROH"}')[0]
        ]
        page = ours.page("materials", limit=2)
        assert ours.page("materials", limit=1, after=page.next).rows[0].key == {"MATNR": "002"}


def test_fields_of_decimals_have_a_range(client: httpx.Client) -> None:
    fields = {field["name"]: field for field in client.get("/v1/collections/materials/fields").json()["fields"]}
    assert (fields["BRGEW"]["type"], fields["BRGEW"]["min"], fields["BRGEW"]["max"]) == ("number", 0, 12)
    assert (fields["PRIOK"]["type"], fields["PRIOK"]["min"]) == ("text", None), "digits, but a code"


def test_undeclared_numbers_sort_as_numbers(tmp_path: Path) -> None:
    notes = Service(with_notes(tmp_path), source=TableSource())
    with serving(notes) as client:
        years: list[Any] = [10, 9, 100.5]
        written = [NewDocument(str(at), "text", {"year": year, "mixed": at or "x"}) for at, year in enumerate(years)]
        notes.documents.put("notes", [*written, NewDocument("9", "text", {"odd.name": 1})], principal=OPERATOR)
        for sort, ids in (
            ("year", ["1", "0", "2", "9"]),
            ("-year", ["2", "0", "1", "9"]),
            ("mixed", ["1", "2", "0", "9"]),
        ):
            rows = client.get("/v1/collections/notes/rows", params={"sort": sort}).json()["rows"]
            assert [row["id"] for row in rows] == ids
        odd = client.get("/v1/collections/notes/rows", params={"sort": "odd.name"})
        assert odd.status_code == 422, odd.text
    notes.close()
