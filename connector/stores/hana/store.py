"""The store in HANA: REAL_VECTOR columns, searched by HANA, in tables that langchain-hana's HanaDB can read. Rows of
other programs are searched but never changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from connector import failpoints
from connector.errors import (
    ConfigurationError,
    DatabaseError,
    PermissionRefused,
    RowRejected,
    UnknownTable,
)
from connector.hana import catalog
from connector.hana.connection import HanaFeatures, HanaPool, Rows, Session
from connector.hana.privileges import creating, granted
from connector.model import (
    ChangeSet,
    Checkpoint,
    Chunk,
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
from connector.stores.generations import DROPPED, GenerationRow, Switch, droppable, free_number, numbered, resumable
from connector.stores.hana import tables as hana_tables
from connector.stores.hana.keywords import Keywords
from connector.stores.hana.state import Collection, Collections
from connector.stores.hana.tables import StateSql, VectorSql, portions, table_name
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
        self._sql = StateSql(schema)
        self._collections = Collections(pool, schema, self._names)
        self._words = Keywords(pool)
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
            for name, sql in self._sql.create().items():
                if not self._exists(name):
                    self._create([sql])
            found = self._collections.find(collection) or self._add(collection, stamp)
        if found.stamp != stamp:
            if is_generation(collection):
                raise found.stamp.mismatch(collection, stamp)
            self._change_model(found, stamp)
            return Checkpoint()
        self._ensure_table(found.table, stamp.dimension)
        names = self._names.get(collection)
        if names is not None and dict(names) != dict(found.names):
            self._pool.execute(self._sql.change_names(), (json.dumps(dict(names)), collection))
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

    def _add(self, collection: str, stamp: ModelStamp) -> Collection:
        with suppress(RowRejected):  # another worker was first
            self._register(collection, 1, collection, stamp, None)
        return self._collections.known(collection)

    def _register(self, name: str, number: int, collection: str, stamp: ModelStamp, spec: str | None) -> None:
        """Create the table, then its state row: a crash leaves an empty table, which the next attempt reuses. Raises
        RowRejected if another worker was first."""
        table = VectorSql(self._schema, table_name(collection, number))
        owners = [row[0] for row in self._pool.read(self._sql.find_by_table(), (table.name,))]
        if set(owners) - {name}:
            raise ConfigurationError(
                f"collections {name!r} and {owners[0]!r} would both be kept in table {table.name}: rename one of them"
            )
        self._ensure_table(table, stamp.dimension)
        names = json.dumps(dict(self._names.get(collection, {})))
        row = (name, table.name, number, stamp.id, stamp.fingerprint, stamp.dimension, names, spec)
        self._pool.execute(self._sql.insert(), row, doing=f"registering collection {name!r}")

    def _ensure_table(self, table: VectorSql, dimension: int) -> None:
        """Create the table with vectors of `dimension`, or replace an empty one with other columns."""
        columns = self._pool.read(catalog.FIND_COLUMNS, (self._schema, table.name), doing="looking at a vector table")
        if columns:
            lengths = {row[0]: row[2] for row in columns}
            if lengths.get("VEC_VECTOR") == dimension and "SRC_KEY" in lengths:
                if table.key_index not in self._indexes(table):  # a worker died before creating it
                    with suppress(PermissionRefused):  # another user's table: correct without the index, but slower
                        self._create([table.create_key_index()])
                return
            if self._pool.read(f"SELECT COUNT(*) FROM {table.table}")[0][0]:  # noqa: S608 - quoted
                raise ConfigurationError(
                    f"table {self._schema}.{table.name} exists with another layout and is not empty: it is not ours to "
                    "change. Rename the collection, or drop the table"
                )
            self._pool.execute(table.drop(), doing="replacing an empty vector table")
        self._create([table.create(dimension), table.create_key_index()])

    def _indexes(self, table: VectorSql) -> dict[str, str]:
        """Return index types by name."""
        place = (self._schema, table.name)
        return dict(self._pool.read(hana_tables.FIND_INDEXES, place, doing="looking at a table's indexes"))

    def _change_model(self, found: Collection, stamp: ModelStamp) -> None:
        """Change the model of an empty collection without a lease. Use a new table, because other sessions hold
        statements prepared for the old dimension."""
        exists = self._exists(found.table.name)
        if exists and self._counts(found)[0]:
            raise found.stamp.mismatch(found.name, stamp)
        epoch = self.take_lease(found.name, "change of model", self._times.ttl)
        if isinstance(epoch, str):
            raise found.stamp.mismatch(found.name, stamp)
        if exists and self._counts(found)[0]:  # another worker wrote before this one got the lease
            self.release_lease(Lease(found.name, "", epoch))
            raise found.stamp.mismatch(found.name, stamp)
        generation = free_number(self.generations.rows(found.name))
        table = VectorSql(self._schema, table_name(found.name, generation))
        self._ensure_table(table, stamp.dimension)
        values = (table.name, generation, stamp.id, stamp.fingerprint, stamp.dimension, found.name, epoch)
        if self._pool.execute(self._sql.change_model(), values) and exists:
            self._pool.execute(found.table.drop(), doing="dropping an empty vector table")

    # ---------------------------------------------------------------------------------------------------- leases

    def lease(self, collection: str, owner: str, wait: float) -> AbstractContextManager[Lease]:
        return held(self, collection, owner, wait, self._times)

    def take_lease(self, collection: str, owner: str, ttl: float) -> int | str:
        self._collections.recent(collection)

        def take(session: Session) -> int | str:
            values = (owner[:200], _seconds(ttl), collection)
            taken = session.execute(self._sql.take_lease(), values, doing="taking a lease")
            holder, epoch = session.query(self._sql.read_lease(), (collection,))[0]
            return int(epoch) if taken else str(holder)

        return self._pool.in_transaction(take, doing="taking a lease")

    def renew_lease(self, lease: Lease, ttl: float) -> bool:
        values = (_seconds(ttl), lease.collection, lease.epoch)
        return self._pool.execute(self._sql.renew_lease(), values, doing="renewing a lease") == 1

    def release_lease(self, lease: Lease) -> None:
        self._pool.execute(self._sql.release_lease(), (lease.collection, lease.epoch), doing="releasing a lease")

    # --------------------------------------------------------------------------------------------------- writing

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        found = self._collections.find(lease.collection)
        if found is None:  # the generation was activated or dropped
            raise lost(lease)
        writer = _Writer(self._sql, found, changes)

        def write(session: Session) -> None:
            values = (_seconds(self._times.ttl), lease.collection, lease.epoch)
            if session.execute(self._sql.renew_lease(), values, doing="checking the lease") != 1:
                raise lost(lease)
            writer.write(session)
            if changes.checkpoint is not None:
                checkpoint = records.checkpoint_text(changes.checkpoint)
                sql = self._sql.set_mark() if changes.partial else self._sql.set_checkpoint()
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
        if any("HNSW" in str(kind).upper() for kind in self._indexes(found.table).values()):
            return  # before counting, which scans every record
        if self._counts(found)[0] >= self._index_from:
            self._create([found.table.create_hnsw()])

    # --------------------------------------------------------------------------------------------------- reading

    def view(self, collection: str, generation: int | None = None, row_filter: Filter | None = None) -> HanaView:
        return HanaView(self._collections, self._words, collection, generation, row_filter)

    def stored(self, collection: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        if ids is None:
            for rows in self._pages(collection, VectorSql.stored, STORED_PAGE):
                yield [_stored(row) for row in rows]
            return
        table = self._collections.known(collection).table
        for some in portions(ids):
            rows = self._pool.read(table.stored_of(len(some)), some, doing=f"reading collection {collection!r}")
            yield [_stored(row) for row in rows]

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
        dimension = self._collections.known(collection).stamp.dimension
        for rows in self._pages(collection, VectorSql.records, RECORDS_PAGE):
            yield [_record(row, dimension) for row in rows]

    def _pages(self, collection: str, statement: Any, size: int) -> Iterator[Rows]:
        sql = statement(self._collections.known(collection).table)
        after = -1
        while rows := self._pool.read(sql, (after, size), doing=f"reading collection {collection!r}"):
            yield rows
            after = rows[-1][0]

    def quarantine(self, collection: str) -> list[QuarantinedRow]:
        self._collections.recent(collection)
        rows = self._pool.read(self._sql.read_quarantine(), (collection,), doing="reading the quarantine")
        return [_quarantined(row) for row in rows]

    def status(self, collection: str) -> CollectionStatus | None:
        found = self._collections.find(collection)
        if found is None:
            return None
        total, ours, rows = self._counts(found) if self._exists(found.table.name) else (0, 0, 0)
        return CollectionStatus(
            collection=collection,
            store="hana",
            schema=self._schema,
            table=found.table.name,
            generation=found.generation,
            model=found.stamp.id,
            dimension=found.stamp.dimension,
            rows=rows,
            chunks=ours,
            foreign=total - ours,
            empty=found.checkpoint.empty,
            quarantined=self._pool.read(self._sql.count_quarantine(), (collection,))[0][0],
            last_sync=found.checkpoint.last_sync,
            key=found.checkpoint.key,
            checkpoint=found.checkpoint,
        )

    def _counts(self, found: Collection) -> tuple[int, int, int]:
        """Count records, our records, our documents."""
        total, ours, rows = self._pool.read(found.table.count(), doing=f"counting collection {found.name!r}")[0]
        return int(total), int(ours), int(rows)


class HanaGenerations:
    """A `Generations` over rows of OWL_STATE; each generation has its own vector table."""

    def __init__(self, store: HanaStore) -> None:
        self._store = store
        self._pool = store._pool
        self._sql = store._sql

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        def count(row: GenerationRow) -> int:
            sql = VectorSql(self._sql.schema, row.table).count()
            try:
                return int(self._pool.read(sql, doing=f"counting {row.name!r}")[0][2])
            except UnknownTable:
                return 0

        return [row.generation(collection, count(row) if counted else None) for row in self.rows(collection)]

    def rows(self, collection: str) -> list[GenerationRow]:
        """Return the generations by number; [] if the collection was never opened."""
        doing = f"looking at the generations of {collection!r}"
        try:
            return list(map(_generation, self._pool.read(self._sql.find_all(), _names_of(collection), doing=doing)))
        except UnknownTable:
            return []

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        stamp = ModelStamp.of(embedder)
        while True:
            rows = self.rows(collection)
            found = resumable(collection, rows, stamp, recipe)
            if found is not None:
                if found.state == "retired":
                    self._pool.execute(self._sql.revive(), (found.name,), doing=f"building {found.name!r} on")
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
            self._pool.execute(self._sql.record_spec(), values, doing=f"recording the recipe of {collection!r}")

    def switch(self, collection: str, number: int) -> None:
        """Switch. A retry after a lost reply finds the switch done."""
        numbered(collection, self.rows(collection), number)

        def work(session: Session) -> None:
            found = session.query(self._sql.lock_all(), _names_of(collection), doing="locking the generations")
            switch = Switch.to(collection, list(map(_generation, found)), number)
            if switch is None:
                return

            def rename(sql: str, row: GenerationRow, name: str) -> None:
                values = (name, records.to_compare_whole(row.checkpoint), switch.epoch, row.name)
                session.execute(sql, values, doing="switching generations")
                session.execute(self._sql.move_quarantine(), (name, row.name), doing="moving a quarantine")

            for row in switch.retiring:
                rename(self._sql.rename("CURRENT_UTCTIMESTAMP"), row, generation_name(collection, row.number))
            failpoints.reach("mid_alias_swap")
            rename(self._sql.rename("NULL"), switch.target, collection)

        self._pool.in_transaction(work, doing=f"switching {collection!r} to generation {number}")
        self._store._collections.forget()

    def drop(self, collection: str, number: int) -> None:
        """Mark the generation first: after an interruption it can be dropped again, but not resumed or activated."""
        row = droppable(collection, self.rows(collection), number)
        doing = f"dropping {row.name!r}"
        with self._store.lease(row.name, "drop", 0) as lease:
            if self._pool.execute(self._sql.mark_dropped(), (DROPPED, lease.collection, lease.epoch)) != 1:
                raise lost(lease)
            rows = self.rows(collection)
            table = next(each.table for each in rows if each.name == row.name)
            with suppress(UnknownTable):  # an interrupted drop has removed it
                self._pool.execute(VectorSql(self._sql.schema, table).drop(), doing=doing)

            def work(session: Session) -> None:
                session.execute(self._sql.keep_highest(), (free_number(rows) - 1, collection), doing=doing)
                session.execute(self._sql.drop_quarantine(), (row.name,), doing=doing)
                session.execute(self._sql.delete(), (row.name,), doing=doing)

            self._pool.in_transaction(work, doing=doing)
        self._store._collections.forget()


class _Writer:
    """A change set as rows of parameters, prepared once for every attempt of the transaction."""

    def __init__(self, sql: StateSql, found: Collection, changes: ChangeSet) -> None:
        self._sql = sql
        self._found = found
        self._changes = changes
        vectors = records.fvecs(records.checked_vectors(changes, found.stamp.dimension))
        metadata = records.checked_metadata(changes)
        count = len(changes.chunks)
        self._rows = [self._row(*row) for row in zip(changes.chunks, metadata[:count], vectors, strict=True)]
        self._metadata = [
            (text, chunk.content_hash, chunk.id, chunk.number)
            for chunk, text in zip(changes.metadata_only, metadata[count:], strict=True)
        ]
        # Use key order, so that two transactions cannot deadlock.
        ids = {*changes.deleted, *(chunk.id for chunk in changes.chunks)}
        self._deleted = [(id_,) for id_ in sorted(ids)]
        self._quarantined: list[tuple[Any, ...]] | None = None

    def _row(self, chunk: Chunk, metadata: str, vector: bytes) -> tuple[Any, ...]:
        return (chunk.text, metadata, vector, chunk.id, chunk.number, chunk.content_hash, self._found.stamp.id)

    def write(self, session: Session) -> None:
        """Write all rows. Raises RowRejected without naming the row (`Session.execute_many`)."""
        table = self._found.table
        session.execute_many(table.delete(), self._deleted, doing="removing what is replaced")
        failpoints.reach("mid_upsert")
        session.execute_many(table.insert(), self._rows, doing="writing vectors")
        session.execute_many(table.update_metadata(), self._metadata, doing="replacing metadata")
        self._write_quarantine(session)

    def _write_quarantine(self, session: Session) -> None:
        name, changes = self._found.name, self._changes
        released = [(name, id_) for id_ in sorted(changes.released)]
        if released and session.query(self._sql.count_quarantine(), (name,))[0][0]:
            session.execute_many(self._sql.release_quarantine(), released, doing="releasing from quarantine")
        if not changes.quarantined:
            return
        if self._quarantined is None:  # count the attempt once, even if the commit is retried
            known = session.query(self._sql.read_quarantine(), (name,))
            before = {id_: (attempts, digest) for id_, _, _, attempts, _, digest in known}
            self._quarantined = []
            for row in sorted(changes.quarantined, key=lambda row: row.id):
                tried, digest = before.get(row.id, (0, None))
                if None not in (digest, row.digest) and bytes(digest) != row.digest:
                    tried = 0  # a changed row starts from zero
                values = (name, row.id, row.stage[:100], row.reason[:2000], row.attempts + tried, row.digest)
                self._quarantined.append(values)
        session.execute_many(self._sql.put_quarantine(), self._quarantined, doing="writing the quarantine")


def _seconds(ttl: float) -> int:
    return max(1, round(ttl))


def _stored(row: Sequence[Any]) -> StoredChunk:
    id_, key, number, digest = row
    return StoredChunk(id_, key, -1 if number is None else number, bytes(digest or b""))


def _quarantined(row: Sequence[Any]) -> QuarantinedRow:
    id_, stage, reason, attempts, seen, digest = row
    return QuarantinedRow(id_, stage, reason, attempts, records.in_utc(seen), None if digest is None else bytes(digest))


def _record(row: Sequence[Any], dimension: int) -> StoredRecord:
    id_, key, number, digest, model, text, meta, vector = row
    return StoredRecord(
        record=id_,
        id=key,
        number=number,
        content_hash=None if digest is None else bytes(digest),
        model=model,
        text=text,
        metadata=records.metadata_of(meta),
        vector=records.from_fvecs(vector, dimension),
    )


def _names_of(collection: str) -> tuple[str, str]:
    """Return the name, and a LIKE pattern for the names of its other generations; escapes the wildcard `_`."""
    escaped = collection.replace("\\", "\\\\").replace("_", "\\_").replace("%", "\\%")
    return collection, generation_name(escaped, 0)[:-1] + "%"


def _generation(row: Sequence[Any]) -> GenerationRow:
    """Parse a row. Later columns may be absent, as in rows read for a lock."""
    name, table, number, model, fingerprint, dimension, checkpoint, last_sync, epoch, *later = row
    spec, created, retired, highest = later or (None, None, None, None)
    stamp, times = ModelStamp(model, fingerprint, dimension), map(records.in_utc, (last_sync, created, retired))
    synced, began, ended = times
    return GenerationRow(name, table, number, stamp, checkpoint, synced, epoch, spec, began, ended, highest)
