"""The store in HANA: REAL_VECTOR columns, searched by HANA, in tables that langchain-hana's HanaDB can read. Rows of
other programs are searched but never changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from connector import failpoints
from connector.errors import ConfigurationError, DatabaseError, PermissionRefused, RowRejected, UnknownTable
from connector.hana import catalog
from connector.hana.connection import HanaFeatures, HanaPool, Rows, Session
from connector.hana.privileges import creating, granted
from connector.model import (
    ChangeSet,
    Checkpoint,
    CollectionStatus,
    Filter,
    Generation,
    Lease,
    QuarantinedRow,
    Recipe,
    StoredChunk,
    StoredRecord,
    generation_name,
    is_generation,
)
from connector.protocols import Embedder
from connector.stores import records
from connector.stores.generations import DROPPED, Collection, droppable, free_number, numbered, resumable, switching
from connector.stores.hana.tables import (
    Collections,
    VectorTable,
    create_state_tables,
    portions,
    renew_lease,
    state_tables,
    table_name,
)
from connector.stores.hana.view import HanaView
from connector.stores.lease import DEFAULT_TIMES, LeaseTimes, held, lost
from connector.stores.records import ModelStamp

STORED_PAGE = 10_000
RECORDS_PAGE = 1_000
INDEX_FROM = 10_000
"""Records from which an HNSW index is created; below, HANA's exact search is fast enough."""
ATTEMPTS_OVERLOADED = 2
"""Attempts to write several documents while HANA is overloaded. Smaller change sets help more than waiting."""
_EXISTS = frozenset({288, 289})
_STORED = '"ID", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH"'
_OF_COLLECTION = """"COLLECTION" = ? OR "COLLECTION" LIKE ? ESCAPE '\\'"""

# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608


class HanaStore:
    """A `VectorStore` in `schema`, reached through `pool`. The caller closes the pool.

    `features`: server capabilities, None: probe them. `index_from`: see INDEX_FROM. `names`: per collection, source
    column to metadata name if they differ, for filters.
    """

    def __init__(
        self,
        pool: HanaPool,
        schema: str,
        *,
        features: HanaFeatures | None = None,
        index_from: int = INDEX_FROM,
        names: Mapping[str, Mapping[str, str]] | None = None,
        lease_times: LeaseTimes = DEFAULT_TIMES,
    ) -> None:
        self._pool = pool
        self._schema = schema
        self._features = features
        self._index_from = index_from
        self._names = names or {}
        self._times = lease_times
        self._state, self._quarantine = state_tables(schema)
        self._collections = Collections(pool, schema, self._names)
        self.generations = HanaGenerations(self)

    def close(self) -> None:
        """Do nothing; the caller closes the pool."""
        self._collections.forget()

    # ---------------------------------------------------------------------------------------------------- opening

    def open(self, collection: str, embedder: Embedder) -> Checkpoint:
        stamp = ModelStamp.of(embedder)
        self._collections.forget()
        found = self._collections.find(collection)
        if found is None:
            if is_generation(collection):
                raise self._collections.unknown(collection)
            self._check_features()
            for name, sql in create_state_tables(self._schema).items():
                if not self._exists(name):
                    self._create([sql])
            found = self._collections.find(collection)
        if found is None:
            with suppress(RowRejected):  # another worker was first
                self._register(collection, 1, collection, stamp, None)
            found = self._collections.known(collection)
        if found.stamp != stamp:
            if is_generation(collection):
                raise found.stamp.mismatch(collection, stamp)
            self._change_model(found, stamp)
            return Checkpoint()
        self._ensure_table(self._collections.table(found), stamp.dimension)
        names = self._names.get(collection)
        if names is not None and dict(names) != dict(found.names):
            sql = f'UPDATE {self._state} SET "META_NAMES" = ? WHERE "COLLECTION" = ?'
            self._pool.execute(sql, (json.dumps(dict(names)), collection))
        return found.checkpoint

    def _check_features(self) -> None:
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

    def _exists(self, table: str) -> bool:
        return bool(self._pool.read(catalog.FIND_TABLE, (self._schema, table), doing="looking for the store's tables"))

    def _create(self, statements: Sequence[str]) -> None:
        """Tolerate that another worker creates the same tables at the same time."""
        for sql in statements:
            try:
                with granted(self._pool, creating(self._schema)):
                    self._pool.execute(sql, doing="creating the store's tables")
            except DatabaseError as error:
                if error.code not in _EXISTS:
                    raise

    def _register(self, name: str, number: int, collection: str, stamp: ModelStamp, spec: str | None) -> None:
        """Create the table, then its state row: a crash leaves an empty table, which the next attempt reuses. Raises
        RowRejected if another worker was first."""
        table = VectorTable(self._schema, table_name(collection, number))
        sql = f'SELECT "COLLECTION" FROM {self._state} WHERE "TABLE_NAME" = ?'
        owners = [row[0] for row in self._pool.read(sql, (table.name,))]
        if set(owners) - {name}:
            raise ConfigurationError(
                f"collections {name!r} and {owners[0]!r} would both be kept in table {table.name}: rename one of them"
            )
        self._ensure_table(table, stamp.dimension)
        names = json.dumps(dict(self._names.get(collection, {})))
        row = (name, table.name, number, stamp.id, stamp.fingerprint, stamp.dimension, names, spec)
        sql = (
            f'INSERT INTO {self._state} ("COLLECTION", "TABLE_NAME", "GENERATION", "MODEL_ID", "FINGERPRINT", '
            '"DIMENSION", "META_NAMES", "SPEC", "CREATED_AT") VALUES (?, ?, ?, ?, ?, ?, ?, ?, CURRENT_UTCTIMESTAMP)'
        )
        self._pool.execute(sql, row, doing=f"registering collection {name!r}")

    def _ensure_table(self, table: VectorTable, dimension: int) -> None:
        """Create the table with vectors of `dimension`, or replace an empty one with other columns."""
        columns = self._pool.read(catalog.FIND_COLUMNS, (self._schema, table.name), doing="looking at a vector table")
        if columns:
            lengths = {row[0]: row[2] for row in columns}
            if lengths.get("VEC_VECTOR") == dimension and "SRC_KEY" in lengths:
                if table.key_index not in self._indexes(table):  # a worker died before creating it
                    with suppress(PermissionRefused):  # another user's table: correct without the index, but slower
                        self._create([table.create_key_index()])
                return
            if self._pool.read(f"SELECT COUNT(*) FROM {table.sql}")[0][0]:
                raise ConfigurationError(
                    f"table {self._schema}.{table.name} exists with another layout and is not empty: it is not ours to "
                    "change. Rename the collection, or drop the table"
                )
            self._pool.execute(table.drop(), doing="replacing an empty vector table")
        self._create([table.create(dimension), table.create_key_index()])

    def _indexes(self, table: VectorTable) -> dict[str, str]:
        """Return index types by name."""
        sql = "SELECT INDEX_NAME, INDEX_TYPE FROM SYS.INDEXES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?"
        return dict(self._pool.read(sql, (self._schema, table.name), doing="looking at a table's indexes"))

    def _change_model(self, found: Collection, stamp: ModelStamp) -> None:
        """Change the model of an empty collection without a lease. Use a new table, because other sessions hold
        statements prepared for the old dimension."""
        exists = self._exists(found.table)
        if exists and self._counts(found)[0]:
            raise found.stamp.mismatch(found.name, stamp)
        epoch = self.take_lease(found.name, "change of model", self._times.ttl)
        if isinstance(epoch, str):
            raise found.stamp.mismatch(found.name, stamp)
        if exists and self._counts(found)[0]:  # another worker wrote before this one got the lease
            self.release_lease(Lease(found.name, "", epoch))
            raise found.stamp.mismatch(found.name, stamp)
        generation = free_number(self.generations.rows(found.name))
        table = VectorTable(self._schema, table_name(found.name, generation))
        self._ensure_table(table, stamp.dimension)
        values = (table.name, generation, stamp.id, stamp.fingerprint, stamp.dimension, found.name, epoch)
        sql = (
            f'UPDATE {self._state} SET "TABLE_NAME" = ?, "GENERATION" = ?, "MODEL_ID" = ?, "FINGERPRINT" = ?, '
            '"DIMENSION" = ?, "CHECKPOINT" = NULL, "LAST_SYNC" = NULL, "LEASE_OWNER" = NULL, "LEASE_UNTIL" = NULL, '
            '"LEASE_EPOCH" = "LEASE_EPOCH" + 1 WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )
        if self._pool.execute(sql, values) and exists:
            self._pool.execute(self._collections.table(found).drop(), doing="dropping an empty vector table")

    # ---------------------------------------------------------------------------------------------------- leases

    def lease(self, collection: str, owner: str, wait: float) -> AbstractContextManager[Lease]:
        return held(self, collection, owner, wait, self._times)

    def take_lease(self, collection: str, owner: str, ttl: float) -> int | str:
        self._collections.recent(collection)

        def take(session: Session) -> int | str:
            sql = (
                f'UPDATE {self._state} SET "LEASE_OWNER" = ?, "LEASE_EPOCH" = "LEASE_EPOCH" + 1, '
                '"LEASE_UNTIL" = ADD_SECONDS(CURRENT_UTCTIMESTAMP, ?) '
                'WHERE "COLLECTION" = ? AND ("LEASE_UNTIL" IS NULL OR "LEASE_UNTIL" < CURRENT_UTCTIMESTAMP)'
            )
            taken = session.execute(sql, (owner[:200], _seconds(ttl), collection), doing="taking a lease")
            sql = f'SELECT "LEASE_OWNER", "LEASE_EPOCH" FROM {self._state} WHERE "COLLECTION" = ?'
            holder, epoch = session.query(sql, (collection,))[0]
            return int(epoch) if taken else str(holder)

        return self._pool.in_transaction(take, doing="taking a lease")

    def renew_lease(self, lease: Lease, ttl: float) -> bool:
        values = (_seconds(ttl), lease.collection, lease.epoch)
        return self._pool.execute(renew_lease(self._schema), values, doing="renewing a lease") == 1

    def release_lease(self, lease: Lease) -> None:
        sql = (
            f'UPDATE {self._state} SET "LEASE_UNTIL" = NULL, "LEASE_OWNER" = NULL, "LEASE_EPOCH" = "LEASE_EPOCH" + 1 '
            'WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )
        self._pool.execute(sql, (lease.collection, lease.epoch), doing="releasing a lease")

    # --------------------------------------------------------------------------------------------------- writing

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        found = self._collections.find(lease.collection)
        if found is None:  # the generation was activated or dropped
            raise lost(lease)
        writer = _Writer(self._collections.table(found), self._quarantine, found, changes)

        def write(session: Session) -> None:
            values = (_seconds(self._times.ttl), lease.collection, lease.epoch)
            if session.execute(renew_lease(self._schema), values, doing="checking the lease") != 1:
                raise lost(lease)
            writer.write(session)
            if changes.checkpoint is not None:
                synced = "" if changes.partial else ', "LAST_SYNC" = CURRENT_UTCTIMESTAMP'
                sql = f'UPDATE {self._state} SET "CHECKPOINT" = ?{synced} WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
                checkpoint = records.checkpoint_text(changes.checkpoint)
                session.execute(sql, (checkpoint, lease.collection, lease.epoch))
                failpoints.reach("mid_checkpoint")

        divisible = len({*changes.deleted, *(chunk.id for chunk in (*changes.chunks, *changes.metadata_only))}) > 1
        self._pool.in_transaction(
            write,
            doing=f"writing to collection {lease.collection!r}",
            overloaded=ATTEMPTS_OVERLOADED if divisible else None,
        )

    def optimise(self, collection: str) -> None:
        """Create the HNSW index if the table is large enough and has none. HANA keeps it current."""
        found = self._collections.known(collection)
        table = self._collections.table(found)
        if any("HNSW" in str(kind).upper() for kind in self._indexes(table).values()):
            return  # before counting, which scans every record
        if self._counts(found)[0] >= self._index_from:
            self._create([table.create_hnsw()])

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

    def quarantine(self, collection: str) -> list[QuarantinedRow]:
        self._collections.recent(collection)
        rows = self._pool.read(_read_quarantine(self._quarantine), (collection,), doing="reading the quarantine")
        return [
            QuarantinedRow(
                id_, stage, reason, attempts, records.in_utc(seen), None if digest is None else bytes(digest)
            )
            for id_, stage, reason, attempts, seen, digest in rows
        ]

    def status(self, collection: str) -> CollectionStatus | None:
        found = self._collections.find(collection)
        if found is None:
            return None
        total, ours, rows = self._counts(found) if self._exists(found.table) else (0, 0, 0)
        quarantined = self._pool.read(_count_quarantine(self._quarantine), (collection,))[0][0]
        return found.status("hana", self._schema, rows=rows, chunks=ours, foreign=total - ours, quarantined=quarantined)

    def _counts(self, found: Collection) -> tuple[int, int, int]:
        """Count records, our records, our documents."""
        total, ours, rows = self._pool.read(
            self._collections.table(found).count(), doing=f"counting collection {found.name!r}"
        )[0]
        return int(total), int(ours), int(rows)


class HanaGenerations:
    """A `Generations` over rows of OWL_STATE; each generation has its own vector table."""

    def __init__(self, store: HanaStore) -> None:
        self._store = store
        self._pool = store._pool
        self._state, self._quarantine = store._state, store._quarantine

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        def count(row: Collection) -> int:
            sql = self._store._collections.table(row).count()
            try:
                return int(self._pool.read(sql, doing=f"counting {row.name!r}")[0][2])
            except UnknownTable:
                return 0

        return [row.generation(collection, count(row) if counted else None) for row in self.rows(collection)]

    def rows(self, collection: str) -> list[Collection]:
        """Return the generations by number; [] if the collection was never opened."""
        sql = (
            f'SELECT {_GENERATION_COLUMNS}, "SPEC", "CREATED_AT", "RETIRED_AT", "HIGHEST" FROM {self._state} '
            f'WHERE {_OF_COLLECTION} ORDER BY "GENERATION"'
        )
        doing = f"looking at the generations of {collection!r}"
        try:
            return list(map(_generation, self._pool.read(sql, _names_of(collection), doing=doing)))
        except UnknownTable:
            return []

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        stamp = ModelStamp.of(embedder)
        while True:
            rows = self.rows(collection)
            found = resumable(collection, rows, stamp, recipe)
            if found is not None:
                if found.state == "retired":
                    sql = f'UPDATE {self._state} SET "RETIRED_AT" = NULL WHERE "COLLECTION" = ?'
                    self._pool.execute(sql, (found.name,), doing=f"building {found.name!r} on")
                return found.name
            number = free_number(rows)
            with suppress(RowRejected):  # another worker has started one: read again
                name = generation_name(collection, number)
                self._store._register(name, number, collection, stamp, records.recipe_text(recipe))

    def record(self, collection: str, number: int, recipe: Recipe) -> None:
        text = records.recipe_text(recipe)
        known = [row.spec for row in self.rows(collection) if row.number == number]
        if known and known[0] != text:  # by number, because a switch may change the name now
            values = (text, number, collection, generation_name(collection, number))
            sql = f'UPDATE {self._state} SET "SPEC" = ? WHERE "GENERATION" = ? AND "COLLECTION" IN (?, ?)'
            self._pool.execute(sql, values, doing=f"recording the recipe of {collection!r}")

    def switch(self, collection: str, number: int) -> None:
        """Switch. A retry after a lost reply finds the switch done."""
        numbered(collection, self.rows(collection), number)

        def work(session: Session) -> None:
            sql = f"SELECT {_GENERATION_COLUMNS} FROM {self._state} WHERE {_OF_COLLECTION} FOR UPDATE"
            found = session.query(sql, _names_of(collection), doing="locking the generations")
            switch = switching(collection, list(map(_generation, found)), number)
            if switch is None:
                return
            target, retiring, epoch = switch

            def rename(row: Collection, name: str, retired: str) -> None:
                sql = (
                    f'UPDATE {self._state} SET "COLLECTION" = ?, "CHECKPOINT" = ?, "LEASE_EPOCH" = ?, '
                    f'"LEASE_OWNER" = NULL, "LEASE_UNTIL" = NULL, "RETIRED_AT" = {retired} WHERE "COLLECTION" = ?'
                )
                values = (name, records.to_compare_whole(row.checkpoint), epoch, row.name)
                session.execute(sql, values, doing="switching generations")
                sql = f'UPDATE {self._quarantine} SET "COLLECTION" = ? WHERE "COLLECTION" = ?'
                session.execute(sql, (name, row.name), doing="moving a quarantine")

            for row in retiring:
                rename(row, generation_name(collection, row.number), "CURRENT_UTCTIMESTAMP")
            failpoints.reach("mid_alias_swap")
            rename(target, collection, "NULL")

        self._pool.in_transaction(work, doing=f"switching {collection!r} to generation {number}")
        self._store._collections.forget()

    def drop(self, collection: str, number: int) -> None:
        """Mark the generation first: after an interruption it can be dropped again, but not resumed or activated."""
        row = droppable(collection, self.rows(collection), number)
        doing = f"dropping {row.name!r}"
        with self._store.lease(row.name, "drop", 0) as lease:
            sql = (
                f'UPDATE {self._state} SET "FINGERPRINT" = ?, "CHECKPOINT" = NULL, "LAST_SYNC" = NULL '
                'WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
            )
            if self._pool.execute(sql, (DROPPED, lease.collection, lease.epoch)) != 1:
                raise lost(lease)
            rows = self.rows(collection)
            marked = next(each for each in rows if each.name == row.name)
            with suppress(UnknownTable):  # an interrupted drop has removed it
                self._pool.execute(self._store._collections.table(marked).drop(), doing=doing)

            def work(session: Session) -> None:
                keep_highest = f'UPDATE {self._state} SET "HIGHEST" = ? WHERE "COLLECTION" = ?'
                session.execute(keep_highest, (free_number(rows) - 1, collection), doing=doing)
                for table in (self._quarantine, self._state):
                    delete = f'DELETE FROM {table} WHERE "COLLECTION" = ?'
                    session.execute(delete, (row.name,), doing=doing)

            self._pool.in_transaction(work, doing=doing)
        self._store._collections.forget()


class _Writer:
    """A change set as rows of parameters, prepared once for every attempt of the transaction."""

    def __init__(self, table: VectorTable, quarantine: str, found: Collection, changes: ChangeSet) -> None:
        self._table, self._quarantine, self._name, self._changes = table, quarantine, found.name, changes
        vectors = records.fvecs(records.checked_vectors(changes, found.stamp.dimension))
        metadata = records.checked_metadata(changes)
        count = len(changes.chunks)
        self._rows = [
            (chunk.text, text, vector, chunk.id, chunk.number, chunk.content_hash, found.stamp.id)
            for chunk, text, vector in zip(changes.chunks, metadata[:count], vectors, strict=True)
        ]
        self._metadata = [
            (text, chunk.content_hash, chunk.id, chunk.number)
            for chunk, text in zip(changes.metadata_only, metadata[count:], strict=True)
        ]
        # Use key order, so that two transactions cannot deadlock.
        ids = {*changes.deleted, *(chunk.id for chunk in changes.chunks)}
        self._deleted = [(id_,) for id_ in sorted(ids)]
        self._quarantined: list[tuple[Any, ...]] | None = None

    def write(self, session: Session) -> None:
        """Write all rows. Raises RowRejected without naming the row (`Session.execute_many`)."""
        table, name, changes = self._table.sql, self._name, self._changes
        sql = f'DELETE FROM {table} WHERE "SRC_KEY" = ?'
        session.execute_many(sql, self._deleted, doing="removing what is replaced")
        failpoints.reach("mid_upsert")
        sql = (
            f'INSERT INTO {table} ("VEC_TEXT", "VEC_META", "VEC_VECTOR", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH", '
            '"MODEL_ID", "SYNCED_AT") VALUES (?, ?, ?, ?, ?, ?, ?, CURRENT_UTCTIMESTAMP)'
        )
        session.execute_many(sql, self._rows, doing="writing vectors")
        sql = (
            f'UPDATE {table} SET "VEC_META" = ?, "CONTENT_HASH" = ?, "SYNCED_AT" = CURRENT_UTCTIMESTAMP '
            'WHERE "SRC_KEY" = ? AND "CHUNK_NO" = ?'
        )
        session.execute_many(sql, self._metadata, doing="replacing metadata")
        released = [(name, id_) for id_ in sorted(changes.released)]
        if released and session.query(_count_quarantine(self._quarantine), (name,))[0][0]:
            sql = f'DELETE FROM {self._quarantine} WHERE "COLLECTION" = ? AND "SRC_KEY" = ?'
            session.execute_many(sql, released, doing="releasing from quarantine")
        if not changes.quarantined:
            return
        if self._quarantined is None:  # count the attempt once, even if the commit is retried
            known = session.query(_read_quarantine(self._quarantine), (name,))
            before = {id_: (attempts, digest) for id_, _, _, attempts, _, digest in known}
            self._quarantined = []
            for row in sorted(changes.quarantined, key=lambda row: row.id):
                tried, digest = before.get(row.id, (0, None))
                if None not in (digest, row.digest) and bytes(digest) != row.digest:
                    tried = 0  # a changed row starts from zero
                values = (name, row.id, row.stage[:100], row.reason[:2000], row.attempts + tried, row.digest)
                self._quarantined.append(values)
        sql = (
            f'UPSERT {self._quarantine} ("COLLECTION", "SRC_KEY", "STAGE", "REASON", "ATTEMPTS", "ROW_DIGEST", '
            '"LAST_SEEN") VALUES (?, ?, ?, ?, ?, ?, CURRENT_UTCTIMESTAMP) WITH PRIMARY KEY'
        )
        session.execute_many(sql, self._quarantined, doing="writing the quarantine")


def _read_quarantine(table: str) -> str:
    return (
        f'SELECT "SRC_KEY", "STAGE", "REASON", "ATTEMPTS", "LAST_SEEN", "ROW_DIGEST" FROM {table} '
        'WHERE "COLLECTION" = ? ORDER BY "SRC_KEY"'
    )


def _count_quarantine(table: str) -> str:
    return f'SELECT COUNT(*) FROM {table} WHERE "COLLECTION" = ?'


def _seconds(ttl: float) -> int:
    return max(1, round(ttl))


def _stored(row: Sequence[Any]) -> StoredChunk:
    id_, key, number, digest = row
    return StoredChunk(id_, key, -1 if number is None else number, bytes(digest or b""))


def _names_of(collection: str) -> tuple[str, str]:
    """Return the name, and a LIKE pattern for the names of its other generations; escapes the wildcard `_`."""
    escaped = collection.replace("\\", "\\\\").replace("_", "\\_").replace("%", "\\%")
    return collection, generation_name(escaped, 0)[:-1] + "%"


_GENERATION_COLUMNS = (
    '"COLLECTION", "TABLE_NAME", "GENERATION", "MODEL_ID", "FINGERPRINT", "DIMENSION", "CHECKPOINT", "LAST_SYNC", '
    '"LEASE_EPOCH"'
)


def _generation(row: Sequence[Any]) -> Collection:
    """Parse a row. Later columns may be absent, as in rows read for a lock."""
    name, table, number, model, fingerprint, dimension, text, last_sync, epoch, *later = row
    spec, created, retired, highest = later or (None, None, None, None)
    created, retired = records.in_utc(created), records.in_utc(retired)
    stamp, checkpoint = (
        ModelStamp(model, fingerprint, dimension),
        records.checkpoint_of(text, records.in_utc(last_sync)),
    )
    return Collection(name, table, number, stamp, checkpoint, {}, epoch, spec, created, retired, highest)
