"""The tables of the local store, and look-ups of records by id."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any

from connector.model import Hit
from connector.stores import filters, records
from connector.stores.local.sqlite_file import Schema
from connector.stores.state import Collection, StateTables

# A tombstone of record 0 means that metadata changed, so cached results of filters are stale. `keywords` is
# contentless, so its triggers must pass a text again to delete it. `scope` is the collection's id as one word; a search
# with this word finds only rows of that collection.
_LAYOUT = """
CREATE TABLE collections (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    collection TEXT NOT NULL UNIQUE,
    table_name TEXT NOT NULL,
    generation INTEGER NOT NULL,
    model_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    dimension INTEGER NOT NULL,
    meta_names TEXT NOT NULL,
    checkpoint TEXT,
    last_sync REAL,
    lease_owner TEXT,
    lease_epoch INTEGER NOT NULL DEFAULT 0,
    lease_until REAL,
    spec TEXT,
    created_at REAL,
    retired_at REAL,
    highest INTEGER,
    pruned INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE quarantine (
    collection TEXT NOT NULL,
    src_key TEXT NOT NULL,
    stage TEXT NOT NULL,
    reason TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    last_seen REAL NOT NULL,
    row_digest BLOB,
    PRIMARY KEY (collection, src_key)
) WITHOUT ROWID;

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

CREATE TRIGGER records_meta_changed AFTER UPDATE OF meta ON records BEGIN
    INSERT INTO tombstones (collection, record) VALUES (old.collection, 0);
END;

CREATE INDEX tombstones_in_order ON tombstones (collection, seq);

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


def _prepare(connection: sqlite3.Connection) -> None:
    filters.register(connection)
    connection.create_function("owl_now", 0, lambda: time.time())


SCHEMA = Schema(application_id=0x4F574C56, version=3, script=_LAYOUT, prepare=_prepare)  # OWLV


def find(db: sqlite3.Connection, tables: StateTables, name: str) -> Collection:
    """Return the collection as the transaction of `db` sees it. Raises UnknownCollection."""
    found = tables.find(lambda sql, values: db.execute(sql, values).fetchall(), name)
    if found is None:
        raise tables.unknown(name)
    return found


IN_LIMIT = 500  # Ids in one IN list. Longer lists are split, so that the full parts share one prepared statement.


def only(condition: filters.Condition | None) -> tuple[str, tuple[Any, ...]]:
    """Return a filter as an SQL condition, with its parameters."""
    if condition is None:
        return "1", ()
    compiled = filters.to_sqlite(condition)
    return f"({compiled.sql})", compiled.parameters


def by_ids(
    db: sqlite3.Connection, select: str, column: str, ids: Sequence[Any], only: tuple[str, tuple[Any, ...]] = ("1", ())
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a SELECT whose `column` is in `ids` and that pass `only`, unordered."""
    condition, parameters = only
    for start in range(0, len(ids), IN_LIMIT):
        some = ids[start : start + IN_LIMIT]
        where = f"{column} IN ({', '.join('?' * len(some))}) AND {condition}"
        sql = f"{select} WHERE {where}"
        yield from db.execute(sql, (*some, *parameters))


def hits(db: sqlite3.Connection, best: Sequence[Hit]) -> list[Hit]:
    """Return the same hits in the same order, with text and metadata."""
    rows = by_ids(db, "SELECT id, text, meta FROM records", "id", [hit.record for hit in best])
    found = {id_: (text, records.metadata_of(meta)) for id_, text, meta in rows}
    return [Hit(hit.id, hit.score, *found[hit.record], hit.number, hit.record) for hit in best]
