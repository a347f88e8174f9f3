"""The tables of the local store: layout as migrations, rows of `collections`, records by id."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from connector.errors import UnknownCollection
from connector.model import Hit, Vectors
from connector.stores import filters, records
from connector.stores.filters import register
from connector.stores.generations import Collection
from connector.stores.local.sqlite_file import Schema, undamaged
from connector.stores.records import ModelStamp

# An empty line separates statements. Never change a released migration. A tombstone of record 0 means that metadata
# changed, and with it the results of filters.
_LAYOUT_1 = """
CREATE TABLE collections (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    generation INTEGER NOT NULL DEFAULT 1,
    model TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    dimension INTEGER NOT NULL,
    names TEXT NOT NULL DEFAULT '{}',
    checkpoint TEXT,
    last_sync TEXT,
    lease_owner TEXT,
    lease_epoch INTEGER NOT NULL DEFAULT 0,
    lease_until REAL,
    pruned INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE records (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    collection INTEGER NOT NULL REFERENCES collections (id),
    document TEXT NOT NULL,
    number INTEGER NOT NULL,
    hash BLOB NOT NULL,
    model TEXT NOT NULL,
    synced_at TEXT NOT NULL,
    meta TEXT NOT NULL CHECK (json_valid(meta)),
    text TEXT NOT NULL,
    UNIQUE (collection, document, number)
);

CREATE INDEX records_in_order ON records (collection, id);

CREATE TABLE vectors (
    record INTEGER PRIMARY KEY,
    dimension INTEGER NOT NULL,
    vector BLOB NOT NULL CHECK (length(vector) = 4 * dimension)
);

CREATE TABLE tombstones (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    collection INTEGER NOT NULL,
    record INTEGER NOT NULL
);

CREATE TRIGGER records_deleted AFTER DELETE ON records BEGIN
    DELETE FROM vectors WHERE record = old.id;
    INSERT INTO tombstones (collection, record) VALUES (old.collection, old.id);
END;

CREATE TRIGGER records_described_anew AFTER UPDATE OF meta ON records BEGIN
    INSERT INTO tombstones (collection, record) VALUES (old.collection, 0);
END;

CREATE INDEX tombstones_in_order ON tombstones (collection, seq);

CREATE TABLE quarantine (
    collection INTEGER NOT NULL REFERENCES collections (id) ON DELETE CASCADE,
    document TEXT NOT NULL,
    stage TEXT NOT NULL,
    reason TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    last_seen TEXT NOT NULL,
    PRIMARY KEY (collection, document)
) WITHOUT ROWID
"""

# `row_digest`: the content of a quarantined row, which is retried when it changes. Generations: `spec` is the recipe
# (JSON), `retired` the end of its active time, `highest` the highest number when an older generation was dropped,
# because numbers are never reused. `keywords` is contentless, so the triggers repeat a deleted text. `scope` is the
# collection as one word, which limits a search to it.
_LAYOUT_2 = """
ALTER TABLE quarantine ADD COLUMN row_digest BLOB;

ALTER TABLE collections ADD COLUMN spec TEXT;

ALTER TABLE collections ADD COLUMN created TEXT;

ALTER TABLE collections ADD COLUMN retired TEXT;

ALTER TABLE collections ADD COLUMN highest INTEGER NOT NULL DEFAULT 0;

CREATE VIRTUAL TABLE keywords USING fts5(scope, text, content='', tokenize='unicode61 remove_diacritics 2');

CREATE TRIGGER keywords_inserted AFTER INSERT ON records BEGIN
    INSERT INTO keywords (rowid, scope, text) VALUES (new.id, 'c' || new.collection, new.text);
END;

CREATE TRIGGER keywords_deleted AFTER DELETE ON records BEGIN
    INSERT INTO keywords (keywords, rowid, scope, text) VALUES ('delete', old.id, 'c' || old.collection, old.text);
END;

CREATE TRIGGER keywords_changed AFTER UPDATE OF text, collection ON records BEGIN
    INSERT INTO keywords (keywords, rowid, scope, text) VALUES ('delete', old.id, 'c' || old.collection, old.text);
    INSERT INTO keywords (rowid, scope, text) VALUES (new.id, 'c' || new.collection, new.text);
END
"""

SCHEMA = Schema(application_id=0x4F574C56, migrations=(_LAYOUT_1, _LAYOUT_2), prepare=register)  # OWLV


def _rows(db: sqlite3.Connection, later: str, condition: str, name: str) -> list[Collection]:
    """Return rows of `collections` by number. `later`: columns that a file of the first layout lacks if read only."""
    columns = f"id, name, generation, model, fingerprint, dimension, names, checkpoint, last_sync, lease_epoch{later}"
    sql = f"SELECT {columns} FROM collections WHERE {condition} ORDER BY generation"  # noqa: S608 - constants
    found = []
    with undamaged("the record of a collection"):
        for row in db.execute(sql, (name,)):
            id_, called, number, model, fingerprint, dimension, names, text, last_sync, epoch, *more = row
            spec, created, retired, highest = more or (None, None, None, None)
            synced, began, ended = (datetime.fromisoformat(at) if at else None for at in (last_sync, created, retired))
            stamp, checkpoint = ModelStamp(model, fingerprint, dimension), records.checkpoint_of(text, synced)
            last = (json.loads(names), epoch, spec, began, ended, highest, id_)
            found.append(Collection(called, "records", number, stamp, checkpoint, *last))
    return found


def generations(db: sqlite3.Connection, collection: str) -> list[Collection]:
    """Return the generations by number."""
    condition = "name = ?1 OR substr(name, 1, length(?1) + 1) = ?1 || '@'"
    return _rows(db, ", spec, created, retired, highest", condition, collection)


def find(db: sqlite3.Connection, name: str) -> Collection | None:
    return next(iter(_rows(db, "", "name = ?", name)), None)


def known(db: sqlite3.Connection, name: str) -> Collection:
    found = find(db, name)
    if found is None:
        raise unknown(name)
    return found


def unknown(name: str) -> UnknownCollection:
    return UnknownCollection(f"the local store has no collection {name!r}; `sync` creates it")


# ------------------------------------------------------------------------------------------------------------- records

IN_LIMIT = 500
"""Ids in one IN list. SQLite prepares such a short statement once."""


class Records:
    """Look up records within one transaction. A candidate is a Hit without text and metadata."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def candidates(self, scores: Mapping[int, float], condition: filters.Condition | None) -> list[Hit]:
        """Return the scored records that pass the filter, unordered."""
        sql = "SELECT document, number, id FROM records WHERE id IN ({})"
        return [
            Hit(document, scores[id_], "", {}, number, id_)
            for document, number, id_ in self._rows(sql, list(scores), condition)
        ]

    def with_vectors(
        self, ids: Sequence[int], condition: filters.Condition | None
    ) -> list[tuple[str, int, int, bytes]]:
        """Return document, number, id and vector of the records that pass the filter, unordered."""
        sql = "SELECT document, number, id, vector FROM records JOIN vectors ON record = id WHERE id IN ({})"
        return [(row[0], row[1], row[2], row[3]) for row in self._rows(sql, ids, condition)]

    def hits(self, best: Sequence[Hit]) -> list[Hit]:
        """Return the same hits in the same order, with text and metadata."""
        sql = "SELECT id, text, meta FROM records WHERE id IN ({})"
        found = {id_: (text, meta) for id_, text, meta in self._rows(sql, [hit.record for hit in best])}
        return [
            replace(hit, text=found[hit.record][0], metadata=records.metadata_of(found[hit.record][1])) for hit in best
        ]

    def vectors(self, ids: Sequence[int], dimension: int) -> Vectors:
        """Return vectors in the order of `ids`; zeros for missing ones."""
        found = dict(self._rows("SELECT record, vector FROM vectors WHERE record IN ({})", list(set(ids))))
        gathered = np.zeros((len(ids), dimension), np.float32)
        for place, id_ in enumerate(ids):
            data = found.get(id_, b"")
            if len(data) == 4 * dimension:
                gathered[place] = np.frombuffer(data, dtype="<f4")
        return gathered

    def _rows(
        self, sql: str, ids: Sequence[int], condition: filters.Condition | None = None
    ) -> Iterator[tuple[Any, ...]]:
        parameters: tuple[Any, ...] = ()
        if condition is not None:
            compiled = filters.to_sqlite(condition)
            sql, parameters = f"{sql} AND ({compiled.sql})", compiled.parameters
        for start in range(0, len(ids), IN_LIMIT):
            some = ids[start : start + IN_LIMIT]
            places = ", ".join("?" * len(some))
            yield from self._db.execute(sql.replace("{}", places, 1), (*some, *parameters))
