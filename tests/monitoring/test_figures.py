"""What is asked at each scrape: the same in every process, right from the first scrape on, and never held up by a store
that hangs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.src.observe.metrics import SYNC_OUTCOMES
from app.src.service.service import Service
from app.src.service.status import ANSWER_SECONDS, LOOK_SECONDS, LOOK_WAIT, StoreLook, ages
from app.src.service.sync import SyncRequest
from app.src.settings import Settings
from connector.errors import ConnectionLost
from connector.model import Checkpoint, CollectionStatus
from connector.stores.store import VectorStore
from tests.adversity.scene import NAME
from tests.adversity.scene import Scene as Adversity
from tests.api.conftest import TableSource, settings_in

PATIENCE = 30.0
NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


def status(name: str = "materials", rows: int = 4, checkpoint: Checkpoint | None = None) -> CollectionStatus:
    return CollectionStatus(
        collection=name,
        store="local",
        schema=None,
        table="records",
        generation=1,
        model="hash:64",
        dimension=64,
        rows=rows,
        chunks=rows,
        foreign=0,
        empty=1,
        quarantined=2,
        last_sync=None if checkpoint is None else checkpoint.last_sync,
        checkpoint=checkpoint or Checkpoint(),
    )


class Slow:
    """A store whose answers are let through by hand, or are errors."""

    def __init__(self) -> None:
        self.asked = 0
        self.rows = 4
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def status(self, collection: str) -> CollectionStatus | None:
        self.asked += 1
        assert self.gate.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return status(collection, self.rows) if collection == "materials" else None


class Scene:
    def __init__(self) -> None:
        self.now = 1000.0
        self.store = Slow()
        self.look = StoreLook(["materials", "never"], self._open, lambda: self.now)

    @contextmanager
    def _open(self) -> Iterator[VectorStore | None]:
        yield cast(VectorStore, self.store)

    def rows(self, wait: float = PATIENCE) -> dict[str, int]:
        return {name: status.rows for name, status in self.look.statuses(wait).items() if status is not None}

    def let(self) -> None:
        self.store.gate.set()
        until(lambda: self.look._done.is_set())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.let()
    scene.look.close()


def test_the_first_question_has_the_store_asked(scene: Scene) -> None:
    assert scene.look.health() == {"answers": None, "look_age": None}
    assert scene.rows() == {"materials": 4}
    assert scene.look.health() == {"answers": 1.0, "look_age": 0.0}


def test_what_is_known_is_told_until_it_is_old_or_something_was_written(scene: Scene) -> None:
    scene.rows()
    scene.store.rows = 5
    scene.now += LOOK_SECONDS - 1
    assert scene.rows() == {"materials": 4}
    assert scene.look.health()["look_age"] == LOOK_SECONDS - 1
    scene.now += 1
    assert scene.rows() == {"materials": 5}
    scene.store.rows = 6
    scene.look.forget()
    assert scene.rows() == {"materials": 6}


def test_of_a_store_that_hangs_the_last_known_is_told_at_once_and_how_old_it_is(scene: Scene) -> None:
    scene.rows()
    asked = scene.store.asked
    scene.store.gate.clear()
    scene.now += LOOK_SECONDS
    assert scene.rows(wait=0) == {"materials": 4}
    until(lambda: scene.store.asked == asked + 1)
    scene.now += ANSWER_SECONDS + 1
    scene.look.forget()
    for _ in range(3):
        assert scene.rows(LOOK_WAIT) == {"materials": 4}, "nobody waits for a look that has had its time"
    assert scene.store.asked == asked + 1, "one thread looks, however often it is asked"
    assert scene.look.health() == {"answers": 0.0, "look_age": LOOK_SECONDS + ANSWER_SECONDS + 1}
    scene.let()
    assert scene.look.health() == {"answers": 1.0, "look_age": 0.0}


def test_a_store_that_refuses_is_told_and_asked_again_in_time(scene: Scene) -> None:
    scene.rows()
    scene.store.error = ConnectionLost("gone", code=-10807)
    scene.now += LOOK_SECONDS
    assert scene.rows() == {"materials": 4}
    assert scene.look.health() == {"answers": 0.0, "look_age": LOOK_SECONDS}
    asked, scene.store.error = scene.store.asked, None
    assert scene.rows() == {"materials": 4}
    assert scene.store.asked == asked, "not at every scrape"
    scene.now += LOOK_SECONDS
    scene.rows()
    assert scene.look.health()["answers"] == 1.0


def test_a_store_that_takes_long_is_asked_less_often(scene: Scene) -> None:
    """Counting a large collection may cost it a twentieth of its time at most."""
    scene.store.gate.clear()
    scene.rows(wait=0)
    until(lambda: scene.store.asked == 1)
    scene.now += 5
    scene.let()
    asked = scene.store.asked
    scene.now += 90
    scene.rows()
    assert scene.store.asked == asked
    scene.now += 10
    scene.rows()
    assert scene.store.asked > asked


def test_what_was_never_synced_is_known_as_such_once_the_store_has_answered(scene: Scene) -> None:
    scene.store.error = ConnectionLost("gone", code=-10807)
    assert scene.look.statuses(PATIENCE) == {}
    scene.store.error = None
    scene.look.forget()
    found = scene.look.statuses(PATIENCE)
    assert list(found) == ["materials", "never"]
    assert found["never"] is None


def test_closed_it_looks_no_more(scene: Scene) -> None:
    scene.look.close()
    assert scene.rows() == {}
    assert scene.store.asked == 0


def test_ages() -> None:
    mark = {"method": "watermark", "at": "2026-11-22T09:59:30", "asked": "2026-11-22T10:00:00+00:00"}
    ten = NOW - timedelta(hours=2)
    known = ages(status(checkpoint=Checkpoint(last_sync=ten, last_full=ten - timedelta(days=1), mark=mark)), NOW)
    assert known == (7200, 7230, 7200 + 86_400)
    assert ages(status(), NOW) == (None, None, None)


# ------------------------------------------------------------------------------------------------- through a service


Samples = dict[tuple[str, ...], float]


def samples(service: Service) -> Samples:
    families = text_string_to_metric_families(service.metrics.render().decode())
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def service_in(folder: Path, source: TableSource | None = None, **more: Any) -> Any:
    """`more`: sections of the settings, and `collection`: more of the first one."""
    told = settings_in(folder).model_dump(by_alias=True, exclude_unset=True)
    told |= {"collections": [told["collections"][0] | more.pop("collection", {})]} | more
    return closing(Service(Settings.model_validate(told), source=source))


def test_another_process_knows_what_is_stored_from_its_first_scrape_on(folder: Path) -> None:
    with service_in(folder, TableSource()) as service:
        service.sync.run("materials")
    with service_in(folder) as service:
        found = samples(service)
        assert found["owl_sap_rows", "materials"] == 4
        assert found["owl_sap_chunks", "materials"] >= 4
        assert found["owl_sap_quarantined_rows", "materials"] == 0
        assert 0 <= found["owl_sap_sync_lag_seconds", "materials"] < 60
        assert 0 <= found["owl_sap_checkpoint_age_seconds", "materials"] < 60
        assert found["owl_sap_store_answers",] == 1
        assert not any(name.startswith("owl_sap_engine_") for name, *_ in found), "no model is loaded for a scrape"
        assert service.parts.engine_if_loaded() is None


def test_before_the_first_sync_nothing_is_made_and_nothing_is_stored(folder: Path) -> None:
    with service_in(folder) as service:
        found = samples(service)
        assert found["owl_sap_rows", "materials"] == 0
        assert ("owl_sap_sync_lag_seconds", "materials") not in found, "which is what CollectionNeverSynced looks for"
        assert found["owl_sap_store_answers",] == 1
        assert found["owl_sap_jobs_oldest_queued_seconds",] == 0
    assert not list(folder.rglob("*.sqlite")), "a look makes no store and no job records"


def test_what_the_engine_did(folder: Path) -> None:
    with service_in(folder) as service:
        service.parts.embedder.embed(["steel", "oil pump", "steel"])
        found = samples(service)
        stats, engine = service.parts.engine.stats(), service.parts.engine
        model = (engine.model, engine.precision)
        for name, value in (
            ("texts_total", stats.texts),
            ("computed_texts_total", 2),
            ("tokens_total", stats.tokens),
            ("padded_tokens_total", stats.padded_tokens),
            ("batches_total", stats.batches),
            ("out_of_memory_total", 0),
            ("token_budget", engine.token_budget),
        ):
            assert found[f"owl_sap_engine_{name}", *model] == value, name
        tokens = found["owl_sap_embed_batch_tokens_sum", "interactive"]
        assert tokens == stats.tokens
        engine.memory.shrink(100)
        assert samples(service)["owl_sap_engine_out_of_memory_total", *model] == 1


def test_syncs_are_counted_from_zero_on(folder: Path) -> None:
    """Or the first that fails after a start would be in no increase."""
    with service_in(folder, TableSource()) as service:
        before = {each: samples(service)["owl_sap_syncs_total", "materials", each] for each in SYNC_OUTCOMES}
        assert before == dict.fromkeys(SYNC_OUTCOMES, 0)
        service.sync.run("materials")
        found = {labels[2]: value for labels, value in samples(service).items() if labels[0] == "owl_sap_syncs_total"}
        assert found == before | {"succeeded": 1}


def test_what_clients_write_is_counted_and_never_missed_as_unsynced(tmp_path: Path) -> None:
    """CollectionNeverSynced goes by the count of syncs, which such a collection has none of."""
    settings = Settings.model_validate(
        {
            "embedding": {"model": "hash:16"},
            "store": {"kind": "local", "path": tmp_path / "vectors"},
            "collections": [
                {"name": "notes", "documents": True},
                {"name": "materials", "source": "S.MARA", "template": "{A}"},
            ],
        }
    )
    with closing(Service(settings)) as service:
        found = samples(service)
    assert found["owl_sap_rows", "notes"] == 0
    assert {labels[1] for labels in found if labels[0] == "owl_sap_syncs_total"} == {"materials"}


def test_readiness_is_told_as_it_was_found(folder: Path) -> None:
    with service_in(folder) as service:
        assert samples(service)["owl_sap_ready_timestamp_seconds",] == 0
        assert service.readiness.check().ready
        found = samples(service)
        assert (found["owl_sap_ready", "engine"], found["owl_sap_ready", "store"]) == (1, 1)
        assert abs(found["owl_sap_ready_timestamp_seconds",] - time.time()) < 60


def test_jobs_by_kind_and_state_and_how_long_the_oldest_waits(folder: Path) -> None:
    with service_in(folder, api={"job_workers": 0}) as service:
        job = service.background.start_verify("materials", repair=False)
        found = samples(service)
        assert found["owl_sap_jobs", "verify", "queued"] == 1
        assert 0 <= found["owl_sap_jobs_oldest_queued_seconds",] < 60
        service.jobs.cancel(job.id)
        found = samples(service)
        assert found["owl_sap_jobs", "verify", "cancelled"] == 1
        assert found["owl_sap_jobs_oldest_queued_seconds",] == 0


def test_how_far_a_running_job_is(folder: Path) -> None:
    source = TableSource()
    source.gate.clear()
    with service_in(folder, source) as service:
        service.background.start_sync("materials", SyncRequest())
        until(lambda: ("owl_sap_jobs", "sync", "running") in samples(service))
        assert samples(service)["owl_sap_job_rows_done", "materials", "sync"] == 0
        source.gate.set()
        until(lambda: ("owl_sap_jobs", "sync", "succeeded") in samples(service))
        assert ("owl_sap_job_rows_done", "materials", "sync") not in samples(service)


def test_a_scrape_does_not_wait_for_a_hana_that_hangs(make_scene: Callable[..., Adversity]) -> None:
    """The store in HANA, on the emulator: each statement about it takes longer than anybody waits."""
    scene = make_scene("hana")
    scene.sync()
    login = {"host": scene.emulator.host, "port": scene.emulator.port, "encrypt": False}
    named = {"user": scene.emulator.user, "password": scene.emulator.password, "communication_timeout": 20}
    collection = {"name": NAME, "source": f"{scene.schema}.ROWS", "template": "{TXT}"}
    settings = Settings.model_validate(
        {
            "hana": login | named,
            "store": {"kind": "hana", "schema": scene.schema},
            "embedding": {"model": "hash:64"},
            "collections": [collection],
        }
    )
    with closing(Service(settings)) as service:
        rows = samples(service)["owl_sap_rows", NAME]
        assert rows > 100
        fault = {"match": f'"{scene.schema}"', "action": "delay", "seconds": 8, "count": None}
        scene.run(f"ALTER SYSTEM INJECT FAULT '{json.dumps(fault)}'")
        try:
            service.collections.changed(NAME)
            begun = time.monotonic()
            assert samples(service)["owl_sap_rows", NAME] == rows
            assert samples(service)["owl_sap_rows", NAME] == rows
            assert time.monotonic() - begun < 7, "the first waits a second, the next not at all"
        finally:
            scene.run("ALTER SYSTEM CLEAR FAULTS")


def test_a_schedule_that_nobody_keeps_is_overdue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service_in(folder, collection={"schedule": {"every": "1h"}}) as service:
        assert ("owl_sap_sync_overdue_seconds", "materials") not in samples(service), "no records of it"
        service.background.scheduler.register()
        assert samples(service)["owl_sap_sync_overdue_seconds", "materials"] < 1
        starts = {"materials": time.time() - 1800}
        monkeypatch.setattr(service.background.scheduler, "next_start", starts.get)
        assert 1800 <= samples(service)["owl_sap_sync_overdue_seconds", "materials"] < 1860
