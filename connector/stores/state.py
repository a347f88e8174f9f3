"""State that both stores keep alike, in two tables with the same columns: generations, leases, checkpoints and the
quarantine. A store adds how it runs SQL and how it keeps vectors.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from connector import failpoints
from connector.errors import (
    ConnectorError,
    GenerationChanged,
    GenerationRefused,
    LeaseLost,
    RowRejected,
    StoreCorrupt,
    UnknownCollection,
    UnknownGeneration,
    UnknownTable,
)
from connector.model import (
    ChangeSet,
    Checkpoint,
    CollectionStatus,
    Generation,
    GenerationState,
    Lease,
    QuarantinedRow,
    Recipe,
    generation_name,
    is_generation,
)
from connector.protocols import Embedder
from connector.stores import records
from connector.stores.records import ModelStamp

T = TypeVar("T")
Row = TypeVar("Row", "Collection", Generation)
Query = Callable[[str, Sequence[Any]], Sequence[Sequence[Any]]]
DROPPED = ""  # the fingerprint of a generation whose deletion has started; no model has this fingerprint

# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608


class Session(Protocol):
    """An open transaction. `doing` describes the statement in error messages."""

    def query(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = ...) -> list[Any]: ...

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = ...) -> int:
        """Return the number of affected rows."""
        ...

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]], *, doing: str = ...) -> None: ...


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds. `ttl`: how long a lease outlives a crashed worker; `renew`: well below `ttl`; `poll`: while waiting."""

    ttl: float = 30.0
    renew: float = 8.0
    poll: float = 0.25


@dataclass(frozen=True, slots=True)
class Collection:
    """One generation in the state table. `name`: NAME@N, or NAME for the active one. `names`: source column to metadata
    name if they differ, for filters. `spec`: the recipe as JSON. `highest`: the highest number, set when an older
    generation was dropped. `id`: of the row, in the local store."""

    name: str
    table: str
    number: int
    stamp: ModelStamp
    names: Mapping[str, str]
    checkpoint: Checkpoint
    epoch: int
    spec: str | None
    created: datetime | None
    retired: datetime | None
    highest: int | None
    id: int = 0

    @property
    def state(self) -> GenerationState:
        if not is_generation(self.name):
            return "active"
        return "building" if self.retired is None else "retired"


@dataclass(frozen=True, slots=True)
class StateTables:
    """The state tables of a store, and the SQL in which its database differs. `place`: of the tables, for messages.
    `later`: the time in ? seconds. `expired`: a condition on LEASE_UNTIL. `corrupt`: returns the error for a row that
    cannot be read. `lock`: the end of a SELECT that locks rows. `more`: further columns."""

    place: str
    state: str
    quarantine: str
    now: str
    later: str
    expired: str
    corrupt: Callable[[str], StoreCorrupt]
    lock: str = ""
    more: str = ""

    @property
    def renewal(self) -> str:
        """Return the first statement of every write: it also locks the row against a takeover before the commit."""
        return f'UPDATE {self.state} SET "LEASE_UNTIL" = {self.later} WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'

    def find(self, query: Query, name: str) -> Collection | None:
        return next(iter(self._rows(query, '"COLLECTION" = ?', (name,))), None)

    def generations(self, query: Query, collection: str) -> list[Collection]:
        """Return the generations by number; [] if the collection was never opened."""
        found = self._rows(query, _OF_COLLECTION, _names_of(collection))
        return [row for row in found if row.name.partition("@")[0] == collection]  # SQLite's LIKE ignores case

    def _rows(self, query: Query, condition: str, names: Sequence[str]) -> list[Collection]:
        sql = (
            'SELECT "COLLECTION", "TABLE_NAME", "GENERATION", "MODEL_ID", "FINGERPRINT", "DIMENSION", "META_NAMES", '
            f'"CHECKPOINT", "LAST_SYNC", "LEASE_EPOCH", "SPEC", "CREATED_AT", "RETIRED_AT", "HIGHEST"{self.more} '
            f'FROM {self.state} WHERE {condition} ORDER BY "GENERATION"'
        )
        try:
            rows = query(sql, names)
        except UnknownTable:
            return []
        found = []
        with self.readable("the record of a collection"):
            for row in rows:
                name, table, number, model, fingerprint, dimension, names, text, synced, epoch, *more = row
                spec, created, retired, highest, *id_ = more
                stamp, checkpoint = (
                    ModelStamp(model, fingerprint, dimension),
                    records.checkpoint_of(text, moment(synced)),
                )
                times = moment(created), moment(retired)
                names = json.loads(names or "{}")
                found.append(
                    Collection(name, table, number, stamp, names, checkpoint, epoch, spec, *times, highest, *id_)
                )
        return found

    def unknown(self, name: str) -> UnknownCollection:
        return UnknownCollection(f"{self.place} has no collection {name!r}; `sync` creates it")

    @contextmanager
    def readable(self, what: str) -> Iterator[None]:
        """Raise StoreCorrupt if stored values cannot be parsed."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise self.corrupt(f"{what} cannot be read") from None


def moment(value: datetime | float | None) -> datetime | None:
    """Return a stored time: HANA's UTC without a zone, or SQLite's seconds since 1970."""
    return records.in_utc(value) if value is None or isinstance(value, datetime) else datetime.fromtimestamp(value, UTC)


_OF_COLLECTION = """"COLLECTION" = ? OR "COLLECTION" LIKE ? ESCAPE '\\'"""


def _names_of(collection: str) -> tuple[str, str]:
    """Return the name, and a LIKE pattern for the names of its other generations; escapes the wildcard `_`."""
    escaped = collection.replace("\\", "\\\\").replace("_", "\\_").replace("%", "\\%")
    return collection, generation_name(escaped, 0)[:-1] + "%"


def free_number(rows: Sequence[Collection]) -> int:
    """Return a number that no generation of the collection has or ever had."""
    return max((max(row.number, row.highest or 0) for row in rows), default=0) + 1


def numbered(collection: str, rows: Sequence[Row], number: int) -> Row:
    """Return the generation with this number. Raises UnknownGeneration."""
    for row in rows:
        if row.number == number:
            return row
    if not rows:
        raise UnknownGeneration(f"{collection!r} was never synced and has no generations")
    known = ", ".join(str(row.number) for row in sorted(rows, key=lambda row: row.number))
    raise UnknownGeneration(f"{collection!r} has no generation {number}; there are: {known}")


def changed(collection: str, expected: int, active: int) -> GenerationChanged:
    return GenerationChanged(
        f"{collection!r} is served by generation {active} now, no longer by {expected}: search again"
    )


def lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"another worker has taken over collection {lease.collection!r}; nothing of this change was written"
    )


class StateStore(ABC):
    """What a `VectorStore` does with its state tables. `names`: per collection, source column to metadata name if they
    differ, for filters."""

    kind: ClassVar[Literal["hana", "local"]]

    def __init__(
        self, tables: StateTables, schema: str, names: Mapping[str, Mapping[str, str]] | None, times: LeaseTimes
    ) -> None:
        self._tables = tables
        self._schema = schema
        self._names = names or {}
        self._times = times
        self.generations = StoredGenerations(self)

    # ------------------------------------------------------------------------------------------ what a store adds

    @abstractmethod
    def _read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str) -> list[Any]: ...

    @abstractmethod
    def _execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str) -> int:
        """Run one statement as a transaction. Raises RowRejected if a row with that key exists."""
        ...

    @abstractmethod
    def _transaction(self, work: Callable[[Session], T], *, doing: str, divisible: bool = False) -> T:
        """Run `work`, which must be idempotent, as one transaction. `divisible`: smaller ones may succeed instead."""
        ...

    @abstractmethod
    def _create_state(self) -> None:
        """Create the state tables unless they exist."""
        ...

    @abstractmethod
    def _table_name(self, collection: str, number: int) -> str: ...

    @abstractmethod
    def _ensure_table(self, name: str, table: str, dimension: int) -> None:
        """Create the table for the vectors of generation `name` unless it exists."""
        ...

    @abstractmethod
    def _drop_vectors(self, found: Collection, lease: Lease) -> None: ...

    @abstractmethod
    def _counts(self, found: Collection) -> tuple[int, int, int]:
        """Count records, our records, our documents."""
        ...

    @abstractmethod
    def _writer(self, found: Collection, changes: ChangeSet) -> Callable[[Session], None]:
        """Return a function that writes the chunks and metadata of a change set. Raises RowsRejected."""
        ...

    @abstractmethod
    def _forget(self) -> None:
        """Forget cached state."""
        ...

    def _find(self, name: str) -> Collection | None:
        return self._tables.find(
            lambda sql, values: self._read(sql, values, doing=f"opening collection {name!r}"), name
        )

    def _known(self, name: str) -> Collection:
        found = self._find(name)
        if found is None:
            raise self._tables.unknown(name)
        return found

    # ---------------------------------------------------------------------------------------------------- opening

    def open(self, collection: str, embedder: Embedder) -> Checkpoint:
        stamp = ModelStamp.of(embedder)
        self._forget()
        found = self._find(collection)
        if found is None:
            if is_generation(collection):
                raise self._tables.unknown(collection)
            self._create_state()
            with suppress(RowRejected):  # another worker was first
                self._register(collection, 1, collection, stamp, None)
            found = self._known(collection)
        if found.stamp != stamp:
            self._change_model(found, stamp)
            return Checkpoint()
        self._ensure_table(found.name, found.table, stamp.dimension)
        names = self._names.get(collection)
        if names is not None and dict(names) != dict(found.names):
            sql = f'UPDATE {self._tables.state} SET "META_NAMES" = ? WHERE "COLLECTION" = ?'
            self._execute(sql, (json.dumps(dict(names)), collection), doing="recording metadata names")
        return found.checkpoint

    def _register(self, name: str, number: int, collection: str, stamp: ModelStamp, spec: str | None) -> None:
        """Create the table, then its state row: a crash leaves an empty table, which the next attempt reuses. Raises
        RowRejected if another worker was first."""
        table, names = self._table_name(collection, number), json.dumps(dict(self._names.get(collection, {})))
        self._ensure_table(name, table, stamp.dimension)
        row = (name, table, number, stamp.id, stamp.fingerprint, stamp.dimension, names, spec)
        sql = (
            f'INSERT INTO {self._tables.state} ("COLLECTION", "TABLE_NAME", "GENERATION", "MODEL_ID", "FINGERPRINT", '
            f'"DIMENSION", "META_NAMES", "SPEC", "CREATED_AT") VALUES (?, ?, ?, ?, ?, ?, ?, ?, {self._tables.now})'
        )
        self._execute(sql, row, doing=f"registering collection {name!r}")

    def _change_model(self, found: Collection, stamp: ModelStamp) -> None:
        """Change the model of an empty collection without a lease. Use a new table, because other sessions hold
        statements prepared for the old dimension."""
        mismatch = found.stamp.mismatch(found.name, stamp)
        if is_generation(found.name) or self._counts(found)[0]:
            raise mismatch
        epoch = self.take_lease(found.name, "change of model", self._times.ttl)
        if isinstance(epoch, str):
            raise mismatch
        lease = Lease(found.name, "", epoch)
        if self._counts(found)[0]:  # another worker wrote before this one got the lease
            self.release_lease(lease)
            raise mismatch
        number = free_number(self.generations.rows(found.name))
        table = self._table_name(found.name, number)
        self._ensure_table(found.name, table, stamp.dimension)
        sql = (
            f'UPDATE {self._tables.state} SET "TABLE_NAME" = ?, "GENERATION" = ?, "MODEL_ID" = ?, "FINGERPRINT" = ?, '
            '"DIMENSION" = ?, "CHECKPOINT" = NULL, "LAST_SYNC" = NULL, "LEASE_OWNER" = NULL, "LEASE_UNTIL" = NULL, '
            '"LEASE_EPOCH" = "LEASE_EPOCH" + 1 WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )
        values = (table, number, stamp.id, stamp.fingerprint, stamp.dimension, found.name, epoch)
        if self._execute(sql, values, doing="changing the model") and table != found.table:
            self._drop_vectors(found, lease)

    # ---------------------------------------------------------------------------------------------------- leases

    @contextmanager
    def lease(self, collection: str, owner: str, wait: float) -> Iterator[Lease]:
        deadline, times = time.monotonic() + wait, self._times
        while isinstance(taken := self.take_lease(collection, owner, times.ttl), str):
            left = deadline - time.monotonic()
            if left <= 0:
                raise LeaseLost(
                    f"collection {collection!r} is being written by {taken!r} and did not become free in time; "
                    "wait until it is done, then try again"
                )
            time.sleep(min(times.poll, left))
        lease, done = Lease(collection, owner, taken), threading.Event()

        def keep() -> None:
            """Renew until done or lost, retrying failures. If all fail, the lease expires and writes raise
            LeaseLost."""
            pause = times.renew
            while not done.wait(pause):
                try:
                    if not self.renew_lease(lease, times.ttl):
                        return
                    pause = times.renew
                except ConnectorError:
                    pause = times.renew / 4

        keeper = threading.Thread(target=keep, name=f"lease-{collection}", daemon=True)
        keeper.start()
        try:
            yield lease
        finally:
            done.set()
            keeper.join()
            with suppress(ConnectorError):  # it expires by itself
                self.release_lease(lease)

    def take_lease(self, collection: str, owner: str, ttl: float) -> int | str:
        """Return the new epoch, or the name of the current owner. Takes over an expired lease."""
        self._known(collection)
        tables = self._tables

        def take(session: Session) -> int | str:
            sql = (
                f'UPDATE {tables.state} SET "LEASE_OWNER" = ?, "LEASE_EPOCH" = "LEASE_EPOCH" + 1, "LEASE_UNTIL" = '
                f'{tables.later} WHERE "COLLECTION" = ? AND ("LEASE_UNTIL" IS NULL OR {tables.expired})'
            )
            taken = session.execute(sql, (owner[:200], ttl, collection), doing="taking a lease")
            sql = f'SELECT "LEASE_OWNER", "LEASE_EPOCH" FROM {tables.state} WHERE "COLLECTION" = ?'
            holder, epoch = session.query(sql, (collection,))[0]
            return int(epoch) if taken else str(holder)

        return self._transaction(take, doing="taking a lease")

    def renew_lease(self, lease: Lease, ttl: float) -> bool:
        """Return False if another worker has taken the lease over."""
        values = (ttl, lease.collection, lease.epoch)
        return self._execute(self._tables.renewal, values, doing="renewing a lease") == 1

    def release_lease(self, lease: Lease) -> None:
        """Release the lease and reject later writes with its epoch."""
        sql = (
            f'UPDATE {self._tables.state} SET "LEASE_UNTIL" = NULL, "LEASE_OWNER" = NULL, '
            '"LEASE_EPOCH" = "LEASE_EPOCH" + 1 WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )
        self._execute(sql, (lease.collection, lease.epoch), doing="releasing a lease")

    # --------------------------------------------------------------------------------------------------- writing

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        found = self._find(lease.collection)
        if found is None:  # the generation was activated or dropped
            raise lost(lease)
        tables, name = self._tables, lease.collection
        write_chunks, (released, quarantined) = self._writer(found, changes), self._quarantine_rows(name, changes)

        def write(session: Session) -> None:
            self._check(session, lease)
            write_chunks(session)
            sql = f'DELETE FROM {tables.quarantine} WHERE "COLLECTION" = ? AND "SRC_KEY" = ?'
            session.execute_many(sql, released, doing="releasing from quarantine")
            sql = (
                f'INSERT INTO {tables.quarantine} ("COLLECTION", "SRC_KEY", "STAGE", "REASON", "ATTEMPTS", '
                f'"ROW_DIGEST", "LAST_SEEN") VALUES (?, ?, ?, ?, ?, ?, {tables.now})'
            )
            session.execute_many(sql, quarantined, doing="writing the quarantine")
            if changes.checkpoint is not None:
                synced = "" if changes.partial else f', "LAST_SYNC" = {tables.now}'
                sql = f'UPDATE {tables.state} SET "CHECKPOINT" = ?{synced} WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
                session.execute(sql, (records.checkpoint_text(changes.checkpoint), name, lease.epoch))
                failpoints.reach("mid_checkpoint")

        divisible = len({*changes.deleted, *(chunk.id for chunk in (*changes.chunks, *changes.metadata_only))}) > 1
        self._transaction(write, doing=f"writing to collection {name!r}", divisible=divisible)

    def _check(self, session: Session, lease: Lease) -> None:
        """Renew the lease within a transaction. Raises LeaseLost after a takeover."""
        values = (self._times.ttl, lease.collection, lease.epoch)
        if session.execute(self._tables.renewal, values, doing="checking the lease") != 1:
            raise lost(lease)

    def _quarantine_rows(self, name: str, changes: ChangeSet) -> tuple[list[Any], list[Any]]:
        """Return the rows to delete and to insert. Compute them before the transaction, so that a retried commit counts
        an attempt once; only the holder of the lease changes the quarantine."""
        before = {row.id: row for row in self.quarantine(name)} if changes.quarantined else {}
        released, written = frozenset(changes.released), {}
        for row in changes.quarantined:
            known, attempts = None if row.id in released else before.get(row.id), row.attempts
            if known is not None and (None in (known.digest, row.digest) or known.digest == row.digest):
                attempts += known.attempts  # a changed row starts from zero
            written[row.id] = (name, row.id, row.stage[:100], row.reason[:2000], attempts, row.digest)
        gone = {*released, *written}
        if gone and not before and not self._quarantined(name):
            gone = set()
        return [(name, id_) for id_ in sorted(gone)], [written[id_] for id_ in sorted(written)]

    # --------------------------------------------------------------------------------------------------- reading

    def quarantine(self, collection: str) -> list[QuarantinedRow]:
        self._known(collection)
        sql = (
            'SELECT "SRC_KEY", "STAGE", "REASON", "ATTEMPTS", "LAST_SEEN", "ROW_DIGEST" '
            f'FROM {self._tables.quarantine} WHERE "COLLECTION" = ? ORDER BY "SRC_KEY"'
        )
        rows = self._read(sql, (collection,), doing="reading the quarantine")
        with self._tables.readable("the quarantine"):
            return [
                QuarantinedRow(id_, stage, reason, attempts, moment(seen), None if digest is None else bytes(digest))
                for id_, stage, reason, attempts, seen, digest in rows
            ]

    def _quarantined(self, collection: str) -> int:
        sql = f'SELECT COUNT(*) FROM {self._tables.quarantine} WHERE "COLLECTION" = ?'
        return int(self._read(sql, (collection,), doing="counting the quarantine")[0][0])

    def status(self, collection: str) -> CollectionStatus | None:
        found = self._find(collection)
        if found is None:
            return None
        total, chunks, rows = self._counts(found)
        return CollectionStatus(
            collection=found.name,
            store=self.kind,
            schema=self._schema or None,
            table=found.table,
            generation=found.number,
            model=found.stamp.id,
            dimension=found.stamp.dimension,
            rows=rows,
            chunks=chunks,
            foreign=total - chunks,
            empty=found.checkpoint.empty,
            quarantined=self._quarantined(collection),
            last_sync=found.checkpoint.last_sync,
            key=found.checkpoint.key,
            checkpoint=found.checkpoint,
        )


class StoredGenerations:
    """A `Generations` over rows of the state table."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def rows(self, collection: str) -> list[Collection]:
        """Return the generations by number; [] if the collection was never opened."""
        doing = f"looking at the generations of {collection!r}"
        return self._store._tables.generations(lambda *asked: self._store._read(*asked, doing=doing), collection)

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        return [
            Generation(
                name=row.name,
                number=row.number,
                state=row.state,
                model=row.stamp.id,
                fingerprint=row.stamp.fingerprint,
                dimension=row.stamp.dimension,
                table=row.table,
                rows=self._store._counts(row)[2] if counted else None,
                created=row.created,
                retired=row.retired,
                last_sync=row.checkpoint.last_sync,
                recipe=records.recipe_of(collection, row.spec),
            )
            for row in self.rows(collection)
        ]

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        stamp = ModelStamp.of(embedder)
        while True:
            rows = self.rows(collection)
            if not any(row.state == "active" for row in rows):
                raise self._store._tables.unknown(collection)
            newest_first = [row for row in reversed(rows) if row.stamp == stamp]
            for row in newest_first:
                if row.state == "building":
                    return row.name
            for row in newest_first:
                if row.state == "retired" and records.same_spec(collection, row.spec, recipe):
                    sql = f'UPDATE {self._store._tables.state} SET "RETIRED_AT" = NULL WHERE "COLLECTION" = ?'
                    self._store._execute(sql, (row.name,), doing=f"building {row.name!r} on")
                    return row.name
            number = free_number(rows)
            with suppress(RowRejected):  # another worker has started one: read again
                name = generation_name(collection, number)
                self._store._register(name, number, collection, stamp, records.recipe_text(recipe))

    def record(self, collection: str, number: int, recipe: Recipe) -> None:
        text = records.recipe_text(recipe)
        if any(row.number == number and row.spec != text for row in self.rows(collection)):
            values = (text, number, collection, generation_name(collection, number))  # a switch may change the name now
            sql = f'UPDATE {self._store._tables.state} SET "SPEC" = ? WHERE "GENERATION" = ? AND "COLLECTION" IN (?, ?)'
            self._store._execute(sql, values, doing=f"recording the recipe of {collection!r}")

    def switch(self, collection: str, number: int) -> None:
        """Switch. A retry after a lost reply finds the switch done."""
        numbered(collection, self.rows(collection), number)
        tables = self._store._tables

        def work(session: Session) -> None:
            lock = f'SELECT "COLLECTION" FROM {tables.state} WHERE {_OF_COLLECTION}{tables.lock}'
            session.query(lock, _names_of(collection), doing="locking the generations")
            rows = tables.generations(session.query, collection)
            target = numbered(collection, rows, number)
            if target.state == "active":
                return
            if target.stamp.fingerprint == DROPPED:
                raise GenerationRefused(
                    f"generation {number} of {collection!r} was being dropped; drop it again to finish that"
                )
            epoch = max(row.epoch for row in rows) + 1  # above every earlier lease of either name

            def rename(row: Collection, name: str, retired: str) -> None:
                sql = (
                    f'UPDATE {tables.state} SET "COLLECTION" = ?, "CHECKPOINT" = ?, "LEASE_EPOCH" = ?, '
                    f'"LEASE_OWNER" = NULL, "LEASE_UNTIL" = NULL, "RETIRED_AT" = {retired} WHERE "COLLECTION" = ?'
                )
                values = (name, records.to_compare_whole(row.checkpoint), epoch, row.name)
                session.execute(sql, values, doing="switching generations")
                sql = f'UPDATE {tables.quarantine} SET "COLLECTION" = ? WHERE "COLLECTION" = ?'
                session.execute(sql, (name, row.name), doing="moving a quarantine")

            for row in rows:
                if row.state == "active":
                    rename(row, generation_name(collection, row.number), tables.now)
            failpoints.reach("mid_alias_swap")
            rename(target, collection, "NULL")

        self._store._transaction(work, doing=f"switching {collection!r} to generation {number}")
        self._store._forget()

    def drop(self, collection: str, number: int) -> None:
        """Mark the generation first: after an interruption it can be dropped again, but not resumed or activated."""
        name = numbered(collection, self.rows(collection), number).name
        if not is_generation(name):
            raise GenerationRefused(
                f"generation {number} of {collection!r} serves the searches and is not dropped: switch to another first"
            )
        store, tables, doing = self._store, self._store._tables, f"dropping {name!r}"
        with store.lease(name, "drop", 0) as lease:
            sql = (
                f'UPDATE {tables.state} SET "FINGERPRINT" = ?, "CHECKPOINT" = NULL, "LAST_SYNC" = NULL '
                'WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
            )
            if store._execute(sql, (DROPPED, name, lease.epoch), doing=doing) != 1:
                raise lost(lease)
            rows = self.rows(collection)
            store._drop_vectors(next(row for row in rows if row.name == name), lease)

            def work(session: Session) -> None:
                keep_highest = f'UPDATE {tables.state} SET "HIGHEST" = ? WHERE "COLLECTION" = ?'
                session.execute(keep_highest, (free_number(rows) - 1, collection), doing=doing)
                for table in (tables.quarantine, tables.state):
                    session.execute(f'DELETE FROM {table} WHERE "COLLECTION" = ?', (name,), doing=doing)

            store._transaction(work, doing=doing)
        store._forget()
