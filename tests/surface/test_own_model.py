"""A collection with a model of its own, beside one that has the settings' model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.src.access.principal import OPERATOR
from app.src.api.health import OwnModelBody
from app.src.core import loading as engines
from app.src.core.engine import Engine
from app.src.service.service import Service
from app.src.settings import Settings
from connector.model import ModelSource
from hana_emulator.testing import Emulator


@pytest.fixture
def settings(emulator: Emulator, hana_schema: str, tmp_path: Path) -> Settings:
    connection = emulator.connect(autocommit=True, currentSchema=hana_schema)
    cursor = connection.cursor()
    cursor.execute('CREATE TABLE "T" ("K" INTEGER PRIMARY KEY, "X" NVARCHAR(50))')
    cursor.executemany('INSERT INTO "T" VALUES (?, ?)', [(1, "steel pump"), (2, "rubber seal"), (3, "oil filter")])
    connection.close()
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")} | {"encrypt": False}
    block = {"source": f"{hana_schema}.T", "template": "{X}"}
    return Settings.model_validate(
        {
            "hana": login,
            "store": {"kind": "local", "path": tmp_path / "vectors"},
            "embedding": {"model": "hash:64", "weights_sha256": None},
            "collections": [block | {"name": "plain"}, block | {"name": "own", "model": "hash:32"}],
        }
    )


@pytest.fixture
def service(settings: Settings) -> Iterator[Service]:
    service = Service(settings)
    yield service
    service.close()


def test_each_is_synced_planned_searched_and_proved_with_its_own(service: Service) -> None:
    for name, dimension in (("plain", 64), ("own", 32)):
        assert service.sync.plan(name, estimate=False).new == 3
        assert service.sync.run(name).upserted == 3
        assert service.sync.run(name).embedded_texts == 0
        assert service.sync.plan(name, estimate=False).unchanged == 3
        (status,) = service.status.collections([name])
        assert (status["dimension"], status["generation"], status["rows"]) == (dimension, 1, 3)
        assert service.search.run(name, "rubber seal", 1, principal=OPERATOR).hits[0].key == {"K": 2}
        assert service.sync.verify(name).ok


def test_doctor_tells_of_both_models(service: Service) -> None:
    (line,) = [line for line in service.readiness.doctor() if line["check"] == "model"]
    assert line["ok"]
    assert "hash:64: 64 dimensions" in line["detail"]
    assert "collection own: hash:32: 32 dimensions" in line["detail"]


def test_info_tells_of_both_models_and_loads_none_for_it(service: Service) -> None:
    info = service.status.info()
    assert info["model"] == "hash:64"
    unknown = dict.fromkeys(("dimension", "max_tokens", "languages", "licence", "fingerprint", "device", "devices"))
    assert info["models"] == [{"model": "hash:32", "collections": ["own"], "loaded": False} | unknown]
    service.sync.run("own")
    (own,) = service.status.info()["models"]
    assert (own["model"], own["collections"], own["loaded"], own["dimension"]) == ("hash:32", ["own"], True, 32)
    assert own["device"]["kind"] == "cpu"
    assert own["fingerprint"] != info["fingerprint"]
    OwnModelBody.model_validate(own, strict=True)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("intfloat/e5-small", "intfloat/e5-small"),
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("/srv/models/ours", "ours"),
        ("./models/ours", "ours"),
        ("models/2026/ours", "ours"),
    ],
)
def test_of_a_model_that_is_not_loaded_no_path_is_told(model: str, told: str) -> None:
    block = {"source": "S.T", "template": "{X}"}
    blocks = [block | {"name": "plain"}, *(block | {"name": name, "model": model} for name in ("a", "b"))]
    settings = Settings.model_validate({"embedding": {"model": "hash:64"}, "collections": blocks})
    with closing(Service(settings)) as service:
        (own,) = service.status.info()["models"]
    assert (own["model"], own["collections"]) == (told, ["a", "b"])


def test_a_model_of_its_own_is_a_change_of_model_for_that_collection_alone(
    service: Service, settings: Settings
) -> None:
    for name in ("plain", "own"):
        service.sync.run(name)
    changed = settings.model_dump(by_alias=True)
    changed["collections"][1]["model"] = None
    other = Service(Settings.model_validate(changed))
    try:
        report = other.sync.run("own")
        assert getattr(report, "generation", None) == 2
        assert len(other.generations.shown("plain")) == 1
        assert other.search.run("own", "oil filter", 1, principal=OPERATOR).hits[0].key == {"K": 3}
        switched = other.generations.switch("own")
        assert (switched.generation, switched.notes) == (2, [])
        assert other.sync.run("own").embedded_texts == 0
        back = service.generations.rollback("own")
        assert (back.generation, back.notes) == (1, []), "those settings name hash:32"
        notes = other.generations.switch("own", 2).notes + other.generations.rollback("own").notes
        assert [note for note in notes if "hash:64" in note], "these name the other"
    finally:
        other.close()


def test_what_pins_the_one_model_does_not_hold_for_the_other(settings: Settings) -> None:
    pinned = settings.model_copy(
        update={"embedding": settings.embedding.model_copy(update={"weights_sha256": "0" * 64, "revision": "r"})}
    )
    own, plain = pinned.embedding_of("own"), pinned.embedding_of("plain")
    assert (own.model, own.weights_sha256, own.revision) == ("hash:32", None, None)
    assert plain is pinned.embedding is pinned.embedding_of("unknown")


def test_prompts_of_the_one_model_do_not_hold_for_the_other_but_a_collection_may_have_its_own(
    settings: Settings,
) -> None:
    changed = settings.model_dump(by_alias=True)
    changed["embedding"] |= {"query_prompt": "query: ", "document_prompt": "passage: "}
    plain, own = changed["collections"]
    asked, bare = {"name": "asked", "query_prompt": "ask: "}, {"name": "bare", "document_prompt": ""}
    changed["collections"] = [plain, own, plain | asked, own | bare]
    prompted = Settings.model_validate(changed)
    found = {name: prompted.embedding_of(name) for name in ("plain", "own", "asked", "bare")}
    assert {name: (each.model, each.query_prompt, each.document_prompt) for name, each in found.items()} == {
        "plain": ("hash:64", "query: ", "passage: "),
        "own": ("hash:32", None, None),
        "asked": ("hash:64", "ask: ", "passage: "),
        "bare": ("hash:32", None, ""),
    }
    assert found["plain"] is prompted.embedding


def test_each_model_lies_in_memory_once(
    service: Service, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where what serves was made with the settings' model, before the collection got its own."""
    without = settings.model_dump(by_alias=True)
    without["collections"][1]["model"] = None
    before = Service(Settings.model_validate(without))
    before.sync.run("own")
    before.close()
    loaded: list[str] = []
    inner = engines.load_engine

    def load(options: engines.EngineOptions, *more: Any) -> Engine:
        loaded.append(options.model)
        return inner(options, *more)

    monkeypatch.setattr(engines, "load_engine", load)
    service.sync.run("plain")
    service.sync.run("own")
    assert service.search.run("own", "oil filter", 1, principal=OPERATOR).hits[0].key == {"K": 3}, (
        "by hash:64, which serves"
    )
    assert sorted(loaded) == ["hash:32", "hash:64"]
    assert caplog.messages == [], "nobody asked for a GPU"


def test_who_asks_for_a_gpu_is_told_by_a_model_of_its_own_too(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = settings.embedding.model_copy(update={"expect_gpu": True})
    service = Service(settings.model_copy(update={"embedding": wanted}))
    try:
        service.sync.run("own")
        (line,) = caplog.messages
        assert line.startswith("WARNING: a GPU is required")
        service.sync.run("plain")
        assert caplog.messages == [line], "once"
    finally:
        service.close()


@pytest.mark.parametrize("on", [True, False])
def test_experimental_kernels_are_switched_for_each_model(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    given: list[engines.EngineOptions] = []
    inner = engines.load_engine

    def load(options: engines.EngineOptions, *more: Any) -> Engine:
        given.append(options)
        return inner(options, *more)

    monkeypatch.setattr(engines, "load_engine", load)
    wanted = settings.embedding.model_copy(update={"experimental_kernels": on})
    service = Service(settings.model_copy(update={"embedding": wanted}))
    try:
        service.parts.embedder_for("own")
        service.parts.embedder_for("plain")
    finally:
        service.close()
    assert [options.experimental_kernels for options in given] == [on, on]


def test_one_that_is_loaded_waits_for_no_other(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    there = service.parts.embedder_for("own")
    loading, go_on = threading.Event(), threading.Event()
    inner = engines.load_engine

    def slow(options: engines.EngineOptions, *more: Any) -> Engine:
        loading.set()
        assert go_on.wait(60)
        return inner(options, *more)

    monkeypatch.setattr(engines, "load_engine", slow)
    other = threading.Thread(target=service.parts.embedder_of, args=(ModelSource("hash:16"),))
    other.start()
    found: list[object] = []
    asked = threading.Thread(target=lambda: found.append(service.parts.embedder_for("own")), daemon=True)
    try:
        assert loading.wait(60)
        asked.start()
        asked.join(30)
        assert found == [there]
    finally:
        go_on.set()
        other.join()
