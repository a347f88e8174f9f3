from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from connector.model import ChangeSet, Chunk, ChunkSpec, CollectionSpec, StoredRecord, TableRef
from connector.sync.run import Ends, SyncOptions, sync
from connector.sync.verify import VerifyReport, verify

SPEC = CollectionSpec(
    "materials", TableRef("S", "MARA"), "{MAKTX}", metadata=("MTART",), chunk=ChunkSpec(max_tokens=4, overlap=1)
)
OPTIONS = SyncOptions(page_rows=4, window=4)
LONG = "one two three four five six seven"


@pytest.fixture
def filled(ends, source) -> Ends:
    for number in range(10):
        source.put("100", f"M{number}", MAKTX=f"pump number {number}", MTART="FERT")
    source.put("100", "LONG", MAKTX=LONG, MTART="FERT")
    source.put("100", "BLANK", MAKTX=" ", MTART="FERT")
    sync(SPEC, ends, OPTIONS)
    return ends


def id_of(number: int | str) -> str:
    return f'["100","M{number}"]'


def records(ends: Ends) -> dict[tuple[str | None, int | None], StoredRecord]:
    return {(r.id, r.number): r for page in ends.store.records(SPEC.name) for r in page}


def content(ends: Ends) -> dict[tuple[str | None, int | None], tuple[str | None, bytes, bytes]]:
    return {place: (r.text, r.vector.tobytes(), r.content_hash) for place, r in records(ends).items()}


def plant(ends: Ends, *chunks: Chunk, vector: np.ndarray | None = None, delete: str | None = None) -> None:
    """Write through the store as a stranger with the right to."""
    unit = np.eye(1, ends.embedder.dimension, dtype=np.float32)[0] if vector is None else vector
    with ends.store.lease(SPEC.name, "vandal", 1) as lease:
        if delete:
            ends.store.apply(lease, ChangeSet(deleted=[delete]))
        if chunks:
            ends.store.apply(lease, ChangeSet(chunks=list(chunks), vectors=np.stack([unit] * len(chunks))))


def chunk_of(record: StoredRecord, **changes: object) -> Chunk:
    chunk = Chunk(record.id, record.number, record.text, record.metadata, record.content_hash)
    return replace(chunk, **changes)


def planted_missing(ends: Ends) -> None:
    plant(ends, delete=id_of(3))


def planted_lost_chunk(ends: Ends) -> None:
    record = records(ends)['["100","LONG"]', 0]
    plant(ends, chunk_of(record), vector=record.vector)


def planted_wrong_hash(ends: Ends) -> None:
    record = records(ends)[id_of(4), 0]
    plant(ends, chunk_of(record, content_hash=b"\0" * 24 + record.content_hash[24:]), vector=record.vector)


def planted_wrong_text(ends: Ends) -> None:
    record = records(ends)[id_of(4), 0]
    plant(ends, chunk_of(record, text="another text under the right hash"), vector=record.vector)


def planted_wrong_metadata(ends: Ends) -> None:
    record = records(ends)[id_of(4), 0]
    plant(ends, chunk_of(record, metadata={"MTART": "HALB"}), vector=record.vector)


def planted_orphan(ends: Ends) -> None:
    plant(ends, chunk_of(records(ends)[id_of(1), 0], id='["100","GONE"]'))


def planted_vector_for_an_empty_row(ends: Ends) -> None:
    plant(ends, chunk_of(records(ends)[id_of(1), 0], id='["100","BLANK"]'))


def planted_other_vector(ends: Ends) -> None:
    plant(ends, chunk_of(records(ends)[id_of(6), 0]))


KINDS = [
    (planted_missing, "missing"),
    (planted_lost_chunk, "stale"),
    (planted_wrong_hash, "stale"),
    (planted_wrong_text, "stale"),
    (planted_wrong_metadata, "stale"),
    (planted_orphan, "orphaned"),
    (planted_vector_for_an_empty_row, "orphaned"),
    (planted_other_vector, "bad_vectors"),
]


def found(report: VerifyReport) -> dict[str, int]:
    kinds = ("missing", "stale", "orphaned", "duplicates", "bad_vectors")
    return {kind: getattr(report, kind) for kind in kinds if getattr(report, kind)}


def test_a_clean_collection_is_ok(filled):
    report = verify(SPEC, filled)
    assert report.ok
    assert (report.rows, report.drift, report.foreign) == (11, 0, 0)


@pytest.mark.parametrize(("damage", "kind"), KINDS, ids=lambda value: getattr(value, "__name__", value))
def test_damage_is_found_mended_and_nothing_else_touched(filled, damage, kind):
    clean = content(filled)
    damage(filled)
    report = verify(SPEC, filled)
    assert found(report) == {kind: 1}
    assert not report.ok
    before = {place: record.record for place, record in records(filled).items()}

    mended = verify(SPEC, filled, repair=True)
    assert found(mended) == {kind: 1}, "counts are those found"
    assert mended.ok
    assert mended.repaired == 1
    assert content(filled) == clean
    after = {place: record.record for place, record in records(filled).items()}
    moved = {place[0] for place in after if before.get(place) != after[place]}
    assert len(moved) <= 1, "healthy records keep their place"
    assert verify(SPEC, filled).ok


def test_without_repair_nothing_is_written(filled):
    planted_orphan(filled)
    planted_missing(filled)
    before = content(filled)
    assert found(verify(SPEC, filled)) == {"missing": 1, "orphaned": 1}
    assert content(filled) == before


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0, -1.2e37])
def test_vectors_that_are_no_vectors_are_found(filled, tmp_path: Path, poison):
    database = sqlite3.connect(next((tmp_path / "store").glob("*.sqlite")))
    (table,) = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%vec%BLOB%'")]
    columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
    vector = next(name for name in columns if name.lower() in ("vec", "vector", "vec_vector"))
    size = filled.embedder.dimension
    with database:
        database.execute(
            f'UPDATE "{table}" SET "{vector}" = ? WHERE rowid = (SELECT MIN(rowid) FROM "{table}")',
            (np.full(size, poison, dtype="<f4").tobytes(),),
        )
    database.close()
    assert found(verify(SPEC, filled)) == {"bad_vectors": 1}
    assert verify(SPEC, filled, repair=True).ok


def test_a_wrong_model_behind_right_hashes_is_found_by_the_sample(filled, monkeypatch):
    fresh = type(filled.embedder)()
    monkeypatch.setattr(fresh, "_direction", lambda word: np.random.default_rng(len(word)).standard_normal(16))
    report = verify(SPEC, Ends(filled.source, filled.store, fresh))
    assert report.bad_vectors > 0


def test_changes_at_the_source_show_as_drift_until_the_next_sync(filled, source):
    source.put("100", "M1", MAKTX="renamed", MTART="FERT")
    source.put("100", "M99", MAKTX="new", MTART="FERT")
    del source.data["100", "M2"]
    assert found(verify(SPEC, filled)) == {"missing": 1, "stale": 1, "orphaned": 1}
    sync(SPEC, filled, OPTIONS)
    assert verify(SPEC, filled).ok


def test_an_empty_source_is_no_reason_to_delete_everything(filled, source):
    source.data.clear()
    report = verify(SPEC, filled, repair=True)
    assert (report.paused, report.ok, report.orphaned) == ("source_empty", False, 11)
    assert len(records(filled)) == 12


def test_repair_has_the_brake_of_sync_above_a_handful(ends, source):
    for number in range(40):
        source.put("100", f"M{number:02}", MAKTX=f"pump number {number}", MTART="FERT")
    sync(SPEC, ends, OPTIONS)
    kept = {key: values for key, values in source.data.items() if key[1] >= "M11"}
    gone = {key: values for key, values in source.data.items() if key[1] < "M11"}
    source.data = kept
    report = verify(SPEC, ends, repair=True)
    assert (report.orphaned, report.paused, report.ok, report.repaired) == (11, "max_deletes", False, 0)
    source.data = kept | dict([gone.popitem()])
    report = verify(SPEC, ends, repair=True)
    assert (report.orphaned, report.paused, report.ok, report.repaired) == (10, None, True, 10)


def test_rows_stored_by_another_key_are_not_written_a_second_time(filled, source):
    source.data = {(key[1],): values for key, values in source.data.items()}
    source.table = replace(source.table, primary_key=("MATNR",))
    before = content(filled)
    report = verify(SPEC, filled, repair=True)
    assert (report.missing > 0, report.orphaned > 0) == (True, True)
    assert (report.paused, report.ok, report.repaired) == ("schema_changed", False, 0)
    assert content(filled) == before


def test_rows_that_cannot_be_rendered_are_counted_as_quarantined(filled, source):
    source.put("100", "x" * 3000, MAKTX="a key too long to be an id", MTART="FERT")
    sync(SPEC, filled, OPTIONS)
    report = verify(SPEC, filled)
    assert (report.quarantined, report.ok) == (1, True)


def test_a_text_the_model_refuses_does_not_spare_the_rest_of_the_sample(filled, monkeypatch):
    fresh = type(filled.embedder)()
    fresh.refuse = {"pump number 1"}
    monkeypatch.setattr(fresh, "_direction", lambda word: np.random.default_rng(len(word)).standard_normal(16))
    assert verify(SPEC, Ends(filled.source, filled.store, fresh)).bad_vectors > 1


def test_report_has_the_promised_keys(filled):
    promised = "rows missing stale orphaned duplicates bad_vectors foreign ok"
    assert set(promised.split()) <= verify(SPEC, filled).as_dict().keys()
