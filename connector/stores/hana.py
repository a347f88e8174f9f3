"""The store in HANA itself: REAL_VECTOR columns, searched by HANA, in tables that langchain-hana's HanaDB reads too.
Rows that others wrote there are searched and never touched. Knows the pool, not the driver; not the engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector import catalog, failpoints
from connector.errors import (
    ConfigurationError,
    DatabaseError,
    PermissionRefused,
    RowRejected,
    StatementFailed,
    UnknownCollection,
    UnknownColumn,
    UnknownTable,
)
from connector.hana import HanaFeatures, HanaPool, Rows, Session
from connector.model import (
    ChangeSet,
    Checkpoint,
    CollectionStatus,
    Embedder,
    Filter,
    Hit,
    Lease,
    QuarantinedRow,
    StoredChunk,
    StoredRecord,
    Vectors,
)
from connector.stores import filter_sql, filters, hana_keywords, hana_tables, records
from connector.stores.hana_tables import StateSql, VectorSql, table_name
from connector.stores.hana_writer import HanaWriter, Place
from connector.stores.lease import DEFAULT_TIMES, LeaseTimes, held, lost
from connector.stores.records import ModelStamp

STORED_PAGE = 10_000
LOOKUP_SIZES = (1, 8, 64, 512)
"""Ids per look-up statement: few sizes, so few statement texts in HANA's plan cache."""
RECORDS_PAGE = 1_000
VECTORS_PAGE = 500
INDEX_FROM = 10_000
"""Records above which an HNSW index is made; below it HANA's exact search is fast enough, and exact."""
REMEMBERED = 2.0
"""Seconds for which a search trusts what it knows of a collection before it reads the state table again."""
ATTEMPTS_OVERLOADED = 2
"""At writing much at once while HANA is overloaded: who writes can do with less, which helps more than patience."""
_EXISTS = frozenset({288, 289})
_INCONSISTENT = 266
_TIE_STEPS = 3
"""How often a result is enlarged only because more rows share the last score."""


@dataclass(frozen=True, slots=True)
class _Collection:
    """A row of OWL_STATE."""

    name: str
    table: VectorSql
    generation: int
    stamp: ModelStamp
    names: Mapping[str, str]
    checkpoint: Checkpoint


class HanaStore:
    """A `VectorStore` in `schema` of the HANA behind `pool`, which stays the caller's to close.

    `features`: what the server can do, asked of it when not given. `index_from`: see INDEX_FROM. `names`: per
    collection, source column to metadata name where they differ, for filters.
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
        self._full_text: bool | None = None
        self._upgraded = False
        self._remembered: dict[str, tuple[float, _Collection]] = {}

    def close(self) -> None:
        """Nothing of its own is open."""
        self._remembered.clear()

    # ---------------------------------------------------------------------------------------------------- opening

    def open(self, collection: str, embedder: Embedder) -> Checkpoint:
        stamp = ModelStamp.of(embedder)
        self._remembered.pop(collection, None)
        found = self._find(collection)
        if found is None:
            self._check_features()
            self._create_state()
            found = self._find(collection) or self._add(collection, stamp)
        self._upgrade_quarantine()
        if found.stamp != stamp:
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

    def _create_state(self) -> None:
        for name, sql in self._sql.create().items():
            if not self._exists(name):
                self._create([sql])

    def _upgrade_quarantine(self) -> None:
        """The table that an earlier version made gets the column that came later."""
        if not self._upgraded:
            doing = "looking at the quarantine's table"
            columns = self._pool.read(catalog.FIND_COLUMNS, (self._schema, hana_tables.QUARANTINE), doing=doing)
            if columns and "ROW_DIGEST" not in {row[0] for row in columns}:
                with suppress(StatementFailed):  # another worker was first; if not, the next write says what is wrong
                    self._pool.execute(self._sql.add_row_digest(), doing="adding a column to the quarantine's table")
        self._upgraded = True

    def _exists(self, table: str) -> bool:
        return bool(self._pool.read(catalog.FIND_TABLE, (self._schema, table), doing="looking for the store's tables"))

    def _create(self, statements: Sequence[str]) -> None:
        """What another worker creates at the same moment is as good."""
        for sql in statements:
            try:
                self._pool.execute(sql, doing="creating the store's tables")
            except DatabaseError as error:
                if error.code not in _EXISTS:
                    raise

    def _add(self, collection: str, stamp: ModelStamp) -> _Collection:
        table = VectorSql(self._schema, table_name(collection, 1))
        owners = [row[0] for row in self._pool.read(self._sql.find_by_table(), (table.name,))]
        if set(owners) - {collection}:  # not ourselves: another worker may just have registered the same collection
            raise ConfigurationError(
                f"collections {collection!r} and {owners[0]!r} would both be kept in table {table.name}: "
                "rename one of them"
            )
        self._ensure_table(table, stamp.dimension)
        names = json.dumps(dict(self._names.get(collection, {})))
        row = (collection, table.name, 1, stamp.id, stamp.fingerprint, stamp.dimension, names)
        with suppress(RowRejected):  # another worker was first
            self._pool.execute(self._sql.insert(), row, doing=f"registering collection {collection!r}")
        return self._known(collection)

    def _ensure_table(self, table: VectorSql, dimension: int) -> None:
        """The table with vectors of `dimension`: created, or made anew when it is empty and of another shape."""
        columns = self._pool.read(catalog.FIND_COLUMNS, (self._schema, table.name), doing="looking at a vector table")
        if columns:
            lengths = {row[0]: row[2] for row in columns}
            if lengths.get("VEC_VECTOR") == dimension and "SRC_KEY" in lengths:
                if table.key_index not in self._indexes(table):  # a worker died before it had made it
                    with suppress(PermissionRefused):  # another user's table: slower without, but right
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
        """Name to type."""
        place = (self._schema, table.name)
        return dict(self._pool.read(hana_tables.FIND_INDEXES, place, doing="looking at a table's indexes"))

    def _change_model(self, found: _Collection, stamp: ModelStamp) -> None:
        """Only for a collection that holds nothing and that nobody is writing to. It gets another table, because other
        sessions hold statements prepared for vectors of the old dimension."""
        exists = self._exists(found.table.name)
        if exists and self._counts(found)[0]:
            raise found.stamp.mismatch(found.name, stamp)
        epoch = self.take_lease(found.name, "change of model", self._times.ttl)
        if isinstance(epoch, str):
            raise found.stamp.mismatch(found.name, stamp)
        if exists and self._counts(found)[0]:  # somebody wrote before we had the lease
            self.release_lease(Lease(found.name, "", epoch))
            raise found.stamp.mismatch(found.name, stamp)
        generation = found.generation + 1
        table = VectorSql(self._schema, table_name(found.name, generation))
        self._ensure_table(table, stamp.dimension)
        values = (table.name, generation, stamp.id, stamp.fingerprint, stamp.dimension, found.name, epoch)
        if self._pool.execute(self._sql.change_model(), values) and exists:
            self._pool.execute(found.table.drop(), doing="dropping an empty vector table")

    def _find(self, collection: str) -> _Collection | None:
        try:
            rows = self._pool.read(self._sql.find(), (collection,), doing=f"opening collection {collection!r}")
        except UnknownTable:
            return None
        if not rows:
            return None
        table, generation, model, fingerprint, dimension, names, checkpoint, last_sync = rows[0]
        return _Collection(
            collection,
            VectorSql(self._schema, table),
            generation,
            ModelStamp(model, fingerprint, dimension),
            json.loads(names or "{}"),
            records.checkpoint_of(checkpoint, records.in_utc(last_sync)),
        )

    def _known(self, collection: str) -> _Collection:
        found = self._find(collection)
        if found is None:
            raise UnknownCollection(f"schema {self._schema} has no collection {collection!r}; `sync` creates it")
        self._remembered[collection] = (time.monotonic(), found)
        return found

    def _recent(self, collection: str) -> _Collection:
        at, found = self._remembered.get(collection, (-REMEMBERED, None))
        return found if found is not None and time.monotonic() - at < REMEMBERED else self._known(collection)

    # ---------------------------------------------------------------------------------------------------- leases

    def lease(self, collection: str, owner: str, wait: float) -> AbstractContextManager[Lease]:
        return held(self, collection, owner, wait, self._times)

    def take_lease(self, collection: str, owner: str, ttl: float) -> int | str:
        self._recent(collection)

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
        found = self._known(lease.collection)
        writer = HanaWriter(self._sql, Place(found.name, found.table, found.stamp), changes)

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
        """Make the HNSW index once the table is large enough and has none, whoever made it. HANA keeps it current."""
        found = self._known(collection)
        if self._counts(found)[0] < self._index_from:
            return
        if not any("HNSW" in str(kind).upper() for kind in self._indexes(found.table).values()):
            self._create([found.table.create_hnsw()])

    # --------------------------------------------------------------------------------------------------- reading

    def stored(self, collection: str) -> Iterator[list[StoredChunk]]:
        for rows in self._pages(collection, VectorSql.stored, STORED_PAGE):
            yield [_stored(row) for row in rows]

    def stored_of(self, collection: str, ids: Sequence[str]) -> list[StoredChunk]:
        table = self._known(collection).table
        found: list[StoredChunk] = []
        start = 0
        while start < len(ids):
            size = next((n for n in LOOKUP_SIZES if n >= len(ids) - start), LOOKUP_SIZES[-1])
            some = [*ids[start : start + size]]
            some += [some[-1]] * (size - len(some))
            rows = self._pool.read(table.stored_of(size), some, doing=f"reading collection {collection!r}")
            found += [_stored(row) for row in rows]
            start += size
        return found

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
        dimension = self._known(collection).stamp.dimension
        for rows in self._pages(collection, VectorSql.records, RECORDS_PAGE):
            yield [_record(row, dimension) for row in rows]

    def _pages(self, collection: str, statement: Any, size: int) -> Iterator[Rows]:
        sql = statement(self._known(collection).table)
        after = -1
        while rows := self._pool.read(sql, (after, size), doing=f"reading collection {collection!r}"):
            yield rows
            after = rows[-1][0]

    def quarantine(self, collection: str) -> list[QuarantinedRow]:
        self._recent(collection)
        doing = "reading the quarantine"
        try:
            rows = self._pool.read(self._sql.read_quarantine(), (collection,), doing=doing)
        except UnknownColumn:
            rows = self._pool.read(self._sql.read_early_quarantine(), (collection,), doing=doing)
        return [_quarantined(row) for row in rows]

    def status(self, collection: str) -> CollectionStatus | None:
        found = self._find(collection)
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

    def _counts(self, found: _Collection) -> tuple[int, int, int]:
        """Records, records of ours, documents of ours."""
        total, ours, rows = self._pool.read(found.table.count(), doing=f"counting collection {found.name!r}")[0]
        return int(total), int(ours), int(rows)

    # -------------------------------------------------------------------------------------------------- searching

    def search(self, collection: str, vector: NDArray[np.float32], k: int, where: Filter | None) -> list[Hit]:
        """By HANA: exact below the size that gets an HNSW index, approximate above it. Rows without a vector are never
        found. Of rows with equal scores at the end of a long run of them, HANA chooses."""
        found = self._recent(collection)
        condition = filters.parse(where, self._names.get(collection, found.names))
        query = records.vector_text(records.unit_query(vector, found.stamp.dimension))
        compiled = _compiled(condition)

        def read(count: int) -> Rows:
            sql = found.table.search(count, compiled.sql, compiled.projection)
            return self._pool.read(sql, (query, *compiled.parameters), doing="searching")

        with _filter_errors(condition):
            return _best(read, k)

    def keyword(self, collection: str, text: str, k: int, where: Filter | None) -> list[Hit]:
        """By HANA's text search in VEC_TEXT; a word counts once a text, however often it stands there. Where HANA
        refuses text search on this column, by LIKE, which also finds words inside of words."""
        found = self._recent(collection)
        condition = filters.parse(where, self._names.get(collection, found.names))
        if k < 1:
            return []
        if self._full_text is None:
            self._full_text = hana_keywords.supports(self._pool, found.table)
        query = hana_keywords.prepare(self._pool, found.table, text, self._full_text)
        if query is None:
            return []
        compiled = _compiled(condition)

        def read(count: int) -> Rows:
            sql, parameters = query.statement(count, compiled)
            return self._pool.read(sql, parameters, doing="searching by words")

        with _filter_errors(condition):
            return _best(read, k)

    def vectors(self, collection: str, hits: Sequence[Hit]) -> Vectors:
        found, ids = self._recent(collection), [hit.record for hit in hits]
        dimension = found.stamp.dimension
        stored: dict[int, NDArray[np.float32] | None] = {}
        for start in range(0, len(ids), VECTORS_PAGE):
            some = list(dict.fromkeys(ids[start : start + VECTORS_PAGE]))
            rows = self._pool.read(found.table.vectors(len(some)), some, doing="reading the vectors of hits")
            stored |= {id_: records.from_fvecs(vector, dimension) for id_, vector in rows}
        gathered = np.zeros((len(ids), dimension), np.float32)
        for place, id_ in enumerate(ids):
            vector = stored.get(id_)
            if vector is not None:
                gathered[place] = vector
        return gathered


@contextmanager
def _filter_errors(condition: filters.Condition | None) -> Iterator[None]:
    try:
        yield
    except (RowRejected, StatementFailed) as error:
        if condition is not None and (isinstance(error, RowRejected) or error.code == _INCONSISTENT):
            raise filters.not_comparable(condition) from None
        raise


def _compiled(condition: filters.Condition | None) -> filter_sql.Compiled:
    return filter_sql.Compiled("", ()) if condition is None else filter_sql.to_hana(condition)


def _best(read: Callable[[int], Rows], k: int) -> list[Hit]:
    """The best `k` documents, given how to read the best records. Several chunks of one document count once, so more
    records are read until there are `k` documents."""
    if k < 1:
        return []
    count, ties = k + min(k, 50), 0
    while True:
        rows = read(count)
        scored = [row for row in rows if row[5] is not None]
        best = records.best_per_document(map(_hit, scored), k)
        exhausted = len(rows) < count or len(scored) < len(rows)
        full = len(best) == k
        if exhausted or (full and (best[-1].score > scored[-1][5] or ties == _TIE_STEPS)):
            return best
        ties += full
        count *= 4


def _seconds(ttl: float) -> int:
    """Whole ones for HANA, and never none."""
    return max(1, round(ttl))


def _hit(row: Sequence[Any]) -> Hit:
    id_, key, number, text, meta, score = row
    return Hit(
        id=f"record:{id_}" if key is None else key,
        score=float(score),
        text=text or "",
        metadata=records.metadata_of(meta),
        number=number or 0,
        record=id_,
    )


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
