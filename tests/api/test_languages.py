"""Warnings of rows and queries in a language that the model does not know, and the model that is proposed instead."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from app.src.access.principal import OPERATOR
from app.src.core.backends.packaged import PackagedModel
from app.src.service import languages
from app.src.service.languages import KnownLanguages, advice_on_rows, model_for, note_on_rows, note_on_text
from app.src.service.search import SearchOptions
from app.src.service.service import Service
from tests.api.conftest import TableSource

QUERY = "Dichtung für die Pumpenwelle"
GERMAN = {"1": QUERY, "2": "Handschuhe gegen scharfe Kanten", "3": "Schmierstoff für Getriebe bei hoher Temperatur"}


def packaged(*known: str, package: str = "sys") -> PackagedModel:
    return PackagedModel(package, "", {}, known, extra="multilingual")


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test embedder passes for an English model, beside two multilingual ones."""
    known = {
        "hash:64": packaged("en"),
        "everything": packaged("en", "de", "fr", "pl"),
        "use-multilingual": packaged("en", "de", "fr"),
        "absent": packaged("en", "de", "fr", "pl", "cs", package="no_such_package"),
    }
    monkeypatch.setattr(languages, "PACKAGED", known)


def test_the_languages_that_models_know() -> None:
    assert KnownLanguages.of("hash:64").codes == ("en",)
    for english in ("sentence-transformers/all-MiniLM-L6-v2", "/models/all-mpnet-base-v2", "BAAI/bge-small-en-v1.5"):
        assert KnownLanguages.of(english).codes == ("en",)
    for unknown in ("hash:32", "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", "/models/ours"):
        assert KnownLanguages.of(unknown).codes == ()


def test_only_models_that_know_all_languages_of_the_rows_are_proposed() -> None:
    assert model_for(["de", "en"]) == "use-multilingual"
    assert model_for(["de", "pl"]) == "everything"
    assert model_for(["de", "th"]) is None


def test_advice_counts_the_rows_and_names_the_model_that_lacks_their_language() -> None:
    advice = advice_on_rows({"en": 52, "de": 48}, 100, KnownLanguages.of("hash:64"))
    assert advice == ("48 of 100 sampled rows are German; hash:64 knows only English", "use-multilingual", "")
    missing = advice_on_rows({"en": 90, "cs": 60, "de": 40}, 200, KnownLanguages.of("hash:64"))
    assert missing is not None
    reason, model, install = missing
    assert reason.startswith("60 of 200 sampled rows are Czech, 40 German; ")
    assert model == "absent"
    assert "multilingual" in install
    assert advice_on_rows({"en": 99, "de": 1}, 100, KnownLanguages.of("hash:64")) is None  # a stray row
    assert advice_on_rows({"de": 100}, 100, KnownLanguages.of("use-multilingual")) is None
    assert advice_on_rows({"de": 100}, 100, KnownLanguages.of("a model of unknown languages")) is None
    assert advice_on_rows({}, 100, KnownLanguages.of("hash:64")) is None
    (note,) = note_on_rows("stock", {"th": 5}, 5, KnownLanguages.of("use-multilingual"))
    assert "use-multilingual does not know that language" in note
    assert "a model that knows these languages" in note


def test_only_a_text_that_is_certainly_in_another_language_is_warned_of() -> None:
    (note,) = note_on_text("stock", QUERY, KnownLanguages.of("hash:64"))
    assert note.startswith("the search text is German and hash:64 knows only English")
    assert 'set model = "use-multilingual" for stock, sync, then run owl-sap generations stock --switch' in note
    for text in ("seal for a pump shaft", "M8x40", "100195", "Simmerring 60x80x10", "SKF 6205"):
        assert note_on_text("stock", text, KnownLanguages.of("hash:64")) == []
    assert note_on_text("stock", QUERY, KnownLanguages.of("use-multilingual")) == []
    assert note_on_text("stock", QUERY, KnownLanguages.of("hash:32")) == []


def test_a_search_by_meaning_warns_in_its_notes(shared: httpx.Client) -> None:
    def notes(query: str, **more: str) -> list[str]:
        answer = shared.post("/v1/collections/materials/search", json={"query": query, **more})
        return [note for note in answer.json()["notes"] if " is German" in note or "knows only" in note]

    for mode in ("hybrid", "vector"):
        (note,) = notes(QUERY, mode=mode)
        assert note.startswith("the search text is German")
    assert notes(QUERY, mode="keyword") == []  # uses no model
    hits = shared.post("/v1/collections/materials/search", json={"query": QUERY}).json()["hits"]
    assert hits
    assert {hit["relevance"] for hit in hits} == {None}
    assert notes("oil pump") == []


def test_a_search_without_a_known_model_judges_nothing(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(languages, "PACKAGED", {})
    monkeypatch.setattr(languages, "of_text", lambda text: pytest.fail("the text was judged"))
    assert synced.search.run("materials", QUERY, 1, None, SearchOptions(), principal=OPERATOR).hits


def test_sync_warns_once_in_each_process(make_service: Callable[[], Service], source: TableSource) -> None:
    source.rows_by_key = {key: {"MATNR": key, "MAKTX": text, "MTART": "ROH"} for key, text in GERMAN.items()}
    service = make_service()
    (note,) = service.sync.run("materials").notes
    assert note.startswith("3 of 3 sampled rows are German; hash:64 knows only English")
    assert "owl-sap generations materials" in note
    source.rows_by_key["4"] = {"MATNR": "4", "MAKTX": "Kugelhahn für Druckluft", "MTART": "ROH"}
    assert service.sync.run("materials").notes == []
    again = make_service()
    assert again.sync.run("materials").notes == []  # nothing was embedded
    source.rows_by_key["5"] = {"MATNR": "5", "MAKTX": "Kartons für Flaschen", "MTART": "ROH"}
    assert len(again.sync.run("materials").notes) == 1


def test_sync_does_not_warn_of_rows_that_the_model_knows(service: Service) -> None:
    assert service.sync.run("materials").notes == []
    assert service.sync.run("never").notes == []


def test_plan_proposes_a_model_with_the_reason(service: Service, source: TableSource) -> None:
    english = service.sync.plan("materials", estimate=False)
    assert (english.model, english.notes) == (None, [])
    for key, text in GERMAN.items():
        source.rows_by_key[key] = {"MATNR": key, "MAKTX": text, "MTART": "ROH"}
    planned = service.sync.plan("materials", estimate=False)
    assert (planned.model, planned.sampled) == ("use-multilingual", 4)
    assert planned.languages == {"de": 3, "en": 1}
    (note,) = planned.notes
    assert note.startswith("3 of 4 sampled rows are German; hash:64 knows only English")
