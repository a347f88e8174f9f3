"""Who may see which rows, over HTTP: searches in every mode, what other routes show, and what the audit log tells."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.src.access.principal import LOOPBACK, OPERATOR, Principal
from app.src.api import server
from app.src.api.guard import PRINCIPAL
from app.src.mcp.tools import Refused, get_row
from app.src.service.search import MODES, SearchOptions
from app.src.service.service import Service
from app.src.settings import Settings
from connector.errors import BadFilter
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import ChangeSet, QuarantinedRow
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalView
from connector.stores.ranking import FEWEST_ROWS
from connector.stores.store import VectorStore
from hana_emulator.testing import Emulator
from tests.api.conftest import TableSource, serving, settings_in
from tests.statements import statements

SEARCH = "/v1/collections/materials/search"
ROWS = "/v1/collections/materials/rows"
FIELDS = "/v1/collections/materials/fields"
MAP = "/v1/collections/materials/map?color=MTART&limit=50"
TEXTS = ["pump of steel", "pump of rubber", "pump, pump and a seal", "gearbox", "bearing for a pump"]
OWNERS = ("FERT", "ROH", "HALB")
ANSWERED = {"query": "pump steel"}


class As:
    """Stands where the guard stands: everybody who asks is `who`."""

    def __init__(self, app: ASGIApp, who: list[Principal]) -> None:
        self._app = app
        self._who = who

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PRINCIPAL] = self._who[0]
        await self._app(scope, receive, send)


def claiming(*owners: str) -> Principal:
    return Principal("somebody", LOOPBACK.scopes, {"owner": list(owners)})


def ruled(folder: Path) -> Settings:
    """The settings of the other tests, with row rights and an audit log."""
    base = settings_in(folder)
    blocks = [each.model_dump() | {"row_rights": {"MTART": "owner"}} for each in base.collections]
    audit = {"audit": str(folder / "audit.log")}
    return Settings.model_validate(base.model_dump(by_alias=True) | {"collections": blocks, "access": audit})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return ruled(tmp_path)


def filled(service: Service, source: TableSource) -> Service:
    source.rows_by_key.clear()
    for number in range(60):
        key, owner = f"{number:03}", OWNERS[number % 3]
        text = f"{TEXTS[number % 5]} {number} belongs to {owner}"
        source.rows_by_key[key] = {"MATNR": key, "MAKTX": text, "MTART": owner}
    service.sync.run("materials")
    return service


@pytest.fixture
def synced(service: Service, source: TableSource) -> Service:
    return filled(service, source)


class Asking:
    """A client whose requests come from whoever `who` says."""

    def __init__(self, client: httpx.Client, who: list[Principal]) -> None:
        self.client = client
        self.who = who

    def search(self, who: Principal, **body: Any) -> dict[str, Any]:
        response = self.post(who, SEARCH, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def post(self, who: Principal, path: str, **body: Any) -> httpx.Response:
        self.who[0] = who
        return self.client.post(path, json=body)

    def get(self, who: Principal, path: str) -> httpx.Response:
        self.who[0] = who
        return self.client.get(path)


@contextmanager
def asked(service: Service) -> Iterator[Asking]:
    """The principal is put where the guard has left its own, inside of everything else."""
    who, made = [LOOPBACK], server.create_app

    def create(service: Service) -> Any:
        app = made(service)
        app.user_middleware.append(Middleware(As, who=who))
        return app

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.api.conftest.create_app", create)
        yield Asking(stack.enter_context(serving(service)), who)


@pytest.fixture
def alone(synced: Service) -> Iterator[Asking]:
    """Of a service of one's own."""
    with asked(synced) as asking:
        yield asking


@pytest.fixture(scope="module", params=["local", "hana"])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, emulator: Emulator
) -> Iterator[Service]:
    """Over each kind of store, HANA's on the emulator."""
    source, settings = TableSource(), ruled(tmp_path_factory.mktemp("ruled"))
    with ExitStack() as stack:
        store = None if request.param == "local" else HanaStore(stack.enter_context(in_hana(emulator)), "RULED")
        service = filled(Service(settings, source=source, store=store), source)
        yield service
        service.close()


@contextmanager
def in_hana(emulator: Emulator) -> Iterator[HanaPool]:
    connection = emulator.connect(autocommit=True)
    connection.cursor().execute('CREATE SCHEMA "RULED"')
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, encrypt=False), size=4) as pool:
        yield pool
    connection.cursor().execute('DROP SCHEMA "RULED" CASCADE')
    connection.close()


@pytest.fixture(scope="module")
def asking(shared: Service) -> Iterator[Asking]:
    """Of a service that all these tests share, and none changes."""
    with asked(shared) as asking:
        yield asking


RARELY_HANA = pytest.mark.parametrize(
    "shared", ["local", pytest.param("hana", marks=pytest.mark.slow)], indirect=True, scope="module"
)


def until(done: Callable[[], bool]) -> None:
    for _ in range(3000):
        if done():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


WAYS: list[Mapping[str, Any]] = [
    *({"query": "pump steel", "mode": mode} for mode in MODES),
    {"query": "pump steel", "mode": "vector", "mmr_lambda": 0.3},
    {"query": "pump steel", "mode": "keyword", "mmr_lambda": 0.3},
    {"query": "pump steel", "mode": "hybrid", "mmr_lambda": 0.0},
    {"query": "pump steel", "mode": "hybrid", "min_score": 0.05},
    {"query": "pump steel", "mode": "vector", "min_score": 0.05},
    {"vector": [1.0] * 64},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values()))[:40])
def test_every_way_to_search_finds_what_may_be_seen_and_all_of_it(asking: Asking, way: Mapping[str, Any]) -> None:
    for owner in OWNERS:
        mine = asking.search(claiming(owner), k=50, **way)["hits"]
        assert {hit["metadata"]["MTART"] for hit in mine} == {owner}
        everything = asking.search(OPERATOR, k=50, filter={"MTART": owner}, **way)["hits"]
        assert {hit["id"] for hit in mine} == {hit["id"] for hit in everything}
        if not way.get("mmr_lambda"):
            assert [hit["id"] for hit in mine] == [hit["id"] for hit in everything]
    both = asking.search(claiming("FERT", "ROH"), k=50, **way)["hits"]
    assert {hit["metadata"]["MTART"] for hit in both} == {"FERT", "ROH"}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values()))[:40])
def test_few_of_many_are_found_although_others_are_nearer(asking: Asking, way: Mapping[str, Any]) -> None:
    """The k best of those that may be seen, not those of the k best that may be seen."""
    for k in (1, 5, 15):
        assert len(asking.search(claiming("HALB"), k=k, **way)["hits"]) == min(
            k, len(asking.search(claiming("HALB"), k=50, **way)["hits"])
        )


WIDENING = [
    {"MTART": "ROH"},
    {"MTART": {"$in": ["FERT", "ROH", "HALB"]}},
    {"MTART": {"$ne": "nobody"}},
    {"MTART": {"$like": "%"}},
    {"$or": [{"MTART": "ROH"}, {"MTART": {"$ne": "ROH"}}]},
    {"$or": [{"MTART": None}, {"MTART": {"$ne": None}}]},
    {"$or": [{"MTART": {"$gt": ""}}] * 100},
    {"nothing": None},
]


@RARELY_HANA
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", WIDENING, ids=lambda where: str(where)[:50])
def test_no_filter_widens_what_may_be_seen(asking: Asking, where: Any, mode: str) -> None:
    found = asking.search(claiming("FERT"), query="pump", k=50, filter=where, mode=mode)["hits"]
    assert {hit["metadata"]["MTART"] for hit in found} <= {"FERT"}


@pytest.mark.parametrize("who", [LOOPBACK, claiming(), claiming("*"), claiming("%"), claiming("nobody")], ids=range(5))
@pytest.mark.parametrize("mode", MODES)
def test_without_a_claim_nothing_is_found(asking: Asking, who: Principal, mode: str) -> None:
    assert asking.search(who, query="pump", mode=mode)["hits"] == []


def test_rows_that_may_not_be_seen_move_no_score(alone: Asking, synced: Service, source: TableSource) -> None:
    """Hybrid search takes off what rows have in common: those that the asker may see."""
    for number in range(100, 100 + 2 * FEWEST_ROWS):
        row = {"MATNR": str(number), "MAKTX": f"{TEXTS[number % 5]} of {number}", "MTART": "FERT"}
        source.rows_by_key[str(number)] = row
    synced.sync.run("materials")
    before = alone.search(claiming("FERT"), query="pump steel", mode="hybrid", k=50)["hits"]
    assert len(before) == 50
    for number in range(500, 800):
        source.rows_by_key[str(number)] = {"MATNR": str(number), "MAKTX": "a secret pump of gold", "MTART": "ROH"}
    synced.sync.run("materials")
    alone.search(OPERATOR, query="pump steel", mode="hybrid", k=50)
    assert alone.search(claiming("FERT"), query="pump steel", mode="hybrid", k=50)["hits"] == before


def test_who_has_no_claim_is_told_which(asking: Asking) -> None:
    answer = asking.search(LOOPBACK, query="pump")
    assert answer["notes"] == ['no row is visible: the claim "owner" is missing']
    assert asking.search(claiming(), query="pump")["notes"] == ['no row is visible: the claim "owner" is an empty list']


def test_a_wrong_question_is_as_wrong_for_who_sees_nothing(asking: Asking) -> None:
    for body in ({"query": " "}, {"query": "pump", "filter": {"MTART": {"$eqq": 1}}}):
        refusals = [asking.post(who, SEARCH, **body) for who in (LOOPBACK, OPERATOR)]
        assert [refusal.status_code for refusal in refusals] == [422, 422]
        assert refusals[0].json()["detail"] == refusals[1].json()["detail"]


def test_neither_answers_nor_errors_tell_of_other_rows(alone: Asking, source: TableSource, synced: Service) -> None:
    """Whether a filter can be compared is a question to the rows that may be seen, and to no others."""
    for key, row in source.rows_by_key.items():
        row["MTART"] = "7" if key < "030" else "a secret word"
    synced.sync.run("materials", None)
    guess = {"$and": [{"MTART": {"$like": "a sec%"}}, {"MTART": {"$gt": 1}}]}
    for where in (guess, {"MTART": {"$gt": 1}}, {"MTART": True}):
        mine = alone.post(claiming("7"), SEARCH, query="pump", filter=where)
        assert ("have another type" in mine.text) == (where == {"MTART": True}), "7 is a number and no boolean"
    with pytest.raises(BadFilter):
        synced.search.run("materials", "pump", where={"MTART": {"$gt": 1}}, principal=OPERATOR)


def test_one_who_asks_is_not_answered_with_what_another_was(asking: Asking) -> None:
    """The same words, in turns: what is remembered of a search is nobody's rows."""
    for _ in range(3):
        for owner in OWNERS:
            found = asking.search(claiming(owner), query="pump", k=50, filter={"MTART": {"$ne": "x"}})["hits"]
            assert {hit["metadata"]["MTART"] for hit in found} == {owner}


def erring(store: VectorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store forget the row filter."""
    view = store.view
    monkeypatch.setattr(
        store, "view", lambda collection, generation=None, row_filter=None: view(collection, generation)
    )


def test_a_store_that_errs_shows_nothing(
    asking: Asking, shared: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the store gives is looked at once more."""
    erring(shared.parts.store, monkeypatch)
    for mode in MODES:
        found = asking.search(claiming("FERT"), query="pump", k=9, mode=mode)["hits"]
        assert {hit["metadata"]["MTART"] for hit in found} == {"FERT"}
    assert "row rights" in caplog.text
    assert "belongs" not in caplog.text


# ------------------------------------------------------------------------------------------- what is read or looked at

ALL_IDS = [f'["{number:03}"]' for number in range(60)]
NOBODYS = '["nobody"]'


def own_ids(owner: str) -> list[str]:
    return ALL_IDS[OWNERS.index(owner) :: 3]


@RARELY_HANA
@pytest.mark.parametrize("owner", OWNERS)
def test_rows_that_may_not_be_seen_are_as_if_they_were_not_there(asking: Asking, owner: str) -> None:
    mine = asking.post(claiming(owner), ROWS, ids=ALL_IDS).json()
    assert [row["id"] for row in mine["rows"]] == own_ids(owner)
    assert mine == asking.post(OPERATOR, ROWS, ids=own_ids(owner)).json()
    others = [id_ for id_ in ALL_IDS if id_ not in own_ids(owner)]
    answers = [asking.post(claiming(owner), ROWS, ids=ids) for ids in (others, [NOBODYS])]
    assert answers[0].content == answers[1].content == b'{"rows":[]}'


@RARELY_HANA
@pytest.mark.parametrize("owner", OWNERS)
def test_fields_are_of_the_rows_that_may_be_seen(asking: Asking, owner: str) -> None:
    answer = asking.get(claiming(owner), FIELDS).json()
    assert (answer["sampled"], answer["rows"]) == (20, 20)
    (field,) = answer["fields"]
    assert field["values"] == [{"value": owner, "count": 20}]
    assert asking.get(OPERATOR, FIELDS).json()["rows"] == 60


def test_what_a_search_remembers_is_of_the_rows_that_its_caller_sees(
    alone: Asking, synced: Service, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rows have in common is computed once for each row filter."""
    for number in range(100, 100 + 3 * FEWEST_ROWS):
        row = {"MATNR": str(number), "MAKTX": f"{TEXTS[number % 5]} of {number}", "MTART": OWNERS[number % 2]}
        source.rows_by_key[str(number)] = row
    synced.sync.run("materials")
    looks: list[Any] = []
    real = LocalView.sample

    def sample(view: LocalView, *given: Any, **more: Any) -> Any:
        looks.append(given)
        return real(view, *given, **more)

    monkeypatch.setattr(LocalView, "sample", sample)
    for _ in range(3):
        for who in (OPERATOR, claiming(OWNERS[0]), claiming(OWNERS[1])):
            assert alone.search(who, query="pump steel", mode="hybrid")["hits"]
    assert len(looks) == 3, "each of the three is looked at once"
    for owner, rows in ((OWNERS[0], 170), (OWNERS[1], 170)):
        answer = alone.get(claiming(owner), FIELDS).json()
        assert answer["fields"][0]["values"] == [{"value": owner, "count": answer["rows"]}]
        assert answer["rows"] == rows
    del source.rows_by_key["100"]
    synced.sync.run("materials")
    counts = [alone.get(claiming(owner), FIELDS).json()["rows"] for owner in OWNERS[:2]]
    assert sorted(counts) == [169, 170], "what was written since is known at once"


@RARELY_HANA
@pytest.mark.parametrize("owner", OWNERS)
def test_a_map_is_of_the_rows_that_may_be_seen(asking: Asking, owner: str) -> None:
    """Where a point stands is told by them alone too: others move nothing."""
    answer = asking.get(claiming(owner), MAP).json()
    assert sorted(point["id"] for point in answer["points"]) == own_ids(owner)
    assert {point["color"] for point in answer["points"]} == {owner}
    assert all(owner in point["title"] for point in answer["points"])
    assert (answer["sampled"], answer["rows"]) == (20, 20)
    assert asking.get(OPERATOR, MAP).json()["rows"] == 60


@pytest.mark.parametrize("who", [LOOPBACK, claiming(), claiming("*"), claiming("nobody")], ids=range(4))
def test_without_a_claim_there_is_nothing(asking: Asking, who: Principal) -> None:
    assert asking.post(who, ROWS, ids=ALL_IDS).json() == {"rows": []}
    fields = asking.get(who, FIELDS).json()
    assert (fields["sampled"], fields["rows"], fields["fields"][0]["values"]) == (0, 0, [])
    shown = asking.get(who, MAP).json()
    assert (shown["points"], shown["sampled"], shown["rows"]) == ([], 0, 0)
    assert asking.post(who, SEARCH, like=ALL_IDS[0]).status_code == 404


def test_a_hidden_id_takes_the_way_of_an_absent_one(shared: Service, asking: Asking) -> None:
    """By the same statements, so how long it takes tells no more than one look at a row does."""
    who = claiming("FERT")

    def row(id_: str) -> None:
        with pytest.raises(Refused, match="has this id"):
            get_row(shared, who, "materials", id_)

    def like(id_: str) -> None:
        assert asking.post(who, SEARCH, like=id_).status_code == 404

    def rows(id_: str) -> None:
        assert asking.post(who, ROWS, ids=[id_]).json()["rows"] == []

    for look in (row, like, rows):
        sent: list[list[str]] = []
        for id_ in (NOBODYS, own_ids("ROH")[0], NOBODYS):
            with statements() as said:
                look(id_)
            sent.append(said)
        assert sent[1] == sent[2] != [], look


@RARELY_HANA
@pytest.mark.parametrize("owner", OWNERS)
def test_rows_like_one_are_of_those_that_may_be_seen(asking: Asking, owner: str) -> None:
    for way in ({}, {"mmr_lambda": 0.3}, {"filter": {"MTART": {"$ne": "nobody"}}}):
        for k in (1, 5, 50):
            mine = asking.search(claiming(owner), like=own_ids(owner)[2], k=k, **way)["hits"]
            assert {hit["metadata"]["MTART"] for hit in mine} == {owner}
            assert own_ids(owner)[2] not in {hit["id"] for hit in mine}
            assert len(mine) == min(k, 19)


@RARELY_HANA
def test_nothing_tells_a_row_of_others_from_none(asking: Asking) -> None:
    """Whatever else is asked, both answers are the same: with filters that are right, wrong or fail at a value."""
    bodies: list[dict[str, Any]] = [
        {},
        {"filter": {"MTART": "ROH"}},
        {"filter": {"MTART": {"$gt": 1}}},
        {"filter": {"MTART": {"$eqq": 1}}},
    ]
    for body in (*bodies, {"mode": "hybrid"}, {"mmr_lambda": 0.5}, {"min_score": 0.1}, {"k": 50}):
        answers = [asking.post(claiming("FERT"), SEARCH, like=id_, **body) for id_ in (own_ids("ROH")[0], NOBODYS)]
        assert answers[0].status_code == answers[1].status_code == (422 if "mode" in body else 404), answers[0].text
        told = [{**answer.json(), "request_id": ""} for answer in answers]
        assert told[0] == told[1]
    assert asking.post(claiming("FERT"), SEARCH, like=own_ids("FERT")[0]).status_code == 200


def test_what_a_store_that_errs_reads_is_not_shown(
    asking: Asking, shared: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    erring(shared.parts.store, monkeypatch)
    who = claiming("FERT")
    assert [row["id"] for row in asking.post(who, ROWS, ids=ALL_IDS).json()["rows"]] == own_ids("FERT")
    assert asking.get(who, FIELDS).json()["fields"][0]["values"] == [{"value": "FERT", "count": 20}]
    assert asking.get(who, FIELDS).json()["rows"] == 20
    assert sorted(point["id"] for point in asking.get(who, MAP).json()["points"]) == own_ids("FERT")
    assert asking.get(who, MAP).json()["rows"] == 20
    assert asking.post(who, SEARCH, like=own_ids("ROH")[0]).status_code == 404
    assert "row rights" in caplog.text
    assert "belongs" not in caplog.text


# ------------------------------------------------------------------------------------------------------ other routes

SHOWING = [
    ("GET", "/v1/collections/materials/quarantine", None),
    ("POST", "/v1/collections/materials/quarantine/retry", {"keys": [["001"]]}),
    ("POST", "/v1/collections/materials/quarantine/drop", {"keys": [["001"]]}),
    ("POST", "/v1/collections/materials/generations", {"action": "compare"}),
    ("GET", "/v1/tables/S/MARA", None),
]
"""These show rows, or tell whether there is one of a key, whoever it belongs to."""


@pytest.mark.parametrize(("method", "path", "body"), SHOWING, ids=lambda part: str(part)[-30:])
def test_what_shows_rows_is_for_who_may_see_every_row(asking: Asking, method: str, path: str, body: Any) -> None:
    asking.who[0] = claiming("FERT")
    refusal = asking.client.request(method, path, json=body)
    assert refusal.status_code == 403, refusal.text
    assert "row rights" in refusal.json()["detail"]
    asking.who[0] = OPERATOR
    assert asking.client.request(method, path, json=body).status_code != 403


def test_no_other_route_tells_of_rows(alone: Asking, synced: Service, source: TableSource) -> None:
    """Every GET there is, after syncs and failures, asked by somebody who may see a third of the rows."""
    source.rows_by_key["secret-key"] = {"MATNR": "secret-key", "MAKTX": "belongs to HALB", "MTART": "HALB"}
    synced.sync.run("materials")
    with synced.parts.store.lease("materials", "test", 5) as lease:
        synced.parts.store.apply(lease, ChangeSet(quarantined=[QuarantinedRow('["secret-key"]', "embed", "a reason")]))
    job = alone.post(claiming("FERT"), "/v1/collections/materials/sync").json()["job"]
    until(lambda: alone.get(OPERATOR, f"/v1/jobs/{job}").json()["state"] == "succeeded")
    paths = alone.get(OPERATOR, "/openapi.json").json()["paths"]
    looked = 0
    for template, methods in paths.items():
        if "get" in methods:
            path = template.replace("{name}", "materials").replace("{job_id}", job).replace("{schema}/{table}", "S/X")
            text = alone.get(claiming("FERT"), path).text
            assert "secret" not in text, path
            assert not any(f"belongs to {other}" in text for other in ("ROH", "HALB")), path
            looked += 1
    assert looked >= 12


# ---------------------------------------------------------------------------------------------------------- settings


def test_a_column_that_is_not_in_the_metadata_is_refused_with_the_remedy(tmp_path: Path) -> None:
    block = {"name": "m", "source": "S.T", "template": "{T}", "metadata": ["A"], "row_rights": {"MANDT": "mandt"}}
    with pytest.raises(ValueError, match=r'"MANDT", which is not declared in metadata: write metadata = \[A, MANDT\]'):
        Settings.model_validate({"collections": [block]})


@pytest.mark.parametrize("other", ["A-B", "A_B", "A.B", "A_B_2"])
def test_a_column_whose_name_another_may_get_is_refused(other: str) -> None:
    """Else the order of `metadata` would decide whose values are compared, until the next sync."""
    block = {"name": "m", "source": "S.T", "template": "{T}", "metadata": ["A/B", other], "row_rights": {"A/B": "x"}}
    with pytest.raises(ValueError, match="gets the same name"):
        Settings.model_validate({"collections": [block]})
    block = {"name": "m", "source": "S.T", "template": "{T}", "metadata": ["A", "A_2"], "row_rights": {"A": "x"}}
    assert Settings.model_validate({"collections": [block]}).collections[0].row_rights == {"A": ("x",)}


@pytest.mark.parametrize("rights", [{"A": ""}, {"A": []}, {"A": [""]}, {"A": 1}, {"A": None}, "A"], ids=str)
def test_rights_name_a_claim(rights: Any) -> None:
    block = {"name": "m", "source": "S.T", "template": "{T}", "metadata": ["A"], "row_rights": rights}
    with pytest.raises(ValueError, match="row_rights"):
        Settings.model_validate({"collections": [block]})


def test_rows_without_the_column_are_not_seen_until_a_sync_has_written_it(
    settings: Settings, source: TableSource, tmp_path: Path
) -> None:
    """The column has just been declared: what is stored does not hold it yet."""
    plain = [each.model_dump() | {"metadata": (), "row_rights": {}} for each in settings.collections]
    before = Service(
        Settings.model_validate(settings.model_dump(by_alias=True) | {"collections": plain}), source=source
    )
    before.sync.run("materials")
    assert before.search.run("materials", "hose", principal=LOOPBACK).hits
    before.close()
    after = Service(settings, source=source)
    for mode in MODES:
        assert (
            after.search.run("materials", "hose", 9, None, SearchOptions(mode), principal=claiming("FERT")).hits == []
        )
    report = after.sync.run("materials")
    assert (report.upserted, report.embedded_texts) == (4, 0), "the metadata alone"
    found = after.search.run("materials", "hose", 9, principal=claiming("FERT")).hits
    assert {hit.metadata["MTART"] for hit in found} == {"FERT"}
    assert len(found) == 2
    after.close()


# ------------------------------------------------------------------------------------------------------------- audit


def test_the_audit_log_tells_who_read_how_much(synced: Service, tmp_path: Path) -> None:
    with asked(synced) as asking:
        asking.post(claiming("FERT"), ROWS, ids=ALL_IDS[:4])
        asking.get(OPERATOR, FIELDS)
        asking.get(LOOPBACK, MAP)
        asking.post(claiming("FERT"), SEARCH, like=ALL_IDS[1])
    entries = audited(tmp_path)
    told = [tuple(entry.get(name) for name in ("route", "status", "rows", "asked", "hits")) for entry in entries]
    place = "/v1/collections/{name}"
    assert told == [
        (f"{place}/rows", 200, "some", 4, 2),
        (f"{place}/fields", 200, "all", None, 60),
        (f"{place}/map", 200, "none", None, 0),
        (f"{place}/search", 404, None, None, None),
    ]
    assert "[" not in (tmp_path / "audit.log").read_text(encoding="utf-8"), "no id, which holds a key"


def audited(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "audit.log").read_text(encoding="utf-8").splitlines()]


def test_the_audit_log_tells_who_asked_for_what(synced: Service, tmp_path: Path) -> None:
    with asked(synced) as asking:
        asking.client.headers["X-Request-Id"] = "mine"
        asking.search(claiming("FERT"), query="a secret", k=3, filter={"MTART": "secret", "x": {"$gt": 1}})
        asking.search(LOOPBACK, query="a secret", mode="keyword")
        asking.get(claiming("FERT"), "/v1/collections/materials/quarantine?secret=1")
        asking.post(OPERATOR, "/v1/collections/secret/search", query="a secret")
        asking.post(OPERATOR, SEARCH, query="a secret", filter={"MTART": {"$secret": "secret"}})
        asking.post(OPERATOR, SEARCH, nonsense="a secret")
        asking.client.request("DELETE", "/v1/info?secret")
        asking.client.get("/a-secret/path")
        asking.get(OPERATOR, "/health/live")
    entries = audited(tmp_path)
    assert len(entries) == 8, "health is not told"
    assert all(entry["request_id"] == "mine" and entry["client"] == "127.0.0.1" for entry in entries)
    assert all(entry["latency_ms"] > 0 and entry["time"].endswith("+00:00") for entry in entries)
    told = [{**entry, "request_id": 0, "client": 0, "latency_ms": 0, "time": 0} for entry in entries]
    first, second, third, fourth, fifth, sixth, seventh, last = told
    assert first == {
        "time": 0,
        "request_id": 0,
        "principal": "somebody",
        "credential": "none",
        "client": 0,
        "method": "POST",
        "route": "/v1/collections/{name}/search",
        "collection": "materials",
        "decision": "allowed",
        "why": None,
        "status": 200,
        "filter": {"$and": [{"MTART": "$eq"}, {"?": "$gt"}]},
        "mode": "hybrid",
        "k": 3,
        "hits": 0,
        "rows": "some",
        "latency_ms": 0,
    }
    assert (second["principal"], second["rows"], second["hits"], second["filter"]) == ("loopback", "none", 0, None)
    assert (third["status"], third["decision"], third["why"]) == (403, "refused", "row_rights")
    assert (fourth["status"], fourth["collection"], fourth["route"]) == (404, None, first["route"])
    assert (fifth["status"], fifth["filter"]) == (422, "invalid")
    assert (sixth["status"], "filter" in sixth) == (422, False)
    assert (seventh["method"], seventh["status"]) == ("DELETE", 405)
    assert (last["route"], last["status"]) == (None, 404)
    assert "secret" not in (tmp_path / "audit.log").read_text(encoding="utf-8").lower()


def test_a_request_that_crashes_is_told_too(synced: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*given: Any, **more: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(synced.search, "run", crash)
    with asked(synced) as asking:
        assert asking.post(OPERATOR, SEARCH, query="pump").status_code == 500
    (entry,) = audited(tmp_path)
    assert (entry["status"], entry["decision"]) == (500, "allowed")
    assert "secret" not in json.dumps(entry)


def test_requests_are_answered_when_the_audit_log_cannot_be_written(alone: Asking, tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    file.unlink(missing_ok=True)
    file.mkdir()
    for _ in range(3):
        alone.search(OPERATOR, **ANSWERED)
    lost = re.compile(r"^owl_sap_audit_failures_total ([3-9]|\d\d)", re.MULTILINE)
    until(lambda: lost.search(alone.get(OPERATOR, "/metrics").text) is not None)


@pytest.mark.parametrize("owner", OWNERS)
def test_pages_and_exports_are_of_the_rows_that_may_be_seen(asking: Asking, owner: str) -> None:
    path = "/v1/collections/materials/rows"
    mine = [f"{number:03}" for number in range(60) if OWNERS[number % 3] == owner]
    for query in ("limit=7", "limit=7&sort=MTART", f'limit=7&filter={{"MTART":{{"$in":{json.dumps(OWNERS)}}}}}'):
        found: list[str] = []
        after = ""
        while True:
            page = asking.get(claiming(owner), f"{path}?{query}{after}").json()
            found += [row["key"]["MATNR"] for row in page["rows"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert found == mine
    everything = asking.get(OPERATOR, f"{path}?limit=7").json()["next"]
    behind = asking.get(claiming(owner), f"{path}?limit=60&after={everything}").json()["rows"]
    assert [row["key"]["MATNR"] for row in behind] == [key for key in mine if key > "006"], "a cursor shows no row"
    asking.who[0] = claiming(owner)
    lines = asking.client.get(path, headers={"Accept": "text/csv"}).text.splitlines()
    assert [line.rpartition(",")[2] for line in lines[1:]] == [owner] * len(mine)
    asking.who[0] = claiming()
    assert asking.client.get(path, headers={"Accept": "text/csv"}).text == "id,MATNR,text,MTART\r\n"
