"""The joint: parts built when needed, the engine's errors translated, status, search results with keys by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from app.src.access.principal import OPERATOR
from app.src.core.backends import Pause, TokenBatch, Vectors
from app.src.core.backends.hashing import HashingBackend, words_of
from app.src.core.engine import EmbeddingEngine
from app.src.core.pool import EnginePool
from app.src.observe import Fault
from app.src.service.search import unit_vector
from app.src.service.service import Service
from app.src.service.sync import SyncRequest
from app.src.service.wiring import Parts
from app.src.settings import Settings
from connector.errors import (
    ConfigurationError,
    ConnectionLost,
    ModelMismatch,
    PermissionRefused,
    StoreCorrupt,
    UnknownCollection,
    UnknownColumn,
    UnknownTable,
)
from connector.model import CollectionStatus, Query, Row
from connector.protocols import Observer


def test_nothing_is_opened_before_it_is_needed(make_service: Callable[[], Service], settings: Settings) -> None:
    make_service()
    assert settings.store.path is not None
    assert not settings.store.path.exists()


def test_sync_accounts_for_every_row_and_counts(service: Service) -> None:
    report = service.sync.run("materials")
    assert (report.read, report.upserted, report.embedded_texts) == (4, 4, 4)
    again = service.sync.run("materials")
    assert (again.unchanged, again.embedded_texts) == (4, 0)
    assert 'rows_synced_total{collection="materials",outcome="unchanged"} 4.0' in service.metrics.render().decode()


class Deadly(HashingBackend):
    """The thread of its engine dies with a text that has the word `poison`."""

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        if "poison" in words_of(batch):
            raise SystemExit
        return super().forward(batch, exact=exact)


@pytest.fixture
def pooled(make_service: Callable[[], Service], monkeypatch: pytest.MonkeyPatch) -> Service:
    """A service whose engine is a pool of two."""
    engines = [EmbeddingEngine(Deadly("hash:64")) for _ in range(2)]
    monkeypatch.setattr(Parts, "load", lambda *_: EnginePool(engines[0], engines))
    return make_service()


@pytest.mark.proves(22)
def test_a_row_whose_text_kills_engines_is_quarantined_alone(pooled: Service, source: Any) -> None:
    source.rows_by_key["3"]["MAKTX"] = "deadly poison"
    report = pooled.sync.run("materials")
    assert (report.upserted, report.quarantined) == (3, 1)
    assert report.blocks > report.repeated_blocks > 0
    assert [entry.key for entry in pooled.quarantine.entries("materials")] == [{"MATNR": "3"}]


def test_a_report_has_the_blocks_that_several_engines_got(pooled: Service) -> None:
    report = pooled.sync.run("materials").as_dict()
    assert (report["blocks"], report["repeated_blocks"]) == (1, 0)
    again = pooled.sync.run("materials").as_dict()
    assert (again["unchanged"], again["blocks"]) == (4, 0)


def test_sync_hands_on_its_request(service: Service, source: Any) -> None:
    service.sync.run("materials")
    for key in ("2", "3", "4"):
        del source.rows_by_key[key]
    paused = service.sync.run("materials")
    assert (paused.paused, paused.deleted) == ("max_deletes", 0)
    done = service.sync.run("materials", SyncRequest(max_deletes=1.0))
    assert (done.paused, done.deleted) == (None, 3)


def test_sync_stops_on_request_and_reports_progress(service: Service) -> None:
    seen: list[tuple[int, int]] = []

    class Watch:
        def progress(self, done: int, total: int) -> None:
            seen.append((done, total))

        def event(self, name: str) -> None: ...

    observer: Observer = Watch()
    report = service.sync.run("materials", None, observer, stop=lambda: len(seen) == 2)
    assert report.stopped
    assert seen == [(1, 4), (2, 4)]


def test_verify_finds_a_row_that_is_missing_and_mends_it(synced: Service, source: Any) -> None:
    assert synced.sync.verify("materials").ok
    source.rows_by_key["5"] = {"MATNR": "5", "MAKTX": "new", "MTART": "ROH"}
    report = synced.sync.verify("materials")
    assert (report.missing, report.ok) == (1, False)
    assert synced.sync.verify("materials", repair=True).ok


def test_unknown_names(service: Service) -> None:
    with pytest.raises(UnknownCollection, match='did you mean "materials"'):
        service.collections.spec("materals")
    with pytest.raises(UnknownCollection, match="materials, never"):
        service.status.collections(["xyz"])


@pytest.mark.proves(6)
def test_search_works_from_the_local_store_while_hana_is_away(
    synced: Service, make_service: Callable[[], Service], source: Any
) -> None:
    source.failure = ConnectionLost("gone")
    (hit,) = make_service().search.run("materials", "office chair", 1, principal=OPERATOR).hits
    assert hit.key == {"MATNR": "4"}


def test_another_model_of_the_same_size_is_refused_too(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synced.parts.embedder, "fingerprint", "other weights")
    with pytest.raises(ModelMismatch):
        synced.search.run("materials", "a", principal=OPERATOR)
    assert synced.search.run("materials", [1.0] * 64, k=1, principal=OPERATOR).hits, (
        "a vector of one's own needs no model"
    )


def test_a_search_does_not_count_rows_each_time(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    status = synced.parts.store.status

    def counting(name: str) -> CollectionStatus | None:
        asked.append(name)
        return status(name)

    monkeypatch.setattr(synced.parts.store, "status", counting)
    for _ in range(3):
        synced.search.run("materials", "steel", principal=OPERATOR)
    assert asked == ["materials"]
    synced.sync.run("materials")
    synced.search.run("materials", "steel", principal=OPERATOR)
    assert asked == ["materials"] * 2


def test_a_connection_that_is_not_configured_names_the_setting() -> None:
    service = Service(Settings.model_validate({"embedding": {"model": "hash:8"}}))
    with pytest.raises(ConfigurationError, match="HANA_HOST"):
        _ = service.parts.source
    with pytest.raises(ConfigurationError, match="HANA_HOST"):
        _ = service.parts.store
    service.close()


HANA = {"user": "U", "password": "P"}


def test_two_hanas_have_a_pool_each() -> None:
    document = {"hana": HANA | {"host": "a"}, "store": {"hana": HANA | {"host": "b"}}}
    service = Service(Settings.model_validate(document))
    source_pool = service.parts.pool("hana")
    assert (source_pool.options.host, service.parts.store_pool.options.host) == ("a", "b")
    assert service.parts.pool("hana") is source_pool
    service.close()


@pytest.mark.parametrize(
    ("hana", "words"),
    [
        ({"host": "a"}, "no user"),
        ({"host": "a", "password": "P"}, "no user"),
        ({"host": "a", "user": "U"}, "no password"),
        ({"host": "a", "user": "U", "password": ""}, "no password"),
    ],
)
def test_a_login_that_is_not_configured_is_never_tried(hana: dict[str, str], words: str) -> None:
    both = Service(Settings.model_validate({"hana": hana, "store": {"hana": hana}}))
    with pytest.raises(ConfigurationError, match=rf"\[hana\] has {words}.*HANA_USER and HANA_PASSWORD"):
        _ = both.parts.source
    with pytest.raises(ConfigurationError, match=rf"\[store.hana\] has {words}.*HANA_STORE_PASSWORD"):
        _ = both.parts.store_pool
    both.close()


def test_a_userkey_needs_neither_user_nor_password() -> None:
    service = Service(Settings.model_validate({"hana": {"userkey": "OWL"}}))
    assert service.parts.pool("hana").options.userkey == "OWL"
    service.close()


def test_a_blank_search_text_is_refused(synced: Service) -> None:
    for text in ("", " \n"):
        with pytest.raises(ValueError, match="empty"):
            synced.search.run("materials", text, principal=OPERATOR)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([1.0], "has 1 numbers"), ([0.0, 0.0], "zeros"), ([float("nan"), 1.0], "finite"), ([float("inf"), 1], "finite")],
)
def test_vectors_that_are_no_direction(numbers: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        unit_vector(numbers, 2)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_a_vector_of_any_length_is_a_direction(scale: float) -> None:
    np.testing.assert_allclose(unit_vector([3 * scale, 4 * scale], 2), [0.6, 0.8], rtol=1e-6)


# -------------------------------------------------------------------------------------------------------------- doctor


def checks(service: Service) -> dict[str, tuple[bool, str, str]]:
    return {check["check"]: (check["ok"], check["detail"], check["fix"]) for check in service.readiness.doctor()}


def test_doctor_on_a_service_that_is_well(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.readiness, "probe_login", lambda hana: "logged in")
    found = checks(service)
    assert found["python"][0]
    assert found["model"] == (True, found["model"][1], "")
    assert "64 dimensions" in found["model"][1]
    assert found["store writable"][:2] == (True, "the local store can be written")
    assert found["disk"][0]


def test_doctor_names_the_prerequisite_of_what_it_skips(service: Service) -> None:
    found = checks(service)
    ok, _, fix = found["hana dns"]
    assert not ok
    assert "HANA_HOST" in fix
    assert found["hana login"][:2] == (False, 'not checked: "hana tls" failed')
    assert found["table of materials"][:2] == (False, 'not checked: "hana login" failed')


def test_doctor_reads_the_columns_a_sync_would_read(
    service: Service, settings: Settings, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (materials, _) = settings.collections
    read: list[tuple[str, ...]] = []
    pages = source.pages

    def reading(query: Query, size: int) -> Iterator[list[Row]]:
        read.append(query.columns)
        yield from pages(query, size)

    monkeypatch.setattr(source, "pages", reading)
    assert service.readiness.probe_table(materials) == "S.MARA: 4 rows readable"
    assert read == [("MAKTX", "MTART")]
    with pytest.raises(UnknownColumn, match="MAKTXX"):
        service.readiness.probe_table(materials.model_copy(update={"template": "{MAKTXX}"}))
    source.failure = UnknownTable("there is no table S.MARA")
    with pytest.raises(Fault, match=r"no table S\.MARA") as caught:
        service.readiness.probe_table(materials)
    assert 'GRANT SELECT ON "S"."MARA"' in caught.value.fix


def test_doctor_finds_a_local_store_that_takes_no_writes(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.readiness, "probe_login", lambda hana: "logged in")
    assert checks(service)["store writable"][0]

    def read_only(collection: str, owner: str, ttl: float) -> int:
        raise StoreCorrupt("attempt to write a readonly database")

    monkeypatch.setattr(service.parts.store, "take_lease", read_only)
    ok, detail, fix = checks(service)["store writable"]
    assert (ok, detail) == (False, "attempt to write a readonly database")
    assert "[store] path" in fix


def test_doctor_leaves_nothing_in_the_store(service: Service) -> None:
    assert service.readiness.probe_store()
    assert [row["table"] for row in service.status.collections()] == [None, None]


class Refusing:
    """A pool whose user may do nothing but look. `refuses`: the statements that begin so."""

    def __init__(self, refuses: str) -> None:
        self.refuses = refuses
        self.sent: list[str] = []

    def read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> list[tuple[Any, ...]]:
        return [("VECTORS",)] if "SYS.SCHEMAS" in sql else []

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> int:
        self.sent.append(sql)
        if sql.startswith(self.refuses):
            raise PermissionRefused(f"{doing}: the user lacks a privilege (code 258)", code=258)
        return 0

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("refuses", "words", "grant"),
    [("CREATE", 'schema "VECTORS"', "GRANT CREATE ANY"), ("UPDATE", "state table", "GRANT SELECT, INSERT, UPDATE")],
)
def test_doctor_finds_a_hana_that_takes_no_writes(refuses: str, words: str, grant: str) -> None:
    document = {"hana": HANA | {"host": "a"}, "store": {"schema": "VECTORS"}, "embedding": {"model": "hash:8"}}
    service = Service(Settings.model_validate(document))
    pool = Refusing(refuses)
    service.parts._parts["pool hana"] = pool
    with pytest.raises(Fault, match=words) as caught:
        service.readiness.probe_store()
    assert caught.value.fix.startswith(grant)
    created = [sql for sql in pool.sent if sql.startswith("CREATE") and " HNSW " not in sql]
    assert len(created) == 1
    assert (f"DROP TABLE {created[0].split()[3]}" in pool.sent) == (refuses != "CREATE")
    service.close()
