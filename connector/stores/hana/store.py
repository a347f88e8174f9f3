"""The store in HANA: REAL_VECTOR or HALF_VECTOR columns, searched by HANA, in tables that langchain-hana's HanaDB can
read. Rows of other programs are searched but never changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from connector import failpoints
from connector.document.in_sql import SqlRows
from connector.errors import (
    ConfigurationError,
    DatabaseError,
    GenerationChanged,
    ModelMismatch,
    PermissionRefused,
    RowRejected,
    RowsRejected,
    StatementFailed,
    UnknownTable,
)
from connector.hana import catalog
from connector.hana.connection import HanaFeatures, HanaPool, Rows, quote
from connector.hana.embedding import embed_plain_word, embedding, parameters, probe
from connector.hana.source import HanaSource
from connector.model import (
    ChangeSet,
    Chunk,
    DatabaseModel,
    Filter,
    Hit,
    IndexUse,
    Lease,
    Order,
    Place,
    Sample,
    StoredChunk,
    StoredRecord,
    StoredText,
    Vectors,
)
from connector.stores import filters, records
from connector.stores.hana import keywords
from connector.stores.hana.in_database import RowsInDatabase
from connector.stores.hana.tables import (
    PARTS,
    PARTS_TABLE,
    STATE_TABLES,
    VectorTable,
    as_hit,
    as_text,
    compiled,
    create,
    state_tables,
    table_name,
)
from connector.stores.records import SPREAD_FACTOR, SPREAD_MODULUS
from connector.stores.state import Collection, LeaseTimes, Session, changed, lost, portions
from connector.stores.store import VectorStore
from connector.stores.words import as_key_value

T = TypeVar("T")
STORED_PAGE = 10_000
RECORDS_PAGE = 1_000
INDEX_FROM = 10_000  # records from which an HNSW index is created; below this, HANA's exact search is fast enough
_STORED = '"ID", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH"'
VECTORS_PAGE = 500
EMBEDDED_TOGETHER = 10  # rows of one INSERT in which HANA embeds: the driver waits `communication_timeout` for it
REMEMBERED = 2.0  # seconds for which searches cache a collection's row
ENSURED = 60.0  # seconds for which `open` does not check a table again; a sync opens its collection twice
_TIE_STEPS = 3  # maximum number of extra reads because rows share the last score

# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608


def _stored(row: tuple[Any, ...]) -> StoredChunk:
    id_, key, number, digest = row
    return StoredChunk(id_, key, -1 if number is None else number, bytes(digest or b""))


class HanaStore(VectorStore):
    """A store in `schema`, reached through `pool`. The caller closes the pool.

    `index_from`: see INDEX_FROM. `names`: as in VectorStore. `vector_type`: of the tables that it creates; tables that
    are there keep theirs.
    """

    kind = "hana"

    def __init__(
        self,
        pool: HanaPool,
        schema: str,
        *,
        index_from: int = INDEX_FROM,
        names: Mapping[str, Mapping[str, str]] | None = None,
        lease_times: LeaseTimes | None = None,
        vector_type: Literal["real", "half"] = "real",
    ) -> None:
        times = lease_times or LeaseTimes()
        whole_seconds = replace(times, ttl=max(1, round(times.ttl)))
        super().__init__(pool, state_tables(schema), schema, names, whole_seconds)
        self.pool = pool
        self._features: HanaFeatures | None = None
        self._half = vector_type == "half"
        self._index_from = index_from
        self._remembered: dict[str, tuple[float, Collection]] = {}
        self._ensured: dict[tuple[str, int], float] = {}
        self._full_text: bool | None = None
        self._parts = f"{quote(schema)}.{quote(PARTS)}"

    def close(self) -> None:
        """Clear the cached collections. The caller closes the pool."""
        self._forget()

    # ------------------------------------------------------------------------------------------------------ state

    def _forget(self) -> None:
        self._remembered.clear()

    def _known(self, name: str) -> Collection:
        """Return the collection as it was at most REMEMBERED seconds ago."""
        at, found = self._remembered.get(name, (-REMEMBERED, None))
        return found if found is not None and time.monotonic() - at < REMEMBERED else self._fresh(name)

    def _fresh(self, name: str) -> Collection:
        self._remembered.pop(name, None)
        found = super()._known(name)
        self._remembered[name] = (time.monotonic(), found)
        return found

    def _searches_texts(self, table: VectorTable) -> bool:
        """Return whether HANA can search texts by words. No system view shows this, so the first call tries it."""
        if self._full_text is None:
            try:
                self.pool.read(*keywords.probe(table), doing="asking HANA whether it can search texts")
                self._full_text = True
            except StatementFailed:
                self._full_text = False
        return self._full_text

    def _table(self, name: str) -> VectorTable:
        return VectorTable(self._schema, name)

    def _create(self, sql: str) -> None:
        create(self.pool, self._schema, sql)

    def _create_table(self, name: str, collection: str, number: int, dimension: int) -> str:
        self._features = self._features or HanaFeatures.probe(self.pool)
        if not self._features.real_vector:
            raise ConfigurationError(
                f"this HANA (version {self._features.version or 'unknown'}) has no REAL_VECTOR type; it came with HANA "
                'Cloud 2024.2 and is not on-premise: keep the vectors in the local store, [store] kind = "local"'
            )
        if self._half and not self._features.half_vector:
            raise ConfigurationError(
                f"this HANA (version {self._features.version or 'unknown'}) has no HALF_VECTOR type; it came with HANA "
                'Cloud 2025.15: set [store] vector_type = "real"'
            )
        if not self.pool.read(catalog.FIND_SCHEMA, (self._schema,), doing="looking for the store's schema"):
            raise UnknownTable(
                f"the store's schema {self._schema!r} does not exist (names are case-sensitive): create it, "
                "or change [store] schema"
            )
        for state, definition in STATE_TABLES.items():
            if not self.pool.read(catalog.FIND_TABLE, (self._schema, state), doing="looking for the store's tables"):
                self._create(f"CREATE COLUMN TABLE {quote(self._schema)}.{quote(state)} {definition}")
        table = table_name(collection, number, self._half)
        sql = f'SELECT "COLLECTION" FROM {self._tables.state} WHERE "TABLE_NAME" = ?'
        for (owner,) in self.pool.read(sql, (table,)):
            if owner != name:
                raise ConfigurationError(
                    f"collections {name!r} and {owner!r} would both be kept in table {table}: rename one of them"
                )
        self._ensured.pop((table, dimension), None)
        self._ensure_table(table, dimension)
        return table

    def _ensure_table(self, table: str, dimension: int) -> None:
        """Create the table and its index if missing. Replaces an empty table that has other columns."""
        at = self._ensured.get((table, dimension))
        if at is not None and time.monotonic() - at < ENSURED:
            return
        self._complete_table(table, dimension)
        self._ensured[table, dimension] = time.monotonic()

    def _complete_table(self, table: str, dimension: int) -> None:
        vectors = self._table(table)
        columns = self.pool.read(catalog.FIND_COLUMNS, (self._schema, table), doing="looking at a vector table")
        if columns:
            types = {row[0]: (row[1], row[2]) for row in columns}
            if types.get("VEC_VECTOR") == (vectors.vector_type, dimension) and "SRC_KEY" in types:
                if f"{table}_KEY" not in self._indexes(table):  # a worker died before creating it
                    with suppress(PermissionRefused):  # another user's table: correct without the index, but slower
                        self._create(vectors.create_key_index())
                return
            if self.pool.read(f"SELECT COUNT(*) FROM {vectors.sql}")[0][0]:
                raise ConfigurationError(
                    f"table {self._schema}.{table} exists with another layout and is not empty: it is not ours to "
                    "change. Rename the collection, or drop the table"
                )
            self.pool.execute(vectors.drop(), doing="replacing an empty vector table")
        self._create(vectors.create(dimension))
        self._create(vectors.create_key_index())

    def _keeps_type(self, found: Collection) -> bool:
        return self._table(found.table).half == self._half

    @contextmanager
    def _using_vectors(self) -> Iterator[None]:
        """If a table is missing, let the next `open` check the tables again."""
        try:
            yield
        except UnknownTable:
            self._ensured.clear()
            raise

    def _indexes(self, table: str) -> dict[str, str]:
        """Return index types by name."""
        sql = "SELECT INDEX_NAME, INDEX_TYPE FROM SYS.INDEXES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?"
        return dict(self.pool.read(sql, (self._schema, table), doing="looking at a table's indexes"))

    def _drop_vectors(self, found: Collection, lease: Lease) -> None:
        self._ensured.clear()
        with suppress(UnknownTable):  # an earlier, interrupted drop removed it
            self.pool.execute(self._table(found.table).drop(), doing=f"dropping the table of {found.name!r}")

    def _counts(self, found: Collection) -> tuple[int, int, int]:
        try:
            sql = f'SELECT COUNT(*), COUNT("SRC_KEY"), COUNT(DISTINCT "SRC_KEY") FROM {self._table(found.table).sql}'
            with self._using_vectors():
                counts = self.pool.read(sql, doing=f"counting collection {found.name!r}")[0]
        except UnknownTable:
            return 0, 0, 0
        return int(counts[0]), int(counts[1]), int(counts[2])

    # --------------------------------------------------------------------------------------------- parts of a lease

    def begin_part(self, lease: Lease, part: int) -> Lease:
        """Give the part a row of its own: the first statement of a write locks its row, as other writes lock the row of
        the lease."""
        if not self.pool.read(catalog.FIND_TABLE, (self._schema, PARTS), doing="looking for the store's tables"):
            self._create(f"CREATE COLUMN TABLE {self._parts} {PARTS_TABLE}")
        begun, doing = replace(lease, part=part), "beginning a part of a lease"

        def write(session: Session) -> None:
            self._check(session, lease)
            self._end_part(session, begun)  # a repeated transaction may find it
            sql = f'INSERT INTO {self._parts} ("COLLECTION", "PART", "LEASE_EPOCH") VALUES (?, ?, ?)'
            session.execute(sql, (lease.collection, part, lease.epoch), doing=doing)

        self.pool.in_transaction(write, doing=doing)
        return begun

    def end_parts(self, lease: Lease) -> None:
        def write(session: Session) -> None:
            if lease.part is not None:
                self._end_part(session, lease)
                return
            self._check(session, lease)
            self._end_parts(session, lease.collection)

        self.pool.in_transaction(write, doing="ending the parts of a lease")

    def _end_part(self, session: Session, part: Lease) -> None:
        sql = f'DELETE FROM {self._parts} WHERE "COLLECTION" = ? AND "PART" = ? AND "LEASE_EPOCH" = ?'
        values = (part.collection, part.part, part.epoch)
        session.execute(sql, values, doing="ending a part of a lease")

    def _end_parts(self, session: Session, collection: str) -> None:
        # Asked in this transaction, which has locked the lease: no other worker splits it until the commit.
        if session.query(catalog.FIND_TABLE, (self._schema, PARTS), doing="looking for the store's tables"):
            sql = f'DELETE FROM {self._parts} WHERE "COLLECTION" = ?'
            session.execute(sql, (collection,), doing="ending the parts of a lease")

    def _check(self, session: Session, lease: Lease) -> None:
        """Raise LeaseLost after a takeover. A part locks its own row. A worker that takes the lease deletes that row,
        and so waits for the commit; a released lease has another epoch."""
        if lease.part is None:
            super()._check(session, lease)
            return
        sql = (
            f'UPDATE {self._parts} SET "LEASE_EPOCH" = ? WHERE "COLLECTION" = ? AND "PART" = ? AND "LEASE_EPOCH" = ? '
            f'AND EXISTS (SELECT 1 FROM {self._tables.state} WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?)'
        )
        name, epoch = lease.collection, lease.epoch
        values = (epoch, name, lease.part, epoch, name, epoch)
        if session.execute(sql, values, doing="checking the lease") != 1:
            raise lost(lease)

    # --------------------------------------------------------------------------------------------------- writing

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        with self._using_vectors():
            super().apply(lease, changes)

    def _writer(self, found: Collection, changes: ChangeSet) -> Callable[[Session], None]:
        """Prepare the parameters of all rows once; every attempt of the transaction uses them."""
        place, chunks, model = self._table(found.table), changes.chunks, changes.model
        metadata, table, value = records.checked_metadata(changes), place.sql, "?"
        vectors: Sequence[tuple[Any, ...]]
        if model is None:
            checked = records.checked_vectors(changes, found.stamp.dimension, place.half)
            vectors = [(each,) for each in records.fvecs(checked, place.half)]
            if place.half:
                chunks = records.with_digests_of(checked, changes)
        else:
            value, vectors = place.of_real(embedding(model)), [(chunk.text, *parameters(model)) for chunk in chunks]
        rows = [
            (chunk.text, text, *vector, chunk.id, chunk.number, chunk.content_hash, found.stamp.id)
            for chunk, text, vector in zip(chunks, metadata, vectors, strict=False)
        ]
        described = [
            (text, chunk.content_hash, chunk.id, chunk.number)
            for chunk, text in zip(changes.metadata_only, metadata[len(chunks) :], strict=True)
        ]
        replaced = sorted({*changes.deleted, *(chunk.id for chunk in chunks)})

        def write(session: Session) -> None:
            """Write all rows. Raises RowRejected without naming the row (`Session.execute_many`)."""
            for some in portions(replaced):
                sql = f'DELETE FROM {table} WHERE "SRC_KEY" IN ({", ".join("?" * len(some))})'
                session.execute(sql, some, doing="removing what is replaced")
            failpoints.reach("mid_upsert")
            sql = (
                f'INSERT INTO {table} ("VEC_TEXT", "VEC_META", "VEC_VECTOR", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH", '
                f'"MODEL_ID", "SYNCED_AT") VALUES (?, ?, {value}, ?, ?, ?, ?, CURRENT_UTCTIMESTAMP)'
            )
            if model is None:
                session.execute_many(sql, rows, doing="writing vectors")
            elif rows:
                _embed_into(session, found, table, (sql, rows), changes.chunks, model)
            sql = (
                f'UPDATE {table} SET "VEC_META" = ?, "CONTENT_HASH" = ?, "SYNCED_AT" = CURRENT_UTCTIMESTAMP '
                'WHERE "SRC_KEY" = ? AND "CHUNK_NO" = ?'
            )
            session.execute_many(sql, described, doing="replacing metadata")

        return write

    def likeness(self, collection: str, records: Sequence[int], model: DatabaseModel) -> dict[int, float]:
        table = self._table(self._fresh(collection).table)
        again = table.of_real(embedding(model, '"VEC_TEXT"'))

        def asked(ids: Sequence[int]) -> dict[int, float]:
            found: dict[int, float] = {}
            for some in portions(ids):
                sql = (
                    f'SELECT "ID", COSINE_SIMILARITY("VEC_VECTOR", {again}) FROM {table.sql} '
                    f'WHERE "ID" IN ({", ".join("?" * len(some))})'
                )
                rows = self.pool.read(sql, (*parameters(model), *some), doing="embedding stored texts again")
                found |= {id_: cosine for id_, cosine in rows if cosine is not None}
            return found

        try:
            return asked(records)
        except (RowRejected, StatementFailed):
            embed_plain_word(self.pool.read, model)
        alone: dict[int, float] = {}
        errors: list[RowRejected | StatementFailed] = []
        for id_ in records:
            try:
                alone |= asked([id_])
            except (RowRejected, StatementFailed) as error:
                errors.append(error)
        if len(errors) == len(records):  # not the texts: HANA refuses the statement
            raise errors[0]
        return alone

    def in_database(self, collection: str, source: HanaSource, rows: SqlRows, model: DatabaseModel) -> RowsInDatabase:
        """Return the rows of the source beside the collection. `source`: in the same HANA, of the same user."""
        found = self._fresh(collection)
        table, stamp = self._table(found.table), found.stamp.id
        return RowsInDatabase(rows, source, collection, table, self._tables.quarantine, stamp, model, self._check)

    def optimise(self, collection: str) -> None:
        """Create the HNSW index if the table is large enough and has none. HANA keeps it current."""
        found = self._fresh(collection)
        if any("HNSW" in str(kind).upper() for kind in self._indexes(found.table).values()):
            return  # before counting, which scans every record
        if self._counts(found)[0] >= self._index_from:
            self._create(self._table(found.table).create_hnsw())

    # --------------------------------------------------------------------------------------------------- reading

    def view(self, collection: str, generation: int | None = None, row_filter: Filter | None = None) -> HanaView:
        return HanaView(self, collection, generation, row_filter)

    def stored(self, collection: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        if ids is None:
            condition = '"SRC_KEY" IS NOT NULL AND "ID" > ?'
            for rows in self._pages(collection, _STORED, condition, STORED_PAGE):
                yield list(map(_stored, rows))
            return
        table = self._table(self._fresh(collection).table)
        for some in portions(ids):
            sql = f'SELECT {_STORED} FROM {table.sql} WHERE "SRC_KEY" IN ({", ".join("?" * len(some))})'
            with self._using_vectors():
                rows = self.pool.read(sql, some, doing=f"reading collection {collection!r}")
            yield list(map(_stored, rows))

    def records(self, collection: str, *, vectors: bool = True) -> Iterator[list[StoredRecord]]:
        dimension = self._fresh(collection).stamp.dimension
        vector_or_length = '"VEC_VECTOR"' if vectors else 'L2NORM("VEC_VECTOR")'
        columns = f'{_STORED}, "MODEL_ID", "VEC_TEXT", "VEC_META", {vector_or_length}'
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
                    vector=records.from_fvecs(found, dimension) if vectors else None,
                    length=None if vectors else found,
                )
                for id_, key, number, digest, model, text, meta, found in rows
            ]

    def _pages(self, collection: str, columns: str, condition: str, size: int) -> Iterator[Rows]:
        table = self._table(self._fresh(collection).table)
        sql = f'SELECT {columns} FROM {table.sql} WHERE {condition} ORDER BY "ID" LIMIT ?'
        after = -1
        while True:
            with self._using_vectors():
                rows = self.pool.read(sql, (after, size), doing=f"reading collection {collection!r}")
            if not rows:
                return
            yield rows
            after = rows[-1][0]


def _embed_into(
    session: Session,
    found: Collection,
    table: str,
    inserted: tuple[str, Sequence[Any]],
    chunks: Sequence[Chunk],
    model: DatabaseModel,
) -> None:
    """Insert rows whose vectors HANA computes, a few per statement. `inserted`: the INSERT and its rows.

    Raises RowsRejected for texts that HANA does not embed outside the INSERT either, or for which it gives no vector.
    If HANA embeds all of them, raises the INSERT's own error; ModelMismatch if the vectors have another dimension.
    """
    sql, rows = inserted
    for start in range(0, len(rows), EMBEDDED_TOGETHER):
        end = start + EMBEDDED_TOGETHER
        try:
            session.execute_many(sql, rows[start:end], doing="embedding texts in HANA")
        except (RowRejected, StatementFailed) as error:
            refused = _not_embeddable(session, found, [chunk.text for chunk in chunks[start:end]], model)
            if not refused:
                raise
            by_chunk = {start + place: reason for place, reason in refused.items()}
            raise RowsRejected(str(error), rows=by_chunk) from None
    places = {(chunk.id, chunk.number): place for place, chunk in enumerate(chunks)}
    missing: dict[int, RowRejected] = {}
    for some in portions(list(dict.fromkeys(chunk.id for chunk in chunks))):
        sql = (
            f'SELECT "SRC_KEY", "CHUNK_NO" FROM {table} WHERE "SRC_KEY" IN ({", ".join("?" * len(some))}) '
            'AND COALESCE(L2NORM("VEC_VECTOR"), 0) < 0.5'
        )
        for key in session.query(sql, some, doing="looking for texts without a vector"):
            missing[places[tuple(key)]] = RowRejected("HANA's model gave no vector for its text")
    if missing:
        raise RowsRejected(f"HANA's model gave no vector for {len(missing)} texts", rows=missing)


def _not_embeddable(
    session: Session, found: Collection, texts: Sequence[str], model: DatabaseModel
) -> dict[int, RowRejected]:
    """Embed each text alone, without storing it, and return HANA's errors by position. Raises HANA's error if it does
    not embed a plain word either, and ModelMismatch if that word's vector does not fit the collection."""
    sql, (_, *named) = probe(model)
    dimension = embed_plain_word(session.query, model)
    if dimension != found.stamp.dimension:
        raise ModelMismatch(
            f"HANA's model {model.name} now gives vectors of dimension {dimension}, and collection {found.name!r} has "
            f"{found.stamp.dimension}: sync again in a new process, which builds another generation"
        )
    refused: dict[int, RowRejected] = {}
    for place, text in enumerate(texts):
        try:
            session.query(sql, (text, *named), doing="embedding a text in HANA")
        except (RowRejected, StatementFailed) as error:
            refused[place] = RowRejected(str(error), code=error.code)
    return refused


@dataclass(frozen=True, slots=True)
class HanaView:
    """A `View`: vector and keyword search, rows by id, samples."""

    store: HanaStore
    collection: str
    generation: int | None
    row_filter: Filter | None

    def _read(self, where: Filter | None, read: Callable[[Collection, filters.Condition | None], T]) -> T:
        """Call `read` with the active generation. If it fails because another process switched and dropped that
        generation, call it once more with the one active now."""

        def in_generation(found: Collection) -> T:
            if self.generation not in (None, found.number):
                raise changed(self.collection, self.generation, found.number)
            names = self.store._names.get(found.name, found.names)
            condition = filters.narrowed(where, self.row_filter, names)
            try:
                return read(found, condition)
            except (RowRejected, StatementFailed) as error:
                if condition is not None and (isinstance(error, RowRejected) or error.code == 266):
                    raise filters.not_comparable(condition) from None
                raise

        found = self.store._known(self.collection)
        try:
            return in_generation(found)
        except (ConfigurationError, DatabaseError, GenerationChanged):  # no such table, a vector of another dimension
            now = self.store._fresh(self.collection)
            if now.table == found.table:
                raise
        return in_generation(now)

    def search(
        self, vector: NDArray[np.float32], k: int, where: Filter | None = None, *, exact: bool = False
    ) -> list[Hit]:
        """Search in HANA: exact without an HNSW index, approximate with one. Never finds rows without a vector. If many
        rows share the last score, HANA chooses among them."""

        def read(found: Collection, condition: filters.Condition | None) -> list[Hit]:
            query = records.vector_text(records.unit_query(vector, found.stamp.dimension))
            table, only = self.store._table(found.table), compiled(condition)

            def best(count: int) -> Rows:
                sql = table.search(count, only, exact=exact)
                return self.store.pool.read(sql, (query, *only.parameters), doing="searching")

            return _best(best, k)

        return self._read(where, read)

    def keyword(self, text: str, k: int, where: Filter | None = None) -> list[Hit]:
        """Search VEC_TEXT with HANA's text search, or LIKE if HANA rejects it; LIKE also finds parts of words. A word
        counts once per text."""

        def read(found: Collection, condition: filters.Condition | None) -> list[Hit]:
            if k < 1:
                return []
            table, only = self.store._table(found.table), compiled(condition)
            within = compiled(condition.within if isinstance(condition, filters.Guarded) else None)
            full_text = self.store._searches_texts(table)
            weighed = keywords.weigh(self.store.pool, table, text, full_text, within)
            if weighed is None:
                return []

            def best(count: int) -> Rows:
                return self.store.pool.read(
                    *keywords.statement(table, full_text, weighed, count, only), doing="searching by words"
                )

            return _best(best, k)

        return self._read(where, read)

    def keyed(self, number: str, count: int, where: Filter | None = None) -> list[Hit]:
        def read(found: Collection, condition: filters.Condition | None) -> list[Hit]:
            only, whole = compiled(condition), as_key_value(number)
            first = " OR ".join(['"SRC_KEY" LIKE ?'] * len(whole))
            place = f'CASE WHEN {first} THEN 0 ELSE 1 END AS "PLACE"'
            rest = f'WHERE "SRC_KEY" LIKE ? AND "CHUNK_NO" = 0{only.and_also} ORDER BY "PLACE", "SRC_KEY"'
            sql = self.store._table(found.table).top(count, place, only, rest)
            parameters = [*(f"%{each}%" for each in (*whole, number)), *only.parameters]
            rows = self.store.pool.read(sql, parameters, doing="looking for a number in keys")
            return [as_hit((*row[:5], 0.0)) for row in rows]

        return self._read(where, read)

    def texts(self, ids: Sequence[str]) -> list[StoredText]:
        documents, foreign = records.asked_ids(ids)

        def read(found: Collection, condition: filters.Condition | None) -> list[StoredText]:
            only, texts = compiled(condition), list[StoredText]()
            table = self.store._table(found.table)
            for column, ours, asked in (("SRC_KEY", "", documents), ("ID", ' AND "SRC_KEY" IS NULL', foreign)):
                for some in portions(asked):
                    sql = (
                        'SELECT "ID", "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META" '
                        f"FROM {table.sql} "
                        f'WHERE "{column}" IN ({", ".join("?" * len(some))}){ours}{only.and_also}'
                    )
                    texts += map(as_text, self.store.pool.read(sql, (*some, *only.parameters), doing="reading rows"))
            return records.in_order_of(ids, texts)

        return self._read(None, read)

    def vectors(self, chunks: Sequence[Hit | StoredText]) -> Vectors:
        ids = [chunk.record for chunk in chunks]

        def read(found: Collection, _: filters.Condition | None) -> Vectors:
            gathered, stored = np.zeros((len(ids), found.stamp.dimension), np.float32), dict[int, object]()
            for start in range(0, len(ids), VECTORS_PAGE):
                some = list(dict.fromkeys(ids[start : start + VECTORS_PAGE]))
                places = ", ".join("?" * len(some))
                sql = f'SELECT "ID", "VEC_VECTOR" FROM {self.store._table(found.table).sql} WHERE "ID" IN ({places})'
                stored |= dict(self.store.pool.read(sql, some, doing="reading the vectors of hits"))
            for place, id_ in enumerate(ids):
                vector = records.from_fvecs(stored.get(id_), found.stamp.dimension)
                if vector is not None:
                    gathered[place] = vector
            return gathered

        return self._read(None, read)

    def sample(self, count: int, *, texts: bool = True) -> Sample:
        def read(found: Collection, condition: filters.Condition | None) -> Sample:
            doing, only, text = "reading a sample of rows", compiled(condition), '"VEC_TEXT"' if texts else "''"
            first = '("CHUNK_NO" = 0 OR "SRC_KEY" IS NULL)'  # one record per row
            source = f"FROM {self.store._table(found.table).sql} WHERE {first}{only.and_also}"
            (rows,) = self.store.pool.read(f"SELECT COUNT(*) {source}", only.parameters, doing=doing)[0]
            sql = (
                f'SELECT TOP {count:d} "ID", "SRC_KEY", "CHUNK_NO", {text} AS "VEC_TEXT", "VEC_META" {source} '
                f'ORDER BY MOD(MOD("ID", {SPREAD_MODULUS}) * TO_BIGINT({SPREAD_FACTOR}), {SPREAD_MODULUS}), "ID"'
            )
            chosen = self.store.pool.read(sql, only.parameters, doing=doing)
            return Sample([as_text(row) for row in chosen], max(rows, len(chosen)))

        return self._read(None, read)

    def places(self, count: int, order: Order, after: Place | None = None, where: Filter | None = None) -> list[Place]:
        """Read in HANA. Ids are compared by the bytes of their text, foreign ones come last."""

        def read(found: Collection, condition: filters.Condition | None) -> list[Place]:
            only, rest = compiled(condition), filters.behind(order, after)
            sql = self.store._table(found.table).places(count, order, only, rest)
            rows = self.store.pool.read(sql, (*only.parameters, *rest.parameters), doing="reading a page of rows")
            return [Place(id_, None if order.field is None else value) for id_, value in rows]

        return self._read(where, read)

    def index_use(self, k: int, where: Filter | None = None) -> IndexUse:
        """Ask HANA for the plan of the search."""
        doing, name = "explaining a search", f"OWL_{uuid4().hex}"

        def read(found: Collection, condition: filters.Condition | None) -> IndexUse:
            searched = self.store._table(found.table).search(max(k, 1), compiled(condition))
            plan_of = (
                'SELECT "OPERATOR_NAME", "OPERATOR_DETAILS" FROM EXPLAIN_PLAN_TABLE WHERE "STATEMENT_NAME" = ? '
                'ORDER BY "OPERATOR_ID"'
            )

            def explain(session: Session) -> Rows:
                sql = f"EXPLAIN PLAN SET STATEMENT_NAME = '{name}' FOR {searched}"
                session.execute(sql, doing=doing)
                rows = session.query(plan_of, (name,), doing=doing)
                session.execute('DELETE FROM EXPLAIN_PLAN_TABLE WHERE "STATEMENT_NAME" = ?', (name,), doing=doing)
                return rows

            try:
                plan = self.store.pool.in_transaction(explain, doing=doing)
            except (StatementFailed, PermissionRefused) as error:
                return IndexUse(None, f"HANA does not explain the search (error {error.code})")
            used = IndexUse(False, "no operator of HANA's plan names a vector index")
            for operator, details in plan:
                if "HNSW" in operator.upper() or "VECTOR INDEX" in operator.upper():
                    return IndexUse(True, f"{operator}: {details}" if details else operator)
                if "COSINE_SIMILARITY" in (details or ""):
                    used = IndexUse(False, details)
            return used

        return self._read(where, read)


def _best(read: Callable[[int], Rows], k: int) -> list[Hit]:
    """Return the best `k` documents. `read` returns the given number of best records, and is called with larger numbers
    until these records belong to `k` documents."""
    if k < 1:
        return []
    count, ties = k + min(k, 50), 0
    while True:
        rows = read(count)
        scored = [row for row in rows if row[5] is not None]
        best = records.best_per_document(map(as_hit, scored), k)
        exhausted = len(rows) < count or len(scored) < len(rows)
        full = len(best) == k
        if exhausted or (full and (best[-1].score > scored[-1][5] or ties == _TIE_STEPS)):
            return best
        ties += full
        count *= 4
