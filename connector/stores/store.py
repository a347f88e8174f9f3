"""A vector store: `VectorStore` writes and opens, `View` reads one collection, `Generations` manages its versions."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from connector import failpoints
from connector.errors import ConfigurationError, ConnectorError, GenerationRefused, LeaseLost, RowRejected
from connector.model import (
    ChangeSet,
    Checkpoint,
    CollectionStatus,
    DatabaseModel,
    Filter,
    Generation,
    Hit,
    IndexUse,
    Lease,
    Order,
    Place,
    QuarantinedRow,
    Recipe,
    Sample,
    StoredChunk,
    StoredRecord,
    StoredText,
    Vectors,
    generation_name,
    is_generation,
)
from connector.protocols import Embedder
from connector.stores import records
from connector.stores.records import ModelStamp
from connector.stores.state import (
    OF_COLLECTION,
    Collection,
    Database,
    LeaseTimes,
    Session,
    StateTables,
    free_number,
    lost,
    moment,
    names_of,
    numbered,
    portions,
)

# Attempts to write several documents while HANA is overloaded. Smaller change sets help more than waiting.
ATTEMPTS_OVERLOADED = 2
DROPPED = ""  # the fingerprint of a generation whose deletion has started; no model has this fingerprint

# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608


class View(Protocol):
    """Reads one collection. Rows outside the row filter never affect results, scores or errors: a `where` that cannot
    be compared with their values does not fail. All methods raise UnknownCollection and GenerationChanged; those with a
    `where` also BadFilter."""

    def search(
        self, vector: NDArray[np.float32], k: int, where: Filter | None = None, *, exact: bool = False
    ) -> list[Hit]:
        """Return up to `k` documents by their best chunk, best first, ties by id. `exact`: no approximate index."""

    def keyword(self, text: str, k: int, where: Filter | None = None) -> list[Hit]:
        """Return hits as in `search`, by BM25 over the words of `text` (`stores/words.py`): rows with any whole word
        of it, in any case. Scores are comparable only within one result. `text` has no query syntax."""

    def keyed(self, number: str, count: int, where: Filter | None = None) -> list[Hit]:
        """Return the first chunk of up to `count` rows whose id contains `number` (letters and digits), with score 0.
        Rows with that key value (`words.as_key_value`) come first, then by id. Scans every id."""

    def texts(self, ids: Sequence[str]) -> list[StoredText]:
        """Return every chunk of these rows, by the order of `ids` (duplicates once), then by chunk number. Omits
        unknown ids."""

    def vectors(self, chunks: Sequence[Hit | StoredText]) -> Vectors:
        """Return the stored vectors in the order of `chunks`; zeros for a chunk deleted since."""

    def sample(self, count: int, *, texts: bool = True) -> Sample:
        """Return up to `count` rows spread over the collection, foreign ones included. The result is stable until the
        next write, and a smaller sample is a prefix of a larger one. Without `texts` each text is "". Scans every row's
        number, and its metadata if there is a row filter."""

    def places(self, count: int, order: Order, after: Place | None = None, where: Filter | None = None) -> list[Place]:
        """Return the places of up to `count` rows, foreign ones included, behind `after` in this order. An order by a
        field scans the metadata of every row."""

    def index_use(self, k: int, where: Filter | None = None) -> IndexUse:
        """Return whether `search` with these arguments uses an approximate index."""


class VectorStore(ABC):
    """A store with two state tables, and its own tables for vectors. Thread-safe. `collection` is the configured name,
    or NAME@N for a generation that is not active.

    Writes need a `Lease`; every write transaction compares its epoch. Methods other than `open` and `status` raise
    UnknownCollection. `names`: per collection, source column to metadata name if they differ, for filters. Every
    implementation must pass `tests/contracts`.
    """

    kind: ClassVar[Literal["hana", "local"]]

    def __init__(
        self,
        database: Database,
        tables: StateTables,
        schema: str,
        names: Mapping[str, Mapping[str, str]] | None,
        times: LeaseTimes,
    ) -> None:
        self._database = database
        self._tables = tables
        self._schema = schema
        self._names = names or {}
        self._times = times
        self.generations = Generations(self)

    # ------------------------------------------------------------------------------------------ what a store adds

    @abstractmethod
    def optimise(self, collection: str) -> None:
        """Build or refresh the search index after a bulk load. Cheap if nothing has changed."""

    @abstractmethod
    def view(self, collection: str, generation: int | None = None, row_filter: Filter | None = None) -> View:
        """Return a reader of the rows that match `row_filter` (None: all), which must be safe (`filters.narrowed`). Its
        methods raise GenerationChanged unless `generation` (None: any) is active."""

    @abstractmethod
    def stored(self, collection: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        """Yield our chunks (of these documents, None: all) in pages, unordered, without foreign rows."""

    @abstractmethod
    def records(self, collection: str, *, vectors: bool = True) -> Iterator[list[StoredRecord]]:
        """Yield every record in pages, foreign rows included. Without `vectors` a store may give only lengths."""

    def likeness(self, collection: str, records: Sequence[int], model: DatabaseModel) -> dict[int, float]:
        """Return the cosine of each record's vector with that of its text, embedded again by the database. Omits
        records whose text has no vector. `records`: the store's own ids. Raises the database's error if it rejects
        every record."""
        raise NotImplementedError("`open` refuses models of a database in other stores")

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _create_table(self, name: str, collection: str, number: int, dimension: int) -> str:
        """Create the state tables and the vector table of generation `name` if missing; return the vector table's name.
        Raises ConfigurationError if it belongs to another collection."""

    @abstractmethod
    def _ensure_table(self, table: str, dimension: int) -> None:
        """Create the table for vectors if missing."""

    def _keeps_type(self, found: Collection) -> bool:
        """Return whether a new table would keep vectors in the same type as this one."""
        return True

    @abstractmethod
    def _drop_vectors(self, found: Collection, lease: Lease) -> None: ...

    @abstractmethod
    def _counts(self, found: Collection) -> tuple[int, int, int]:
        """Return the numbers of records, our records and our documents."""

    @abstractmethod
    def _writer(self, found: Collection, changes: ChangeSet) -> Callable[[Session], None]:
        """Return a function that writes the chunks and metadata of a change set. Raises RowsRejected."""

    @abstractmethod
    def _forget(self) -> None:
        """Forget cached state."""

    def _end_parts(self, session: Session, collection: str) -> None:  # noqa: B027 - a store may never split a lease
        """End the parts of an earlier lease. Waits for writes with them."""

    def _find(self, name: str) -> Collection | None:
        doing = f"opening collection {name!r}"
        return self._tables.find(lambda *asked: self._database.read(*asked, doing=doing), name)

    def _known(self, name: str) -> Collection:
        found = self._find(name)
        if found is None:
            raise self._tables.unknown(name)
        return found

    # ---------------------------------------------------------------------------------------------------- opening

    def open(self, collection: str, embedder: Embedder) -> Checkpoint:
        """Create missing tables and rows; return the checkpoint. Raises ModelMismatch for vectors of another model, and
        ConfigurationError for a model that only another store computes."""
        if embedder.database_model is not None and self.kind != "hana":
            raise ConfigurationError(
                f"the model {embedder.model} embeds in HANA, where the vectors must be too: set [store] kind = "
                '"hana", or name another model'
            )
        stamp = ModelStamp.of(embedder)
        self._forget()
        found = self._find(collection)
        if found is None:
            if is_generation(collection):
                raise self._tables.unknown(collection)
            with suppress(RowRejected):  # another worker was first
                self._register(collection, 1, collection, stamp, None)
            found = self._known(collection)
        if found.stamp != stamp:
            self._change_model(found, stamp)
            return Checkpoint()
        self._ensure_table(found.table, stamp.dimension)
        names = self._names.get(collection)
        if names is not None and dict(names) != dict(found.names):
            sql = f'UPDATE {self._tables.state} SET "META_NAMES" = ? WHERE "COLLECTION" = ?'
            self._database.execute(sql, (json.dumps(dict(names)), collection), doing="recording metadata names")
        return found.checkpoint

    def _register(self, name: str, number: int, collection: str, stamp: ModelStamp, spec: str | None) -> None:
        """Create the table, then its state row: a crash leaves an empty table, which the next attempt reuses; with
        another type of vectors it stays unused. Raises RowRejected if another worker was first."""
        table = self._create_table(name, collection, number, stamp.dimension)
        names, model = json.dumps(dict(self._names.get(collection, {}))), (stamp.id, stamp.fingerprint, stamp.dimension)
        sql = (
            f'INSERT INTO {self._tables.state} ("COLLECTION", "TABLE_NAME", "GENERATION", "MODEL_ID", "FINGERPRINT", '
            f'"DIMENSION", "META_NAMES", "SPEC", "CREATED_AT") VALUES (?, ?, ?, ?, ?, ?, ?, ?, {self._tables.now})'
        )
        self._database.execute(sql, (name, table, number, *model, names, spec), doing=f"registering {name!r}")

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
        table = self._create_table(found.name, found.name, number, stamp.dimension)
        sql = (
            f'UPDATE {self._tables.state} SET "TABLE_NAME" = ?, "GENERATION" = ?, "MODEL_ID" = ?, "FINGERPRINT" = ?, '
            '"DIMENSION" = ?, "CHECKPOINT" = NULL, "LAST_SYNC" = NULL, "LEASE_OWNER" = NULL, "LEASE_UNTIL" = NULL, '
            '"LEASE_EPOCH" = "LEASE_EPOCH" + 1 WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )
        values = (table, number, stamp.id, stamp.fingerprint, stamp.dimension, found.name, epoch)
        if self._database.execute(sql, values, doing="changing the model") and table != found.table:
            self._drop_vectors(found, lease)

    # ---------------------------------------------------------------------------------------------------- leases

    @contextmanager
    def lease(self, collection: str, owner: str, wait: float) -> Iterator[Lease]:
        """Take the collection's lease for writing. It is renewed in the background and expires 30 s after a crash.
        Raises LeaseLost if another owner keeps it for more than `wait` seconds."""
        deadline, times = time.monotonic() + wait, self._times
        while isinstance(taken := self.take_lease(collection, owner, times.ttl), str):
            left = deadline - time.monotonic()
            if left <= 0:
                raise LeaseLost(
                    f"collection {collection!r} is being written by {taken!r} and did not become free in time; "
                    "try again when that writer is done"
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

    def begin_part(self, lease: Lease, part: int) -> Lease:
        """Return a part of the lease, for a worker that writes at the same time as others without waiting for them. It
        is lost with the lease and is not renewed by writes. `part`: a number that this lease has not used yet."""
        return lease

    def end_parts(self, lease: Lease) -> None:  # noqa: B027 - a store may never split a lease
        """End this part, or all parts of a whole lease. Waits for their writes; later ones raise LeaseLost."""

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
            rows = session.query(sql, (collection,))
            if not rows:  # dropped, or renamed by a switch, since it was looked up
                raise tables.unknown(collection)
            holder, epoch = rows[0]
            if not taken:
                return str(holder)
            self._end_parts(session, collection)
            return int(epoch)

        return self._database.in_transaction(take, doing="taking a lease")

    def renew_lease(self, lease: Lease, ttl: float) -> bool:
        """Return False if another worker has taken the lease over."""
        values = (ttl, lease.collection, lease.epoch)
        return self._database.execute(self._tables.renewal, values, doing="renewing a lease") == 1

    def release_lease(self, lease: Lease) -> None:
        """Release the lease and reject later writes with its epoch."""
        sql = (
            f'UPDATE {self._tables.state} SET "LEASE_UNTIL" = NULL, "LEASE_OWNER" = NULL, '
            '"LEASE_EPOCH" = "LEASE_EPOCH" + 1 WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )
        self._database.execute(sql, (lease.collection, lease.epoch), doing="releasing a lease")

    # --------------------------------------------------------------------------------------------------- writing

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        """Write all changes in one transaction.

        Raises LeaseLost after a takeover, RowRejected for data that the store rejects, Overloaded if a smaller change
        set may succeed. RowsRejected gives positions in `chunks` followed by `metadata_only`; its list may be
        incomplete or wrong.
        """
        found = self._find(lease.collection)
        if found is None:  # the generation was activated or dropped
            raise lost(lease)
        tables, name = self._tables, lease.collection
        write_chunks, (released, quarantined) = self._writer(found, changes), self._quarantine_rows(name, changes)

        def write(session: Session) -> None:
            self._check(session, lease)
            write_chunks(session)
            if changes.model is not None:  # embedding may take longer than a lease lasts
                self._check(session, lease)
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

        documents = {*changes.deleted, *(chunk.id for chunk in (*changes.chunks, *changes.metadata_only))}
        overloaded = ATTEMPTS_OVERLOADED if len(documents) > 1 else None
        self._database.in_transaction(write, doing=f"writing to collection {name!r}", overloaded=overloaded)

    def _check(self, session: Session, lease: Lease) -> None:
        """Renew the lease within a transaction. Raises LeaseLost after a takeover."""
        values = (self._times.ttl, lease.collection, lease.epoch)
        if session.execute(self._tables.renewal, values, doing="checking the lease") != 1:
            raise lost(lease)

    def _quarantine_rows(self, name: str, changes: ChangeSet) -> tuple[list[Any], list[Any]]:
        """Return the rows to delete and to insert. Compute them before the transaction, so that a retried commit counts
        an attempt once; only the holder of the lease changes the quarantine."""
        before, released, written = dict[str, tuple[int, bytes | None]](), frozenset(changes.released), {}
        for some in portions(sorted({row.id for row in changes.quarantined})):
            sql = (
                f'SELECT "SRC_KEY", "ATTEMPTS", "ROW_DIGEST" FROM {self._tables.quarantine} '
                f'WHERE "COLLECTION" = ? AND "SRC_KEY" IN ({", ".join("?" * len(some))})'
            )
            rows = self._database.read(sql, (name, *some), doing="reading entries of the quarantine")
            with self._tables.readable("the quarantine"):
                before |= {id_: (tried, None if digest is None else bytes(digest)) for id_, tried, digest in rows}
        for row in changes.quarantined:
            known, attempts = None if row.id in released else before.get(row.id), row.attempts
            if known is not None and (None in (known[1], row.digest) or known[1] == row.digest):
                attempts += known[0]  # a changed row starts from zero
            written[row.id] = (name, row.id, row.stage[:100], row.reason[:2000], attempts, row.digest)
        if released and not before and not self._quarantined(name):
            released = frozenset()
        gone = released | written.keys()  # written rows too: a retried commit finds them there
        return [(name, id_) for id_ in sorted(gone)], [written[id_] for id_ in sorted(written)]

    # --------------------------------------------------------------------------------------------------- reading

    def quarantine(self, collection: str) -> list[QuarantinedRow]:
        self._known(collection)
        sql = (
            'SELECT "SRC_KEY", "STAGE", "REASON", "ATTEMPTS", "LAST_SEEN", "ROW_DIGEST" '
            f'FROM {self._tables.quarantine} WHERE "COLLECTION" = ? ORDER BY "SRC_KEY"'
        )
        rows = self._database.read(sql, (collection,), doing="reading the quarantine")
        with self._tables.readable("the quarantine"):
            return [
                QuarantinedRow(id_, stage, reason, attempts, moment(seen), None if digest is None else bytes(digest))
                for id_, stage, reason, attempts, seen, digest in rows
            ]

    def _quarantined(self, collection: str) -> int:
        sql = f'SELECT COUNT(*) FROM {self._tables.quarantine} WHERE "COLLECTION" = ?'
        return int(self._database.read(sql, (collection,), doing="counting the quarantine")[0][0])

    def status(self, collection: str) -> CollectionStatus | None:
        """Return the status; None if the collection was never opened."""
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


class Generations:
    """The versions of collections, by collection name and number."""

    def __init__(self, store: VectorStore) -> None:
        self._store, self._database, self._tables = store, store._database, store._tables

    def rows(self, collection: str) -> list[Collection]:
        """Return the generations by number; [] if the collection was never opened."""
        doing = f"reading the generations of {collection!r}"
        return self._tables.generations(lambda *asked: self._database.read(*asked, doing=doing), collection)

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        """Return all generations by number; [] if the collection was never opened. Counting rows scans every record."""
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
        """Return the name NAME@N of a generation to build beside the active one with `embedder`: the newest
        unfinished one of that model, else the newest retired one of that model, recipe and type of vectors (to
        rebuild), else a new one. Raises UnknownCollection if none is active."""
        stamp = ModelStamp.of(embedder)
        while True:
            rows = self.rows(collection)
            if not any(row.state == "active" for row in rows):
                raise self._tables.unknown(collection)
            resumed = self._resumed(collection, rows, stamp, recipe)
            if resumed is not None:
                sql = f'UPDATE {self._tables.state} SET "RETIRED_AT" = NULL WHERE "COLLECTION" = ?'
                self._database.execute(sql, (resumed,), doing=f"resuming {resumed!r}")
                return resumed
            number = free_number(rows)
            with suppress(RowRejected):  # another worker has started one: read again
                name = generation_name(collection, number)
                self._store._register(name, number, collection, stamp, records.recipe_text(recipe))

    def resumed(self, collection: str, embedder: Embedder, recipe: Recipe) -> str | None:
        """Return the name of the generation that `begin` would resume; None if it would make a new one."""
        return self._resumed(collection, self.rows(collection), ModelStamp.of(embedder), recipe)

    def _resumed(self, collection: str, rows: Sequence[Collection], stamp: ModelStamp, recipe: Recipe) -> str | None:
        fitting = [row for row in reversed(rows) if row.stamp == stamp]
        building = (row.name for row in fitting if row.state == "building")
        retired = (row for row in fitting if row.retired and self._store._keeps_type(row))
        same = (row.name for row in retired if records.same_spec(collection, row.spec, recipe))
        return next(building, None) or next(same, None)

    def has_configured_type(self, collection: str, number: int) -> bool:
        """Return whether the generation keeps its vectors in the type that a new one would have."""
        return all(self._store._keeps_type(row) for row in self.rows(collection) if row.number == number)

    def record(self, collection: str, number: int, recipe: Recipe) -> None:
        """Store the recipe of a generation. Does nothing if the generation does not exist."""
        text = records.recipe_text(recipe)
        if any(row.number == number and row.spec != text for row in self.rows(collection)):
            values = (text, number, collection, generation_name(collection, number))  # a switch may have renamed it
            sql = f'UPDATE {self._tables.state} SET "SPEC" = ? WHERE "GENERATION" = ? AND "COLLECTION" IN (?, ?)'
            self._database.execute(sql, values, doing=f"recording the recipe of {collection!r}")

    def switch(self, collection: str, number: int) -> None:
        """Make this generation active and retire the other, in one transaction. Writers to either lose their lease.
        Does nothing if it is already active, as in a retry after a lost reply. Raises UnknownGeneration."""
        numbered(collection, self.rows(collection), number)
        tables = self._tables

        def work(session: Session) -> None:
            lock = f'SELECT "COLLECTION" FROM {tables.state} WHERE {OF_COLLECTION}{tables.lock}'
            session.query(lock, names_of(collection), doing="locking the generations")
            rows = tables.generations(session.query, collection)
            target = numbered(collection, rows, number)
            if target.state == "active":
                return
            if target.stamp.fingerprint == DROPPED:
                raise GenerationRefused(
                    f"generation {number} of {collection!r} is partly dropped; drop it again to finish"
                )
            epoch = max(row.epoch for row in rows) + 1  # above every earlier lease of either name

            def rename(row: Collection, name: str, retired: str) -> None:
                self._store._end_parts(session, row.name)
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

        self._database.in_transaction(work, doing=f"switching {collection!r} to generation {number}")
        self._store._forget()

    def drop(self, collection: str, number: int) -> None:
        """Delete a generation that is not active. Mark it first: after an interruption it can be dropped again, but not
        resumed or activated. Raises UnknownGeneration, GenerationRefused for the active one, LeaseLost while it is
        being written."""
        dropped = numbered(collection, self.rows(collection), number)
        name = dropped.name
        if not is_generation(name):
            raise GenerationRefused(
                f"generation {number} of {collection!r} is active and cannot be dropped: switch to another one first"
            )
        store, tables, doing = self._store, self._tables, f"dropping {name!r}"
        with store.lease(name, "drop", 0) as lease:
            sql = (
                f'UPDATE {tables.state} SET "FINGERPRINT" = ?, "CHECKPOINT" = NULL, "LAST_SYNC" = NULL '
                'WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
            )
            if self._database.execute(sql, (DROPPED, name, lease.epoch), doing=doing) != 1:
                raise lost(lease)
            store._drop_vectors(dropped, lease)

            def work(session: Session) -> None:
                lock = f'SELECT "COLLECTION" FROM {tables.state} WHERE {OF_COLLECTION}{tables.lock}'
                session.query(lock, names_of(collection), doing="locking the generations")
                rows = tables.generations(session.query, collection)  # another may have been started since
                if not any(row.name == name for row in rows):
                    return  # a retry after a lost reply
                store._check(session, lease)
                keep_highest = f'UPDATE {tables.state} SET "HIGHEST" = ? WHERE "COLLECTION" = ?'
                session.execute(keep_highest, (free_number(rows) - 1, collection), doing=doing)
                for table in (tables.quarantine, tables.state):
                    delete = f'DELETE FROM {table} WHERE "COLLECTION" = ?'
                    session.execute(delete, (name,), doing=doing)

            self._database.in_transaction(work, doing=doing)
        store._forget()
