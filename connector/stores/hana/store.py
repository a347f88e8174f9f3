"""The store in HANA: REAL_VECTOR columns, searched by HANA, in tables that langchain-hana's HanaDB can read. Rows of
other programs are searched but never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from connector import failpoints
from connector.errors import ConfigurationError, DatabaseError, PermissionRefused, UnknownTable
from connector.hana import catalog
from connector.hana.connection import HanaFeatures, HanaPool, Rows, quote
from connector.hana.privileges import creating, granted
from connector.model import ChangeSet, Filter, Lease, StoredChunk, StoredRecord
from connector.stores import records
from connector.stores.hana.tables import STATE_TABLES, Collections, VectorTable, portions, state_tables, table_name
from connector.stores.hana.view import HanaView
from connector.stores.state import Collection, LeaseTimes, Session, StateStore

T = TypeVar("T")
STORED_PAGE = 10_000
RECORDS_PAGE = 1_000
INDEX_FROM = 10_000
"""Records from which an HNSW index is created; below, HANA's exact search is fast enough."""
ATTEMPTS_OVERLOADED = 2
"""Attempts to write several documents while HANA is overloaded. Smaller change sets help more than waiting."""
_EXISTS = frozenset({288, 289})
_STORED = '"ID", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH"'

# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608


class HanaStore(StateStore):
    """A `VectorStore` in `schema`, reached through `pool`. The caller closes the pool.

    `features`: server capabilities, None: probe them. `index_from`: see INDEX_FROM. `names`: as in StateStore.
    """

    kind = "hana"

    def __init__(
        self,
        pool: HanaPool,
        schema: str,
        *,
        features: HanaFeatures | None = None,
        index_from: int = INDEX_FROM,
        names: Mapping[str, Mapping[str, str]] | None = None,
        lease_times: LeaseTimes | None = None,
    ) -> None:
        times = lease_times or LeaseTimes()
        whole_seconds = replace(times, ttl=max(1, round(times.ttl)))
        super().__init__(state_tables(schema), schema, names, whole_seconds)
        self._pool = pool
        self._features = features
        self._index_from = index_from
        self._collections = Collections(pool, schema, self._names)

    def close(self) -> None:
        """Do nothing; the caller closes the pool."""
        self._forget()

    # ------------------------------------------------------------------------------------------------------ state

    def _read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str) -> Rows:
        return self._pool.read(sql, parameters, doing=doing)

    def _execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str) -> int:
        return self._pool.execute(sql, parameters, doing=doing)

    def _transaction(self, work: Callable[[Session], T], *, doing: str, divisible: bool = False) -> T:
        return self._pool.in_transaction(work, doing=doing, overloaded=ATTEMPTS_OVERLOADED if divisible else None)

    def _forget(self) -> None:
        self._collections.forget()

    def _known(self, name: str) -> Collection:
        return self._collections.recent(name)

    def _table_name(self, collection: str, number: int) -> str:
        return table_name(collection, number)

    def _table(self, name: str) -> VectorTable:
        return VectorTable(self._schema, name)

    def _create_state(self) -> None:
        self._features = self._features or HanaFeatures.probe(self._pool)
        if not self._features.real_vector:
            raise ConfigurationError(
                f"this HANA (version {self._features.version or 'unknown'}) has no REAL_VECTOR type; it came with HANA "
                'Cloud 2024.2 and is not on-premise: keep the vectors in the local store, [store] kind = "local"'
            )
        if not self._pool.read(catalog.FIND_SCHEMA, (self._schema,), doing="looking for the store's schema"):
            raise UnknownTable(
                f"the store's schema {self._schema!r} does not exist (names are case-sensitive): create it, "
                "or change [store] schema"
            )
        for name, columns in STATE_TABLES.items():
            if not self._pool.read(catalog.FIND_TABLE, (self._schema, name), doing="looking for the store's tables"):
                self._create(f"CREATE COLUMN TABLE {quote(self._schema)}.{quote(name)} {columns}")

    def _create(self, sql: str) -> None:
        """Tolerate that another worker creates the same table at the same time."""
        try:
            with granted(self._pool, creating(self._schema)):
                self._pool.execute(sql, doing="creating the store's tables")
        except DatabaseError as error:
            if error.code not in _EXISTS:
                raise

    def _ensure_table(self, name: str, table: str, dimension: int) -> None:
        """Create the table with vectors of `dimension`, or replace an empty one with other columns."""
        vectors = self._table(table)
        sql = f'SELECT "COLLECTION" FROM {self._tables.state} WHERE "TABLE_NAME" = ?'
        for (owner,) in self._pool.read(sql, (table,)):
            if owner != name:
                raise ConfigurationError(
                    f"collections {name!r} and {owner!r} would both be kept in table {table}: rename one of them"
                )
        columns = self._pool.read(catalog.FIND_COLUMNS, (self._schema, table), doing="looking at a vector table")
        if columns:
            lengths = {row[0]: row[2] for row in columns}
            if lengths.get("VEC_VECTOR") == dimension and "SRC_KEY" in lengths:
                if vectors.key_index not in self._indexes(table):  # a worker died before creating it
                    with suppress(PermissionRefused):  # another user's table: correct without the index, but slower
                        self._create(vectors.create_key_index())
                return
            if self._pool.read(f"SELECT COUNT(*) FROM {vectors.sql}")[0][0]:
                raise ConfigurationError(
                    f"table {self._schema}.{table} exists with another layout and is not empty: it is not ours to "
                    "change. Rename the collection, or drop the table"
                )
            self._pool.execute(vectors.drop(), doing="replacing an empty vector table")
        self._create(vectors.create(dimension))
        self._create(vectors.create_key_index())

    def _indexes(self, table: str) -> dict[str, str]:
        """Return index types by name."""
        sql = "SELECT INDEX_NAME, INDEX_TYPE FROM SYS.INDEXES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?"
        return dict(self._pool.read(sql, (self._schema, table), doing="looking at a table's indexes"))

    def _drop_vectors(self, found: Collection, lease: Lease) -> None:
        with suppress(UnknownTable):  # an interrupted drop has removed it
            self._pool.execute(self._table(found.table).drop(), doing=f"dropping the table of {found.name!r}")

    def _counts(self, found: Collection) -> tuple[int, int, int]:
        try:
            counts = self._pool.read(self._table(found.table).count(), doing=f"counting collection {found.name!r}")[0]
        except UnknownTable:
            return 0, 0, 0
        return int(counts[0]), int(counts[1]), int(counts[2])

    # --------------------------------------------------------------------------------------------------- writing

    def _writer(self, found: Collection, changes: ChangeSet) -> Callable[[Session], None]:
        """Prepare all rows of parameters once, for every attempt of the transaction."""
        table, chunks = self._table(found.table).sql, changes.chunks
        vectors = records.fvecs(records.checked_vectors(changes, found.stamp.dimension))
        metadata = records.checked_metadata(changes)
        rows = [
            (chunk.text, text, vector, chunk.id, chunk.number, chunk.content_hash, found.stamp.id)
            for chunk, text, vector in zip(chunks, metadata, vectors, strict=False)
        ]
        described = [
            (text, chunk.content_hash, chunk.id, chunk.number)
            for chunk, text in zip(changes.metadata_only, metadata[len(chunks) :], strict=True)
        ]
        # Use key order, so that two transactions cannot deadlock.
        replaced = [(id_,) for id_ in sorted({*changes.deleted, *(chunk.id for chunk in chunks)})]

        def write(session: Session) -> None:
            """Write all rows. Raises RowRejected without naming the row (`Session.execute_many`)."""
            sql = f'DELETE FROM {table} WHERE "SRC_KEY" = ?'
            session.execute_many(sql, replaced, doing="removing what is replaced")
            failpoints.reach("mid_upsert")
            sql = (
                f'INSERT INTO {table} ("VEC_TEXT", "VEC_META", "VEC_VECTOR", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH", '
                '"MODEL_ID", "SYNCED_AT") VALUES (?, ?, ?, ?, ?, ?, ?, CURRENT_UTCTIMESTAMP)'
            )
            session.execute_many(sql, rows, doing="writing vectors")
            sql = (
                f'UPDATE {table} SET "VEC_META" = ?, "CONTENT_HASH" = ?, "SYNCED_AT" = CURRENT_UTCTIMESTAMP '
                'WHERE "SRC_KEY" = ? AND "CHUNK_NO" = ?'
            )
            session.execute_many(sql, described, doing="replacing metadata")

        return write

    def optimise(self, collection: str) -> None:
        """Create the HNSW index if the table is large enough and has none. HANA keeps it current."""
        found = self._collections.known(collection)
        if any("HNSW" in str(kind).upper() for kind in self._indexes(found.table).values()):
            return  # before counting, which scans every record
        if self._counts(found)[0] >= self._index_from:
            self._create(self._table(found.table).create_hnsw())

    # --------------------------------------------------------------------------------------------------- reading

    def view(self, collection: str, generation: int | None = None, row_filter: Filter | None = None) -> HanaView:
        return HanaView(self._collections, collection, generation, row_filter)

    def stored(self, collection: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        if ids is None:
            condition = '"SRC_KEY" IS NOT NULL AND "ID" > ?'
            for rows in self._pages(collection, _STORED, condition, STORED_PAGE):
                yield [_stored(row) for row in rows]
            return
        table = self._collections.table(self._collections.known(collection))
        for some in portions(ids):
            sql = f'SELECT {_STORED} FROM {table.sql} WHERE "SRC_KEY" IN ({", ".join("?" * len(some))})'
            yield [_stored(row) for row in self._pool.read(sql, some, doing=f"reading collection {collection!r}")]

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
        dimension = self._collections.known(collection).stamp.dimension
        columns = f'{_STORED}, "MODEL_ID", "VEC_TEXT", "VEC_META", "VEC_VECTOR"'
        for rows in self._pages(collection, columns, '"ID" > ?', RECORDS_PAGE):
            yield [
                StoredRecord(
                    record=id_,
                    id=key,
                    number=number,
                    content_hash=None if digest is None else bytes(digest),
                    model=model,
                    text=text,
                    metadata=records.metadata_of(meta),
                    vector=records.from_fvecs(vector, dimension),
                )
                for id_, key, number, digest, model, text, meta, vector in rows
            ]

    def _pages(self, collection: str, columns: str, condition: str, size: int) -> Iterator[Rows]:
        table = self._collections.table(self._collections.known(collection))
        sql = f'SELECT {columns} FROM {table.sql} WHERE {condition} ORDER BY "ID" LIMIT ?'
        after = -1
        while rows := self._pool.read(sql, (after, size), doing=f"reading collection {collection!r}"):
            yield rows
            after = rows[-1][0]


def _stored(row: Sequence[Any]) -> StoredChunk:
    id_, key, number, digest = row
    return StoredChunk(id_, key, -1 if number is None else number, bytes(digest or b""))
