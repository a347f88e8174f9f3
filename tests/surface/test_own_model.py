"""A collection with a model of its own, beside one that has the settings' model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.src.service import Service
from app.src.settings import Settings
from tests.emulator.process import Emulator


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
        assert service.plan(name, estimate=False).new == 3
        assert service.sync(name).upserted == 3
        assert service.sync(name).embedded_texts == 0
        assert service.plan(name, estimate=False).unchanged == 3
        (status,) = service.status([name])
        assert (status["dimension"], status["generation"], status["rows"]) == (dimension, 1, 3)
        assert service.search(name, "rubber seal", 1).hits[0].key == {"K": 2}
        assert service.verify(name).ok


def test_a_model_of_its_own_is_a_change_of_model_for_that_collection_alone(
    service: Service, settings: Settings
) -> None:
    for name in ("plain", "own"):
        service.sync(name)
    changed = settings.model_dump(by_alias=True)
    changed["collections"][1]["model"] = None
    other = Service(Settings.model_validate(changed))
    try:
        report = other.sync("own")
        assert getattr(report, "generation", None) == 2
        assert len(other.generations("plain")) == 1
        assert other.search("own", "oil filter", 1).hits[0].key == {"K": 3}
        switched = other.switch("own")
        assert (switched.generation, switched.notes) == (2, [])
        assert other.sync("own").embedded_texts == 0
        back = service.rollback("own")
        assert (back.generation, back.notes) == (1, []), "those settings name hash:32"
        notes = other.switch("own", 2).notes + other.rollback("own").notes
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
