"""Search by meaning, words and both over HTTP: scores, thresholds, spread, notes, and what needs no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from app.src.access.principal import OPERATOR, Principal, Scope
from app.src.core.backends.hashing import HashingBackend
from app.src.service.collections import VisibleView
from app.src.service.relevance import FLOOR, UNRELATED, Calibration, Calibrations
from app.src.service.search import MODES, SearchOptions, _notes, hybrid
from app.src.service.service import Service
from app.src.settings import Settings
from connector.cancellation import Cancellation, cancelled_by, current
from connector.errors import ModelMismatch
from connector.model import (
    CollectionSpec,
    Column,
    Filter,
    Hit,
    IndexUse,
    ModelSource,
    Recipe,
    Sample,
    StoredText,
    TableRef,
)
from connector.stores import ranking
from connector.stores.local.store import LocalView
from connector.stores.ranking import FEWEST_ROWS, HUBNESS, Backdrop
from connector.stores.scan import single_threaded
from tests.api.conftest import TableSource, serving, settings_in

SEARCH = "/v1/collections/materials/search"
MORE = {
    "5": "pump seal",
    "6": "pump with a motor and a seal of rubber",
    "7": "valve 000000000000100195",
    "8": "pump",
    "9": "pump housing",
}


def filled(service: Service, source: TableSource) -> Service:
    for key, text in MORE.items():
        source.rows_by_key[key] = {"MATNR": key, "MAKTX": text, "MTART": "FERT" if key < "7" else "ROH"}
    service.sync.run("materials")
    return service


@pytest.fixture
def synced(service: Service, source: TableSource) -> Service:
    return filled(service, source)


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    source = TableSource()
    with closing(Service(settings_in(tmp_path_factory.mktemp("shared")), source=source)) as service:
        yield filled(service, source)


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(SEARCH, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def keys(answer: dict[str, Any]) -> list[str]:
    return [hit["key"]["MATNR"] for hit in answer["hits"]]


def test_keyword(shared: httpx.Client, shared_service: Service) -> None:
    answer = ask(shared, query="pump seal", mode="keyword")
    assert set(keys(answer)[:2]) == {"5", "6"}, "both words"
    assert set(keys(answer)) == {"3", "5", "6", "8", "9"}
    scores = [hit["score"] for hit in answer["hits"]]
    assert scores == sorted(scores, reverse=True)
    assert min(scores) > 0
    assert set(answer["took_ms"]) == {"store"}
    assert answer["notes"] == []
    assert keys(ask(shared, query="100195", mode="keyword")) == ["7"]


def test_hybrid_is_the_blend_of_both(shared: httpx.Client, shared_service: Service) -> None:
    text = "the hydraulic pumps and seal"  # three words that count
    embedder = shared_service.parts.embedder
    query, *unrelated = embedder.embed_queries([text, *UNRELATED]).astype(float)
    near: dict[str, float] = {}  # the cosine, less a part of the mean cosine with unrelated queries
    for hit in ask(shared, query=text, mode="vector", k=50)["hits"]:
        row = embedder.embed([hit["text"]])[0].astype(float)
        near[hit["key"]["MATNR"]] = row @ query - HUBNESS * float(np.mean(row @ np.array(unrelated).T))
    answer = ask(shared, query=text, mode="hybrid", k=50)
    assert set(keys(answer)) == set(near), "here the candidates are all rows"
    for hit in answer["hits"]:
        share = sum(word in hit["text"].lower() for word in ("hydraulic", "pump", "seal")) / 3
        assert hit["score"] == pytest.approx(near[hit["key"]["MATNR"]] + 0.5 * share**3, abs=1e-5), hit["text"]
    assert [-hit["score"] for hit in answer["hits"]] == sorted(-hit["score"] for hit in answer["hits"])
    assert set(answer["took_ms"]) == {"embed", "store"}
    assert keys(ask(shared, query=text, mode="hybrid", k=2)) == keys(answer)[:2]


def test_hybrid_beside_writes_finds_what_was_written_and_looks_at_all_rows_once(
    client: httpx.Client, source: TableSource, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.rows_by_key |= {
        f"A{number}": {"MATNR": f"A{number}", "MAKTX": f"part {number} of steel {number % 7}", "MTART": "ROH"}
        for number in range(120)
    }
    service.sync.run("materials")
    looks: list[Any] = []
    real = LocalView.sample

    def sample(view: LocalView, *given: Any, **more: Any) -> Any:
        looks.append(given)
        return real(view, *given, **more)

    monkeypatch.setattr(LocalView, "sample", sample)
    for number in range(3):
        source.rows_by_key["new"] = {"MATNR": "new", "MAKTX": f"turnstile {number}", "MTART": "ROH"}
        service.sync.run("materials")
        (hit,) = ask(client, query=f"turnstile {number}", mode="hybrid", k=1)["hits"]
        assert hit["text"] == f"turnstile {number}"
    assert len(looks) == 1


def test_hybrid_finds_a_number_of_the_key_that_no_text_holds(
    client: httpx.Client, source: TableSource, service: Service
) -> None:
    source.rows_by_key["000000000000471100"] = {"MATNR": "000000000000471100", "MAKTX": "grey lid", "MTART": "ROH"}
    service.sync.run("materials")
    for text in ("471100", "000000471100"):
        assert keys(ask(client, query=text, mode="hybrid", k=1)) == ["000000000000471100"], text
    assert ask(client, query="471100", mode="hybrid", filter={"MTART": "FERT"}, k=50)["hits"] == [
        hit for hit in ask(client, query="471100", mode="hybrid", k=50)["hits"] if hit["metadata"]["MTART"] == "FERT"
    ]
    explained = ask(client, query="471100", mode="hybrid", k=1, explain=True)["explain"]
    assert explained["words"] == ["471100"]


@pytest.mark.parametrize(
    "text",
    [
        "M-4711/2",
        pytest.param("m-4711", marks=pytest.mark.slow),
        pytest.param("which one was M-4711-2?", marks=pytest.mark.slow),
    ],
)
def test_a_number_of_several_parts_is_found_in_keys_however_it_is_written(
    client: httpx.Client, source: TableSource, service: Service, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("app.src.service.search.DEEP", 1)
    monkeypatch.setattr("app.src.service.search.DEEPEST", 1)
    source.rows_by_key["M-4711/2"] = {"MATNR": "M-4711/2", "MAKTX": "grey lid", "MTART": "ROH"}
    service.sync.run("materials")
    answer = ask(client, query=text, mode="hybrid", k=1, explain=True)
    assert answer["explain"]["rankings"] == {"vector": 1, "keyword": 0, "key": 1}
    assert keys(answer) == ["M-4711/2"]


def test_a_row_behind_others_that_hold_the_digits_is_not_missed(
    client: httpx.Client, source: TableSource, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither because they do not fit the filter, nor because they hold them in the midst of a longer number."""
    monkeypatch.setattr("app.src.service.search.DEEP", 1)
    monkeypatch.setattr("app.src.service.search.DEEPEST", 1)
    for key, kind in (("04711", "ROH"), ("14711", "ROH"), ("4711", "FERT"), ("4711X", "FERT")):
        source.rows_by_key[key] = {"MATNR": key, "MAKTX": "grey lid", "MTART": kind}
    service.sync.run("materials")
    for number, kind, wanted in (("4711", "FERT", "4711"), ("4711x", "FERT", "4711X"), ("14711", "ROH", "14711")):
        answer = ask(client, query=number, mode="hybrid", k=1, filter={"MTART": kind}, explain=True)
        assert keys(answer) == [wanted], number
        assert answer["explain"]["rankings"]["key"] == 1, number


def test_letters_of_a_number_are_found_in_either_case(
    client: httpx.Client, source: TableSource, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.src.service.search.DEEP", 1)
    monkeypatch.setattr("app.src.service.search.DEEPEST", 1)
    source.rows_by_key["AB1234"] = {"MATNR": "AB1234", "MAKTX": "grey lid", "MTART": "ROH"}
    service.sync.run("materials")
    for text in ("ab1234", "AB1234"):
        assert ask(client, query=text, mode="hybrid", k=1, explain=True)["explain"]["rankings"]["key"] == 1, text


def test_a_filter_may_name_the_source_column_in_every_mode(source: TableSource, settings: Settings) -> None:
    odd = "/BIC/ZPLANT"
    source.table = replace(source.table, columns=(*source.table.columns, Column(odd, "NVARCHAR", 4)))
    for key, row in source.rows_by_key.items():
        row[odd] = "1000" if key == "3" else "2000"
    blocks = [each.model_dump(by_alias=True) | {"metadata": ["MTART", odd]} for each in settings.collections]
    named = Settings.model_validate(settings.model_dump(by_alias=True) | {"collections": blocks})
    with closing(Service(named, source=source)) as service:
        service.sync.run("materials")
        for mode in MODES:
            found = service.search.run(
                "materials", "oil pump 4711", 9, {odd: "1000"}, SearchOptions(mode), principal=OPERATOR
            )
            assert [hit.key for hit in found.hits] == [{"MATNR": "3"}], mode


def test_the_length_of_a_vector_that_others_wrote_says_nothing(
    client: httpx.Client, synced: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[dict[str, Any]] = [{"mode": "hybrid"}, {"passages": 2}, {"mode": "hybrid", "min_score": 0.1}]
    before = [ask(client, query="pump seal", k=50, **way)["hits"] for way in ways]
    stored = LocalView.vectors
    monkeypatch.setattr(LocalView, "vectors", lambda *given: stored(*given) * np.float32(7.0))
    for way, hits in zip(ways, before, strict=True):
        after = ask(client, query="pump seal", k=50, **way)["hits"]
        assert [hit["key"] for hit in after] == [hit["key"] for hit in hits]
        for one, other in zip(after, hits, strict=True):
            assert one["score"] == pytest.approx(other["score"], abs=1e-5)
            scores = [[passage["score"] for passage in hit.get("passages") or []] for hit in (one, other)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize("where", [{"MTART": "ROH"}, {"MTART": {"$ne": "ROH"}}, {"MTART": {"$like": "F%"}}], ids=str)
def test_the_modes_agree_on_filters(shared: httpx.Client, shared_service: Service, where: dict[str, Any]) -> None:
    everything = "gearbox garden hydraulic office pump valve"
    found = {mode: set(keys(ask(shared, query=everything, mode=mode, filter=where, k=50))) for mode in MODES}
    assert found["vector"] == found["keyword"] == found["hybrid"] != set()


def test_min_score_is_the_score_in_vector_and_keyword_mode(shared: httpx.Client, shared_service: Service) -> None:
    for mode in ("vector", "keyword"):
        every = ask(shared, query="pump seal", mode=mode, k=50)["hits"]
        least = every[2]["score"]
        kept = ask(shared, query="pump seal", mode=mode, k=50, min_score=least)["hits"]
        assert kept == [hit for hit in every if hit["score"] >= least]
        assert 3 <= len(kept) < len(every)
        assert ask(shared, query="pump seal", mode=mode, min_score=1e9)["hits"] == []


def test_min_score_is_the_cosine_in_hybrid_mode(shared: httpx.Client, shared_service: Service) -> None:
    cosines = {hit["key"]["MATNR"]: hit["score"] for hit in ask(shared, query="pump seal", mode="vector", k=50)["hits"]}
    for least in sorted(cosines.values()):
        kept = keys(ask(shared, query="pump seal", mode="hybrid", k=50, min_score=least - 1e-6))
        assert set(kept) == {key for key, cosine in cosines.items() if cosine >= least - 1e-6}


def test_min_score_looks_up_the_cosine_of_what_words_alone_found(
    synced: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.src.service.search.DEEP", 1)
    monkeypatch.setattr("app.src.service.search.DEEPEST", 1)
    near = synced.search.run("materials", "pump seal", 50, None, SearchOptions("vector"), principal=OPERATOR).hits
    cosine = {hit.id: hit.score for hit in near}
    words = synced.search.run("materials", "rubber office", 1, None, SearchOptions("keyword"), principal=OPERATOR).hits
    by_meaning = SearchOptions("vector")
    first = synced.search.run("materials", "rubber office", 1, None, by_meaning, principal=OPERATOR).hits[0]
    assert {hit.id for hit in words} <= set(cosine)
    for least in (-1.0, 0.99):
        found = synced.search.run(
            "materials", "rubber office", 1, None, SearchOptions("hybrid", least), principal=OPERATOR
        ).hits
        assert bool(found) is (least < 0 or first.score >= least)


def test_mmr_is_the_mode_at_1_and_spreads_below(shared: httpx.Client, shared_service: Service) -> None:
    for mode in MODES:
        plain = ask(shared, query="pump seal", mode=mode, k=4)
        assert keys(ask(shared, query="pump seal", mode=mode, k=4, mmr_lambda=1)) == keys(plain)
        spread = ask(shared, query="pump seal", mode=mode, k=4, mmr_lambda=0.1)
        assert keys(spread)[0] == keys(plain)[0], "the first is the best"
        assert "rank" in spread["took_ms"]
        assert likeness(shared_service, keys(spread)) <= likeness(shared_service, keys(plain)) + 1e-6
    assert keys(ask(shared, query="pump seal", k=4, mmr_lambda=0.1)) != keys(ask(shared, query="pump seal", k=4))


def likeness(service: Service, found: list[str]) -> float:
    """The mean cosine between hits."""
    vectors = service.parts.embedder.embed([hit for key in found for hit in [_text(service, key)]])
    cosines = vectors @ vectors.T
    return float((cosines.sum() - len(found)) / (len(found) * (len(found) - 1)))


def _text(service: Service, key: str) -> str:
    source: Any = service.parts.source
    text: str = source.rows_by_key[key]["MAKTX"]
    return text


def test_mmr_keeps_scores_and_filters(shared: httpx.Client, shared_service: Service) -> None:
    scores = {hit["id"]: hit["score"] for hit in ask(shared, query="pump", k=50)["hits"]}
    spread = ask(shared, query="pump", k=3, mmr_lambda=0.3, filter={"MTART": "ROH"})
    assert len(spread["hits"]) == 3
    assert all(hit["score"] == pytest.approx(scores[hit["id"]], abs=1e-6) for hit in spread["hits"])
    assert all(hit["metadata"]["MTART"] == "ROH" for hit in spread["hits"])
    assert ask(shared, query="xyzzy", mode="keyword", mmr_lambda=0.5)["hits"] == []


def test_mmr_takes_the_vector_given(shared: httpx.Client, shared_service: Service) -> None:
    vector = shared_service.parts.embedder.embed(["pump seal"])[0].astype(np.float64).tolist()
    by_text = ask(shared, query="pump seal", mode="vector", k=4, mmr_lambda=0.4)
    assert keys(ask(shared, vector=vector, k=4, mmr_lambda=0.4)) == keys(by_text)


# ----------------------------------------------------------------------------------------------------------- no model


def test_keyword_search_loads_no_engine(make_service: Callable[[], Service], synced: Service) -> None:
    another = make_service()
    with serving(another) as client:
        assert keys(ask(client, query="gearbox", mode="keyword", mmr_lambda=0.5)) == ["1"]
    assert "engine" not in another.parts._parts


def test_keyword_search_of_another_models_collection(synced: Service, settings: Settings, source: TableSource) -> None:
    other = settings.embedding.model_copy(update={"model": "hash:128"})
    service = Service(settings.model_copy(update={"embedding": other}), source=source)
    try:
        with serving(service) as client:
            assert keys(ask(client, query="gearbox", mode="keyword")) == ["1"]
            assert keys(ask(client, query="gearbox bearing", mode="hybrid"))[0] == "1", "by the model of what is stored"
            gone = Recipe(service.collections.spec("materials"), ModelSource("/no/such/model"))
            service.parts.store.generations.record("materials", 1, gone)
            service.search._embedders.clear()
            refused = client.post(SEARCH, json={"query": "gearbox", "mode": "hybrid"})
            assert (refused.status_code, "keyword" in refused.json()["detail"]) == (409, True)
    finally:
        service.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_collection_never_synced(shared: httpx.Client, mode: str) -> None:
    response = shared.post("/v1/collections/never/search", json={"query": "a", "mode": mode})
    assert (response.status_code, "never synced" in response.json()["detail"]) == (404, True)


def test_what_may_be_done_with_another_model_is_told(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synced.parts.embedder, "fingerprint", "other weights")
    with pytest.raises(ModelMismatch, match="mode keyword"):
        synced.search.run("materials", "a", 1, None, SearchOptions("hybrid"), principal=OPERATOR)


# -------------------------------------------------------------------------------------------------------------- notes


@pytest.mark.parametrize("mode", MODES)
def test_a_filter_on_unknown_metadata_is_allowed_and_noted(
    shared: httpx.Client, shared_service: Service, mode: str
) -> None:
    answer = ask(shared, query="pump", mode=mode, filter={"$or": [{"MTARD": "ROH"}, {"WERKS": "1"}, {"MTART": "ROH"}]})
    assert keys(answer)
    (note,) = answer["notes"]
    assert all(word in note for word in ("MTARD, WERKS", "materials", "MTART"))


def test_notes_on_filters_that_nothing_passes_and_texts_without_words(
    shared: httpx.Client, shared_service: Service
) -> None:
    (note,) = ask(shared, query="pump", filter={"MTART": "NONE"})["notes"]
    assert "check the filter" in note
    assert "MTART" in note
    (note,) = ask(shared, query="!?", mode="keyword")["notes"]
    assert "no letter" in note
    assert ask(shared, query="pump", filter={"MTART": "ROH"})["notes"] == []


@pytest.mark.parametrize(("mode", "noted"), [("vector", True), ("hybrid", True), ("keyword", False)])
def test_a_text_longer_than_the_model_takes_is_noted(
    shared: httpx.Client, shared_service: Service, mode: str, noted: bool
) -> None:
    most = shared_service.parts.embedder.max_tokens
    notes = ask(shared, query="pump " * (most + 1), mode=mode)["notes"]
    assert notes == ([f"the search text has {most + 1} tokens; the model uses only the first {most}"] * noted)
    assert ask(shared, query="pump " * most, mode=mode)["notes"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fuzzy"}, "vector, keyword, hybrid"),
        ({"min_score": float("nan")}, "finite"),
        ({"mmr_lambda": 2.0}, "from 0"),
        ({"mmr_lambda": float("nan")}, "from 0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchOptions(**options)


@pytest.mark.parametrize("mode", MODES)
def test_passages_of_a_long_row(client: httpx.Client, source: TableSource, service: Service, mode: str) -> None:
    long = ". ".join(
        f"{subject} number {n} stands in hall {n}"
        for n, subject in enumerate(["press", "oven", "boiler", "lathe"] * 60)
    )
    source.rows_by_key["L"] = {"MATNR": "L", "MAKTX": long, "MTART": "FERT"}
    service.sync.run("materials")
    plain = ask(client, query="boiler hall", mode=mode, k=3)["hits"]
    assert all(hit["passages"] is None for hit in plain)
    hits = ask(client, query="boiler hall", mode=mode, k=3, passages=3)["hits"]
    assert [hit["id"] for hit in hits] == [hit["id"] for hit in plain]
    for hit in hits:
        assert hit["passages"][0]["text"] == hit["text"], "the one that was found"
        rest = [passage["score"] for passage in hit["passages"][1:]]
        assert rest == sorted(rest, reverse=True)
        assert len({passage["chunk"] for passage in hit["passages"]}) == len(hit["passages"])
    (chunked,) = (hit for hit in hits if hit["key"]["MATNR"] == "L")
    assert len(chunked["passages"]) == 3
    assert all(passage["text"] in long for passage in chunked["passages"])
    if mode == "vector":
        assert chunked["passages"][0]["score"] == pytest.approx(chunked["score"], abs=1e-5)


def test_how_hits_were_found(shared: httpx.Client, shared_service: Service) -> None:
    assert "explain" not in ask(shared, query="pump seal", mode="hybrid")
    for mode, rankings in (("vector", {"vector"}), ("keyword", {"keyword"}), ("hybrid", {"vector", "keyword"})):
        answer = ask(shared, query="the pump seal", mode=mode, k=2, explain=True)
        explained = answer["explain"]
        assert explained["mode"] == mode
        assert {name for name, count in explained["rankings"].items() if count} == rankings
        assert [hit["id"] for hit in explained["hits"]] == [hit["id"] for hit in answer["hits"]]
        assert explained["stages"] == answer["took_ms"]
        assert explained["index"]["used"] is False
        best = explained["hits"][0]
        assert any(best[name] is not None for name in rankings)
        assert all(best[name] is None for name in {"vector", "keyword"} - rankings)
        if mode == "hybrid":
            assert explained["words"] == ["pump", "seal"]
            assert best["cosine"] == pytest.approx(best["vector"]["score"], abs=1e-5)
        else:
            assert best[mode]["rank"] == 1


def test_the_store_s_plan_is_for_administrators(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalView, "index_use", lambda *_: IndexUse(True, "HNSW INDEX SEARCH: of what HANA says"))

    def index(*scopes: Scope) -> Any:
        who, options = Principal("somebody", frozenset(scopes)), SearchOptions("hybrid", explain=True)
        explained = synced.search.run("materials", "pump", 2, None, options, principal=who).explain
        assert explained is not None
        return explained["index"]

    assert index("admin") == {"used": True, "detail": "HNSW INDEX SEARCH: of what HANA says"}
    for scope in ("search", "sync"):
        told = index("search", scope)
        assert (told["used"], "admin" in told["detail"], "HNSW" in told["detail"]) == (True, True, False)


def test_passages_of_many_hits_are_read_in_portions(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[Any]:
        options = SearchOptions("hybrid", passages=3)
        hits = synced.search.run("materials", "pump seal", 9, None, options, principal=OPERATOR).hits
        # Products of another number of vectors may differ in the last bit.
        return [[(each.text, each.chunk, round(each.score, 9)) for each in hit.passages or ()] for hit in hits]

    asked: list[int] = []

    def texts(view: LocalView, ids: list[str]) -> Any:
        asked.append(len(ids))
        return read(view, ids)

    whole, read = found(), LocalView.texts
    monkeypatch.setattr("app.src.service.search.PORTION", 4)
    monkeypatch.setattr(LocalView, "texts", texts)
    assert found() == whole
    assert asked == [4, 4, 1]


@pytest.mark.parametrize("passages", [0, 21, -1, "2", 1.5])
def test_so_many_passages_there_are_not(shared: httpx.Client, shared_service: Service, passages: Any) -> None:
    assert shared.post(SEARCH, json={"query": "a", "passages": passages}).status_code == 422


@pytest.mark.parametrize(
    ("where", "noted"),
    [
        (
            {"ERDAT": {"$lte": "20260301"}},
            True,
        ),  # as text greater than every day of 2026: rows would be found, wrong ones
        ({"$and": [{"MATNR": "1"}, {"ERDAT": {"$between": ["20260101", "20260301"]}}]}, True),
        ({"ERDAT": {"$in": ["20260301"]}}, True),
        ({"ERDAT": {"$in": ["2026-03-01", "20260302"]}}, True),
        ({"ERDAT": {"$lte": "2026-03-01"}}, False),
        ({"ERDAT": {"$like": "20260301"}}, False),
        ({"MATNR": "20260301"}, False),
        ({"ERDAT": "20261399"}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("found", [False, True])
def test_a_date_without_dashes_is_noted(where: Filter | None, noted: bool, found: bool) -> None:
    spec = CollectionSpec(name="a", source=TableRef("S", "T"), template="{X}", metadata=("ERDAT", "MATNR"))
    notes = _notes(spec, where, "pump", "vector", found)
    assert any(note.startswith("SAP's dates are stored as 2026-0") for note in notes) == noted


def test_a_text_is_searched_by_hybrid_and_a_vector_or_a_row_by_vector(
    shared: httpx.Client, shared_service: Service
) -> None:
    text = ask(shared, query="the hydraulic pumps and seal", explain=True)
    assert text["explain"]["mode"] == "hybrid"
    assert text["hits"] == ask(shared, query="the hydraulic pumps and seal", mode="hybrid")["hits"]
    vector = [float(number) for number in shared_service.parts.embedder.embed(["pump"])[0]]
    assert ask(shared, vector=vector, explain=True)["explain"]["mode"] == "vector"
    assert ask(shared, like=text["hits"][0]["id"], explain=True)["explain"]["mode"] == "vector"
    assert shared.post(SEARCH, json={"vector": vector, "mode": "hybrid"}).status_code == 422


def test_hybrid_computes_on_one_thread(service: Service, source: TableSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of BLAS wait for each other: on a busy machine up to a second in every search."""
    source.rows_by_key |= {
        str(number): {"MATNR": str(number), "MAKTX": f"pump {number}", "MTART": "ROH"} for number in range(FEWEST_ROWS)
    }
    service.sync.run("materials")
    limited: dict[str, bool] = {}
    backdrop_of, close = Backdrop.of, ranking.closeness

    def of(vectors: Any) -> Any:
        limited["backdrop"] = single_threaded._users > 0
        return backdrop_of(vectors)

    def closeness(*arguments: Any) -> Any:
        limited["closeness"] = single_threaded._users > 0
        return close(*arguments)

    monkeypatch.setattr(Backdrop, "of", of)
    monkeypatch.setattr("app.src.service.relevance.closeness", closeness)
    service.search.run("materials", "pump", principal=OPERATOR)
    assert limited == {"backdrop": True, "closeness": True}
    assert not single_threaded._users


def test_few_rows_are_sampled_once_for_all_who_ask(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, seen, mine = VisibleView.sample, list[Cancellation](), Cancellation()

    def noted(view: VisibleView, *args: Any, **more: Any) -> Any:
        seen.append(current())
        return sample(view, *args, **more)

    monkeypatch.setattr(VisibleView, "sample", noted)
    with cancelled_by(mine):
        for _ in range(2):
            synced.search.run("materials", "pump", principal=OPERATOR)
    assert len(seen) == 1
    assert seen[0] is not mine, "who leaves does not stop what the others wait for"


def test_depth_is_how_many_hits_mmr_chooses_from(shared: httpx.Client, shared_service: Service) -> None:
    best = keys(ask(shared, query="pump seal", mode="vector", k=2))
    spread = {"query": "pump seal", "mode": "vector", "k": 2, "mmr_lambda": 0.0}
    assert set(keys(ask(shared, **spread, depth=2))) == set(best), "there are only two to choose from"
    assert set(keys(ask(shared, **spread, depth=1))) == set(best), "at least k"
    assert set(keys(ask(shared, **spread))) != set(best)
    assert shared.post(SEARCH, json=spread | {"depth": 0}).status_code == 422


@pytest.mark.parametrize("mode", MODES)
def test_relevance_tells_an_answer_from_the_nearest_of_unrelated_rows(shared: httpx.Client, mode: str) -> None:
    nothing = "nothing relevant found; the nearest rows follow"
    right = ask(shared, query="pump seal", mode=mode, k=50)
    judged = [hit["relevance"] for hit in right["hits"]]
    assert judged == sorted(judged, reverse=True) or mode == "keyword"
    assert judged[0] > 0.5, "all words, and the nearest"
    assert all(0 <= each <= 1 for each in judged)
    assert nothing not in right["notes"]
    for query in ("the moon landing of Apollo", "quiz night"):
        wrong = ask(shared, query=query, mode=mode)
        assert [hit for hit in wrong["hits"] if hit["relevance"] >= FLOOR] == [], query
        assert (nothing in wrong["notes"]) == bool(wrong["hits"]), "keyword finds no row at all"


def test_relevance_is_unknown_where_the_query_is_not_a_text(shared: httpx.Client, shared_service: Service) -> None:
    vector = [float(number) for number in shared_service.parts.embedder.embed(["pump"])[0]]
    for query in ({"vector": vector}, {"like": ask(shared, query="pump seal")["hits"][0]["id"]}):
        answer = ask(shared, **query)
        assert {hit["relevance"] for hit in answer["hits"]} == {None}
        assert answer["notes"] == []


def test_unrelated_queries_are_embedded_once_for_a_model(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder, asked = synced.parts.embedder, list[int]()
    embed = embedder.embed_queries

    def noted(texts: Any) -> Any:
        asked.append(len(texts))
        return embed(texts)

    monkeypatch.setattr(embedder, "embed_queries", noted)
    monkeypatch.setattr("app.src.service.relevance.NO_BACKDROP_SECONDS", -1.0)
    for mode in (*MODES, *MODES):
        synced.search.run("materials", "pump", options=SearchOptions(mode), principal=OPERATOR)
    assert asked == [len(UNRELATED)]


@pytest.fixture
def with_sizes(service: Service, source: TableSource) -> Service:
    """Boots in 20 sizes, among them enough others for a backdrop."""
    for number in range(20):
        text = f"safety boots with steel toe cap, size {30 + number}"
        source.rows_by_key[f"B{number}"] = {"MATNR": f"B{number}", "MAKTX": text, "MTART": "ROH"}
    for number in range(FEWEST_ROWS):
        text = f"part{number} of machine{number % 9} in hall{number % 7}"
        source.rows_by_key[f"P{number}"] = {"MATNR": f"P{number}", "MAKTX": text, "MTART": "FERT"}
    service.sync.run("materials")
    return service


@pytest.mark.parametrize("mode", MODES)
def test_groups_show_alike_rows_once_and_count_the_others(with_sizes: Service, mode: Any) -> None:
    def search(group: bool, **more: Any) -> Any:
        options = SearchOptions(mode, group=group, **more)
        return with_sizes.search.run("materials", "safety boots", 2, options=options, principal=OPERATOR).hits

    plain, grouped = search(False), search(True)
    assert all(hit.text.startswith("safety boots") for hit in plain)
    assert {hit.similar for hit in plain} == {None}
    assert grouped[0] == replace(plain[0], similar=19), "the best of the group, as it was"
    assert sum(hit.text.startswith("safety boots") for hit in grouped) == 1
    assert len(grouped) == (1 if mode == "keyword" else 2), "k counts groups"
    assert sum(hit.text.startswith("safety boots") for hit in search(True, mmr_lambda=0.5)) == 1


def test_rows_without_words_are_not_alike(service: Service, source: TableSource) -> None:
    source.rows_by_key = {
        str(number): {"MATNR": str(number), "MAKTX": f"{4711 + number}", "MTART": "ROH"} for number in range(9)
    }
    service.sync.run("materials")
    found = service.search.run("materials", "4711", 9, options=SearchOptions("vector", group=True), principal=OPERATOR)
    assert [hit.similar for hit in found.hits] == [0] * 9


def embedded(texts: list[str]) -> Any:
    backend = HashingBackend("hash:64")
    return backend.forward(backend.tokenize(texts))


class TwoLanguages:
    """A view of rows in English and German, of which `hidden` may not be seen."""

    key = ("materials", 1, "null")

    def __init__(self, *hidden: str) -> None:
        names = {"1": ("hydraulic pump", "Aggregat"), "2": ("garden hose", "Schlauch"), "3": ("office chair", "Stuhl")}
        rows = {f'["{key}","{code}"]': each["ED".index(code)] for key, each in names.items() for code in "ED"}
        self.rows = {id_: text for id_, text in rows.items() if id_ not in hidden}

    def search(self, vector: Any, k: int, where: Filter | None) -> list[Hit]:
        assert where == {"SPRAS": "D"}
        german = [Hit(id_, 0.0, text, {"SPRAS": "D"}) for id_, text in self.rows.items() if '"D"' in id_]
        return [replace(hit, score=float(row @ vector)) for hit, row in zip(german, self.vectors(german), strict=True)]

    def keyword(self, text: str, k: int, where: Filter | None) -> list[Hit]:
        return []

    def texts(self, ids: Any) -> list[StoredText]:
        return [StoredText(id_, 0, self.rows[id_], {}, 0) for id_ in ids if id_ in self.rows]

    def sample(self, count: int, *, texts: bool) -> Sample:
        return Sample(self.texts(self.rows), len(self.rows))

    def vectors(self, chunks: Any) -> Any:
        return embedded([chunk.text for chunk in chunks])


def test_a_row_is_judged_by_its_translation_too_if_the_caller_may_see_it() -> None:
    query = "hydraulic pump"

    def scores(*hidden: str) -> dict[str, float]:
        view: Any = TwoLanguages(*hidden)
        known = Calibrations().of(view, None, ("MATNR", "SPRAS"))
        ranked = hybrid(view, query, embedded([query])[0], 9, {"SPRAS": "D"}, known)
        return {hit.id: hit.score for hit in ranked.hits}

    seen, hidden = scores(), scores('["1","E"]')
    german = '["1","D"]'
    assert set(seen) == {german, '["2","D"]', '["3","D"]'}, "translations judge, and are no hits"
    assert max(seen, key=lambda id_: seen[id_]) == german
    assert seen[german] > hidden[german] + 0.3, "the English row is out of sight"
    assert Calibrations().of(TwoLanguages(), None, ("MATNR", "LINE")).translations(german) == []  # type: ignore[arg-type]
    assert Calibration(None, language=0, languages=("E", "D")).translations("record:7") == []
