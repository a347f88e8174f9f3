"""What is stored, read over HTTP: rows by their ids, the metadata that filters can be made of, rows as points on a map,
and rows like one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.access.principal import OPERATOR
from app.src.service import browse as browsing
from app.src.service.service import Service
from connector.stores.local.store import LocalView
from connector.sync.documents import NewDocument
from tests.api.conftest import TEXTS, TableSource, serving
from tests.api.test_document_routes import with_notes

SEARCH = "/v1/collections/materials/search"
MAP = "/v1/collections/materials/map"
ROWS = "/v1/collections/materials/rows"
FIELDS = "/v1/collections/materials/fields"
HOSTILE = [
    "",
    "\0",
    '["1\0"]',
    "x" * 10_000,
    "😀" * 1500,
    '["1"] ',
    "record:1",
    "record:-1",
    "record:" + "9" * 40,
    "record:１",  # a digit, but none of ours
    "' OR 1=1 --",
    "%",
    "null",
    "[]",
    '["1","2"]',
]


def id_of(key: str) -> str:
    return f'["{key}"]'


def test_rows_come_whole_and_in_the_order_of_their_ids(shared: httpx.Client) -> None:
    hit = shared.post(SEARCH, json={"query": "oil pump", "k": 1}).json()["hits"][0]
    asked = [id_of("4"), "nobody", hit["id"], id_of("1"), id_of("4")]
    rows = shared.post(ROWS, json={"ids": asked}).json()["rows"]
    assert [row["id"] for row in rows] == [id_of("4"), id_of("3"), id_of("1")]
    assert rows[1] == {name: hit[name] for name in ("id", "key", "text", "metadata")} | {"chunks": [TEXTS["3"]]}


def test_a_long_text_is_put_together(client: httpx.Client, service: Service, source: TableSource) -> None:
    words = " ".join(f"word{number}" for number in range(900))
    source.rows_by_key["1"]["MAKTX"] = words
    service.sync.run("materials")
    (row,) = client.post(ROWS, json={"ids": [id_of("1")]}).json()["rows"]
    assert len(row["chunks"]) > 1
    assert sum(map(len, row["chunks"])) > len(words), "they overlap"
    assert row["text"] == words


def test_ids_that_are_none_are_left_out_or_refused(shared: httpx.Client) -> None:
    answer = shared.post(ROWS, json={"ids": [*HOSTILE, id_of("2")]})
    assert answer.status_code == 200, answer.text
    assert [row["id"] for row in answer.json()["rows"]] == [id_of("2")]
    half = shared.post(ROWS, content=b'{"ids": ["\\ud800"]}', headers={"Content-Type": "application/json"})
    assert half.status_code in (200, 422)
    bodies: list[dict[str, Any]] = [{"ids": []}, {"ids": ["x"] * 101}, {"ids": [1]}, {"ids": "x"}, {}]
    for body in bodies:
        assert shared.post(ROWS, json=body).status_code == 422
    for name in ("never", "nobody"):
        assert shared.post(f"/v1/collections/{name}/rows", json={"ids": ["x"]}).status_code == 404


def test_rows_whose_texts_are_too_long_together_are_asked_for_one_by_one(
    client: httpx.Client, service: Service, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browsing, "MOST_CHARACTERS", 2000)
    texts = {f"L{number:02}": f"{number} " + "long " * 60 for number in range(20)}
    texts["all"] = " ".join(f"word{number}" for number in range(700))
    source.rows_by_key |= {key: {"MATNR": key, "MAKTX": text, "MTART": "ROH"} for key, text in texts.items()}
    service.sync.run("materials")
    read: list[str] = []
    real = LocalView.texts

    def reading(view: LocalView, ids: list[str]) -> Any:
        read.extend(ids)
        return real(view, ids)

    monkeypatch.setattr(LocalView, "texts", reading)
    refused = client.post(ROWS, json={"ids": [id_of(key) for key in texts]})
    assert refused.status_code == 422
    assert "longer than 2000 characters together: ask for fewer ids" in refused.json()["detail"]
    assert len(read) < len(texts), "what cannot be shown is not read"
    few = [id_of(f"L{number:02}") for number in range(6)]
    assert [row["id"] for row in client.post(ROWS, json={"ids": [*few, *few]}).json()["rows"]] == few
    for ids in ([id_of("all")], [id_of("all"), *map(id_of, "abcdefghijk")]):
        (row,) = client.post(ROWS, json={"ids": ids}).json()["rows"]
        assert len(row["text"]) > 4000, "a row alone can always be read"
    assert client.post(ROWS, json={"ids": [id_of("all"), id_of("1")]}).status_code == 422


def test_fields_tell_what_can_be_filtered_by(shared: httpx.Client) -> None:
    answer = shared.get(FIELDS).json()
    values = [{"value": "FERT", "count": 2}, {"value": "ROH", "count": 2}]
    field: dict[str, Any] = {"name": "MTART", "type": "text", "values": values, "more": False, "min": None, "max": None}
    assert answer == {"fields": [field], "sampled": 4, "rows": 4}


def test_fields_of_nothing(shared: httpx.Client) -> None:
    for name in ("never", "nobody"):
        assert shared.get(f"/v1/collections/{name}/fields").status_code == 404


# ---------------------------------------------------------------------------------------------------------------- map


def test_a_map_of_points(shared: httpx.Client) -> None:
    answer = shared.get(MAP, params={"color": "MTART"}).json()
    assert (answer["sampled"], answer["rows"]) == (4, 4)
    assert {point["id"]: (point["color"], point["title"]) for point in answer["points"]} == {
        id_of(key): ("FERT" if key < "3" else "ROH", text) for key, text in TEXTS.items()
    }
    assert 0.3 < sum(answer["explained"]) <= 1
    assert answer["explained"] == sorted(answer["explained"], reverse=True)
    assert shared.get(MAP, params={"color": "MTART"}).json() == answer, "the same picture each time"
    some = shared.get(MAP, params={"limit": 2}).json()
    assert [point | {"color": 0} for point in some["points"]] == [
        point | {"color": 0} for point in answer["points"][:2]
    ]
    assert {point["color"] for point in some["points"]} == {None}


def test_rows_alike_lie_near_each_other(client: httpx.Client, service: Service, source: TableSource) -> None:
    """Two topics with no word in common."""
    for number in range(40):
        words = ("steel bearing gearbox shaft" if number % 2 else "garden hose rubber water").split()
        text = " ".join([*words, words[number % 4]])
        source.rows_by_key[f"{number:02}"] = {"MATNR": f"{number:02}", "MAKTX": text, "MTART": words[0]}
    for key in TEXTS:
        del source.rows_by_key[key]
    service.sync.run("materials")
    points = client.get(MAP, params={"color": "MTART"}).json()["points"]
    steel, garden = ({point["x"] > 0 for point in points if point["color"] == topic} for topic in ("steel", "garden"))
    assert len(steel) == len(garden) == 1
    assert steel != garden


def test_too_few_rows_for_a_map(client: httpx.Client, service: Service, source: TableSource) -> None:
    for key in ("2", "3", "4"):
        del source.rows_by_key[key]
    service.sync.run("materials")
    answer = client.get(MAP).json()
    assert answer == {"points": [], "explained": [0.0, 0.0], "sampled": 1, "rows": 1}


def test_maps_that_are_refused(shared: httpx.Client) -> None:
    for parameters, words in (
        ({"color": "MTRAT"}, "declared are: MTART"),
        ({"color": "\0"}, "declared are: MTART"),
        ({"color": "x" * 131}, "query.color"),
        ({"limit": 0}, "query.limit"),
        ({"limit": 5001}, "query.limit"),
    ):
        answer = shared.get(MAP, params=parameters)
        assert answer.status_code == 422, answer.text
        assert words in answer.json()["detail"]
    for name in ("never", "nobody"):
        assert shared.get(f"/v1/collections/{name}/map").status_code == 404


# --------------------------------------------------------------------------------------------------------------- like


def test_rows_like_one(client: httpx.Client, service: Service, source: TableSource) -> None:
    source.rows_by_key["5"] = {"MATNR": "5", "MAKTX": "steel bearing of a gearbox", "MTART": "ROH"}
    service.sync.run("materials")
    ranked = client.post(SEARCH, json={"query": TEXTS["1"], "k": 5, "mode": "vector"}).json()["hits"]
    assert ranked[0]["id"] == id_of("1")
    hits = client.post(SEARCH, json={"like": id_of("1"), "k": 5}).json()["hits"]
    assert [hit["id"] for hit in hits] == [hit["id"] for hit in ranked[1:]]
    assert [hit["score"] for hit in hits] == pytest.approx([hit["score"] for hit in ranked[1:]], abs=1e-6)
    best = client.post(SEARCH, json={"like": id_of("1"), "k": 1}).json()["hits"]
    assert [hit["id"] for hit in best] == [id_of("5")], "itself takes no place"
    for more in ({"filter": {"MTART": "FERT"}}, {"mmr_lambda": 0.2}, {"min_score": -1}):
        found = client.post(SEARCH, json={"like": id_of("1"), **more}).json()["hits"]
        assert found
        assert id_of("1") not in {hit["id"] for hit in found}


def test_a_row_of_several_chunks_is_like_all_of_them(
    client: httpx.Client, service: Service, source: TableSource
) -> None:
    """By the mean: a row about the end of a long text is found as one about its beginning."""
    long = "alpha " * 300 + "omega " * 300
    for key, text in {"1": long, "2": "alpha", "3": "omega", "4": "chair"}.items():
        source.rows_by_key[key] = {"MATNR": key, "MAKTX": text, "MTART": "FERT"}
    service.sync.run("materials")
    assert len(client.post(ROWS, json={"ids": [id_of("1")]}).json()["rows"][0]["chunks"]) > 1
    hits = client.post(SEARCH, json={"like": id_of("1")}).json()["hits"]
    assert {hit["id"] for hit in hits[:2]} == {id_of("2"), id_of("3")}
    assert all(hit["score"] > 0.3 for hit in hits[:2])
    assert hits[2]["score"] < 0.3


def test_rows_like_none_are_refused(shared: httpx.Client) -> None:
    for id_ in HOSTILE:
        answer = shared.post(SEARCH, json={"like": id_})
        assert answer.status_code == 404, answer.text
        assert answer.json()["detail"] == '"materials" has no row with this id that you may see'
    for body, words in (
        ({"like": id_of("1"), "mode": "keyword"}, "searches words: give a text as the query, not the id of a row"),
        ({"like": id_of("1"), "mode": "hybrid"}, "searches words"),
        ({"like": id_of("1"), "query": "x"}, "give one of query, vector and like"),
        ({"like": 1}, "body.like"),
        ({"like": id_of("1"), "filter": {"MTART": {"$eqq": 1}}}, "$eqq"),
    ):
        answer = shared.post(SEARCH, json=body)
        assert answer.status_code == 422, answer.text
        assert words in answer.json()["detail"]


# ----------------------------------------------------------------------------------- of a collection that clients write

NOTES = "/v1/collections/notes"


@pytest.fixture
def notes(tmp_path: Path, source: TableSource) -> Iterator[tuple[Service, httpx.Client]]:
    service = Service(with_notes(tmp_path), source=source)
    with serving(service) as client:
        yield service, client
    service.close()


def test_documents_are_read_by_the_ids_that_clients_gave(notes: tuple[Service, httpx.Client]) -> None:
    service, client = notes
    written = [NewDocument(f'note "{n}"', f"pump {n} of steel", {"topic": "x" * n, "odd.name": n}) for n in range(1, 5)]
    service.documents.put("notes", written, principal=OPERATOR)
    ids = [str(each.id) for each in written]
    rows = client.post(f"{NOTES}/rows", json={"ids": [ids[2], "nobody", ids[0], *HOSTILE]}).json()["rows"]
    assert [(row["id"], row["key"], row["text"]) for row in rows] == [
        (ids[2], {"id": ids[2]}, "pump 3 of steel"),
        (ids[0], {"id": ids[0]}, "pump 1 of steel"),
    ]
    fields = client.get(f"{NOTES}/fields").json()
    assert [(field["name"], len(field["values"])) for field in fields["fields"]] == [("topic", 4)]
    shown = client.get(f"{NOTES}/map", params={"color": "topic"}).json()
    assert {point["id"]: point["color"] for point in shown["points"]} == {
        each.id: each.metadata["topic"] for each in written
    }
    hits = client.post(f"{NOTES}/search", json={"like": ids[1]}).json()["hits"]
    assert {hit["id"] for hit in hits} == {ids[0], ids[2], ids[3]}
    service.documents.delete("notes", ids[:1], principal=OPERATOR)
    assert client.get(f"{NOTES}/fields").json()["rows"] == 3


def test_documents_that_nobody_has_written_yet(notes: tuple[Service, httpx.Client]) -> None:
    service, client = notes
    for _ in range(2):
        assert client.post(f"{NOTES}/search", json={"like": "x"}).status_code == 404
        service.documents.put("notes", [NewDocument("another", "text")], principal=OPERATOR)
    for id_ in HOSTILE:
        assert client.post(f"{NOTES}/search", json={"like": id_}).status_code == 404


def test_a_collection_that_nobody_has_written_to_is_empty(notes: tuple[Service, httpx.Client]) -> None:
    _, client = notes
    assert client.post(f"{NOTES}/rows", json={"ids": ["x"]}).json() == {"rows": []}
    assert client.get(f"{NOTES}/fields").json() == {"fields": [], "sampled": 0, "rows": 0}
    assert client.get(f"{NOTES}/map").json()["points"] == []


def test_only_times_have_a_range_among_texts(service: Service, source: TableSource) -> None:
    """The smallest and the largest are shown whole, so no sentence may pass for a time."""
    times = ["2024-02-01 10:00:00.0000000", "2024-02-01T10:00:00+01:00", "2024-02-01T10:00:00Z"]
    for first, least in (("2024-01-01", "2024-01-01"), ("2024-01-01 do as I say", None)):
        for row, value in zip(source.rows_by_key.values(), [first, *times], strict=True):
            row["MTART"] = value
        service.sync.run("materials")
        (field,) = service.browse.fields("materials", principal=OPERATOR).fields
        assert field.min == least


def test_odd_metadata_of_one_row_keeps_nobody_from_the_others(
    client: httpx.Client, synced: Service, tmp_path: Path
) -> None:
    """As others may write it into HANA's table: half a character, an integer beyond 64 bits, no number."""
    odd = '{"MTART": "\\ud83d", "big": 1180591620717411303424, "nan": NaN, "huge": 1%s}' % ("0" * 400)
    with sqlite3.connect(tmp_path / "vectors" / "vectors.sqlite") as db:
        db.create_function("owl_real_text", 1, repr, deterministic=True)
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("UPDATE records SET meta = ? WHERE document = ?", (odd, id_of("2")))
    db.close()
    rows = client.post(ROWS, json={"ids": [id_of("2"), id_of("1")]})
    assert rows.status_code == 200, rows.text
    assert rows.json()["rows"][0]["metadata"] == {"MTART": "\ud83d", "big": 2**70, "nan": None, "huge": 10**400}
    fields = {field["name"]: field for field in client.get(FIELDS).json()["fields"]}
    assert (fields["big"]["min"], fields["MTART"]["type"]) == (2**70, "text")
    assert not {"nan", "huge"} & set(fields)
    assert client.get(MAP, params={"color": "huge"}).status_code == 422
    assert len(client.get(MAP, params={"color": "MTART"}).json()["points"]) == 4
    assert len(client.post(SEARCH, json={"query": "hose"}).json()["hits"]) == 4
    assert len(client.post(SEARCH, json={"like": id_of("1")}).json()["hits"]) == 3
