"""A table that changes, in memory and in the emulator, with a clock that the test sets; and collections over it for
each way to find changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from connector.errors import LogMissing
from connector.hana.change_log import installation
from connector.hana.connection import HanaPool
from connector.hana.source import HanaSource
from connector.model import (
    ChangeSpec,
    CollectionSpec,
    Column,
    Key,
    KeyRange,
    Query,
    Row,
    Span,
    Table,
    TableRef,
    Token,
    Value,
)
from connector.protocols import Embedder
from connector.stores.store import VectorStore
from connector.sync.run import Ends, SyncOptions, SyncReport, sync

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
TIMESTAMP = Column("AT", "TIMESTAMP", 27, 7)
OPTIONS = SyncOptions(page_rows=3, window=4, max_deletes=1.0)
WAYS = {
    "full": ChangeSpec(),
    "hash": ChangeSpec(hash="server"),
    "watermark": ChangeSpec("watermark", "AT", delay=30),
    "log": ChangeSpec("log"),
    "rowid": ChangeSpec("rowid"),
    "delta": ChangeSpec("delta", delay=30),
}
DELTA_COLUMNS = (Column("K", "INTEGER", 10), Column("Change_Type", "NVARCHAR", 1), Column("Change_Date", "TIMESTAMP"))


def second(number: float) -> datetime:
    return NOON + timedelta(seconds=number)


def stamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S.%f0")


def record_types(known: bool, image: bool) -> str:
    """Types of the records that a write of a row leaves, if the row was known, with or without an image of before."""
    return ("BU" if image else "A") if known else ("I" if image else "L")


class MemoryTable:
    """Rows by key, a log, a delta table, row ids. What a transaction that is still open wrote shows once it commits."""

    def __init__(self) -> None:
        self.ref = TableRef("S", "ROWS")
        columns = (Column("K", "INTEGER", 10), Column("TXT", "NVARCHAR", 100), Column("GRP", "NVARCHAR", 3), TIMESTAMP)
        self.table = Table(self.ref, columns, ("K",))
        self.rows: dict[int, tuple[str | None, str, str | None]] = {}
        self.ids: dict[int, int] = {}
        self.log: dict[int, Key] = {}
        self.delta_table = Table(TableRef("S", "ROWS_Delta"), DELTA_COLUMNS)
        self.delta: list[tuple[str, int | None, str | None]] = []  # time, key, type
        self.clock = second(0)
        self.logging = True
        self.reads = 0
        self._next = 1
        self._next_entry = 1

    @property
    def source(self) -> MemorySource:
        return MemorySource(self)

    def spec(self, way: str, **more: Any) -> CollectionSpec:
        return _spec(self.ref, way, **more)

    def put(self, key: int, text: str | None, at: datetime | None, group: str = "G") -> None:
        self.later(key, text, at, group)()

    def later(self, key: int, text: str | None, at: datetime | None, group: str = "G") -> Callable[[], None]:
        """A transaction that has written the row; the call commits it."""
        row_id, entry = self._next, self._next_entry
        self._next, self._next_entry = row_id + 1, entry + 1
        records = self._records(key, record_types(key in self.rows, bool(key % 2)), at)

        def commit() -> None:
            self.rows[key], self.ids[key] = (text, group, stamp(at)), row_id
            self.delta += records
            if self.logging:
                self.log[entry] = (key,)

        return commit

    def delete(self, *keys: int, at: datetime | None = None) -> None:
        for key in keys:
            if self.rows.pop(key, None) is not None:
                self.ids.pop(key)
                self._logged(key)
                self.delta += self._records(key, "D" if key % 2 else "X", at)

    def rekey(self, old: int, new: int, at: datetime | None) -> None:
        text, group, _ = self.rows[old]
        self.delete(old, at=at)
        self.put(new, text, at, group)

    def truncate(self) -> None:
        self.rows, self.ids, self._next = {}, {}, 1
        self.delta += self._records(None, "T", None)

    def _records(self, key: int | None, types: str, at: datetime | None) -> list[tuple[str, int | None, str | None]]:
        return [(stamp(at or self.clock) or "", key, kind) for kind in types]

    def _logged(self, key: int) -> None:
        if self.logging:
            self.log[self._next_entry] = (key,)
            self._next_entry += 1

    def texts(self) -> dict[int, str]:
        return {key: text for key, (text, _, _) in self.rows.items() if text}

    def waiting(self) -> int:
        return len(self.log)


@dataclass
class MemorySource:
    """`Source` and `Capture` in one."""

    data: MemoryTable

    @property
    def capture(self) -> MemorySource:
        return self

    def describe(self, ref: TableRef) -> Table:
        return self.data.delta_table if ref == self.data.delta_table.ref else self.data.table

    def now(self) -> datetime:
        return self.data.clock

    def count(self, query: Query) -> int:
        return len(self.data.rows)

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        keys = sorted(self.data.rows)
        for start in range(0, len(keys), size):
            yield self.rows(query, [(key,) for key in keys[start : start + size]])

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        self.data.reads += len(keys)
        return [self._row(query, key) for (key,) in keys if key in self.data.rows]  # type: ignore[list-item]

    def _row(self, query: Query, key: int) -> Row:
        text, group, at = self.data.rows[key]
        values: dict[str, Value] = {"K": key, "TXT": text, "GRP": group, "AT": at and datetime.fromisoformat(at[:26])}
        return Row((key,), {name: values[name] for name in dict.fromkeys((*query.key, *query.columns))})

    def table_id(self, table: TableRef) -> int | None:
        return 1

    def window(self, query: Query, span: Span, size: int, *, repeated: bool = False) -> Iterator[tuple[list[Row], str]]:
        place = (span.after, span.key)
        if repeated:
            while page := self._records(span, place)[:size]:
                place = page[-1]
                yield [Row(key, {}) for _, key in page], place[0]
            return
        while True:
            stamped = sorted((at, key) for key, (_, _, at) in self.data.rows.items() if at is not None)
            page = [(at, key) for at, key in stamped if at <= span.upto and _behind((at, key), place)][:size]
            if not page:
                return
            place = (page[-1][0], (page[-1][1],))
            yield self.rows(query, [(key,) for _, key in page]), page[-1][0]

    def record_types(self, query: Query, span: Span) -> tuple[dict[Value, int], int]:
        keys = [key for _, key in self._records(span, (span.after, span.key))]
        return dict(Counter(kind for _, kind in keys)), sum(key is None for key, _ in keys)

    def _records(self, span: Span, place: tuple[str, Key | None]) -> list[tuple[str, Key]]:
        """The delta table's, by time, key and type; as in HANA, NULL comes first."""
        records = [(at, (key, kind)) for at, key, kind in self.data.delta if at <= span.upto]
        return sorted((one for one in records if _order(one) > _order(place)), key=_order)

    def highest(self, query: Query, column: Column, least: str | None) -> str | None:
        assert query.table == self.data.delta_table.ref
        return max((at for at, _, _ in self.data.delta if least is None or at >= least), default=None)

    def tokens(self, query: Query, token: Token, size: int, *, values: bool = False) -> Iterator[list[Row]]:
        keys = sorted(self.data.rows)
        for start in range(0, len(keys), size):
            there = [key for key in keys[start : start + size] if key in self.data.rows]
            rows = self.rows(query, [(key,) for key in there]) if values else [Row((key,), {}) for key in there]
            yield [replace(row, token=self._token(query, token, key)) for row, key in zip(rows, there, strict=True)]

    def rows_with_tokens(self, query: Query, token: Token, keys: Sequence[Key]) -> list[Row]:
        rows = self.rows(query, keys)
        return [replace(row, token=self._token(query, token, int(row.key[0]))) for row in rows]  # type: ignore[arg-type]

    def _token(self, query: Query, token: Token, key: int) -> bytes:
        if token == "rowid":
            return self.data.ids[key].to_bytes(8, "big")
        return sha256(repr(self._row(query, key).values).encode()).digest()

    def row_ids(self, query: Query) -> tuple[int, int]:
        return max(self.data.ids.values(), default=0), len(self.data.ids)

    def check_log(self, query: Query, log: TableRef) -> None:
        if not self.data.logging:
            raise LogMissing("the log of S.CUSTOMER_NAMES has no column NAME1")

    def log_length(self, log: TableRef) -> int:
        return len(self.data.log)

    def log_entries(self, query: Query, log: TableRef, after: int, size: int) -> list[tuple[int, Key]]:
        return [(number, key) for number, key in sorted(self.data.log.items()) if number > after][:size]

    def forget(self, log: TableRef, ids: Sequence[int]) -> None:
        for number in ids:
            self.data.log.pop(number, None)


def _order(record: tuple[str, Key | None]) -> tuple[Any, ...]:
    at, key = record
    return (at, key is None, [(value is not None, value) for value in key or ()])


def _behind(at: tuple[str, int], place: tuple[str, Key | None]) -> bool:
    after, key = place
    return at[0] > after or (at[0] == after and key is not None and (at[1],) > key)  # type: ignore[operator]


_RECORD = 'INSERT INTO "ROWS_Delta" VALUES (?, ?, ?)'


@dataclass
class HanaTable:
    """The same in the emulator. `pool` has the schema of the table as its own."""

    pool: HanaPool
    schema: str
    connect: Callable[[], Any]
    clock: datetime = field(default_factory=lambda: second(0))
    open: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ref = TableRef(self.schema, "ROWS")
        columns = '"K" INTEGER PRIMARY KEY, "TXT" NVARCHAR(100), "GRP" NVARCHAR(3), "AT" TIMESTAMP'
        self.run(f'CREATE COLUMN TABLE "ROWS" ({columns})')
        self.run('CREATE COLUMN TABLE "ROWS_Delta" ("K" INTEGER, "Change_Type" NVARCHAR(1), "Change_Date" TIMESTAMP)')
        setup = installation(self.spec("log"), self.source.describe(self.ref))
        for _, sql, _ in setup:
            self.run(sql)

    def close(self) -> None:
        for connection in self.open:
            connection.rollback()
            connection.close()

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.pool.session() as session:
            if sql.startswith("SELECT"):
                return session.query(sql, values)
            session.execute(sql, values)
        return []

    @property
    def source(self) -> HanaSource:
        return _Clocked(self.pool, self)

    def spec(self, way: str, **more: Any) -> CollectionSpec:
        return _spec(self.ref, way, **more)

    def put(self, key: int, text: str | None, at: datetime | None, group: str = "G") -> None:
        known = bool(self.run('SELECT 1 FROM "ROWS" WHERE "K" = ?', key))
        self.run('UPSERT "ROWS" VALUES (?, ?, ?, ?) WITH PRIMARY KEY', key, text, group, stamp(at))
        self.record(key, record_types(known, bool(key % 2)), at)

    def record(self, key: int | None, types: str, at: datetime | None) -> None:
        for kind in types:
            self.run(_RECORD, key, kind, stamp(at or self.clock))

    def later(self, key: int, text: str | None, at: datetime | None, group: str = "G") -> Callable[[], None]:
        connection = self.connect()
        self.open.append(connection)
        connection.cursor().execute('INSERT INTO "ROWS" VALUES (?, ?, ?, ?)', (key, text, group, stamp(at)))
        connection.cursor().execute(_RECORD, (key, "I", stamp(at or self.clock)))

        def commit() -> None:
            connection.commit()

        return commit

    def delete(self, *keys: int, at: datetime | None = None) -> None:
        for key in keys:
            self.run('DELETE FROM "ROWS" WHERE "K" = ?', key)
            self.record(key, "D" if key % 2 else "X", at)

    def rekey(self, old: int, new: int, at: datetime | None) -> None:
        self.run('UPDATE "ROWS" SET "K" = ?, "AT" = ? WHERE "K" = ?', new, stamp(at), old)
        self.record(old, "D", at)
        self.record(new, "I", at)

    def truncate(self) -> None:
        self.run('TRUNCATE TABLE "ROWS"')
        self.record(None, "T", None)

    def texts(self) -> dict[int, str]:
        return dict(self.run('SELECT "K", "TXT" FROM "ROWS" WHERE "TXT" IS NOT NULL'))  # type: ignore[arg-type]

    def waiting(self) -> int:
        return int(self.run('SELECT COUNT(*) FROM "OWL_LOG_C"')[0][0])


class _Clocked(HanaSource):
    """The emulator's clock is that of the test."""

    def __init__(self, pool: HanaPool, table: HanaTable) -> None:
        super().__init__(pool)
        self._table = table

    def now(self) -> datetime:
        return self._table.clock


Changing = MemoryTable | HanaTable


def _spec(ref: TableRef, way: str, **more: Any) -> CollectionSpec:
    changes = replace(WAYS[way], **more)
    return CollectionSpec("c", ref, "{TXT}", metadata=("GRP",), changes=changes)


@dataclass
class Synced:
    """A changing table, a store, and one collection between them."""

    table: Changing
    store: VectorStore
    embedder: Embedder
    way: str

    def sync(self, way: str = "", change: dict[str, Any] | None = None, **options: Any) -> SyncReport:
        spec = self.table.spec(way or self.way, **(change or {}))
        report = sync(spec, Ends(self.table.source, self.store, self.embedder), replace(OPTIONS, **options))
        counted = report.upserted + report.unchanged + report.empty + report.quarantined + report.superseded
        assert report.read == counted, report
        return report

    def stored(self) -> dict[int, str]:
        found = (record for page in self.store.records("c") for record in page)
        return {int((record.id or "[]")[1:-1]): record.text or "" for record in found}

    def agrees(self) -> None:
        assert self.stored() == self.table.texts()
