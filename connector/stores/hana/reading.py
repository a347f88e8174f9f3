"""Rows of one vector table in HANA to be read by people and programs: by their ids, or a sample of all. Knows the pool
and the table's statements, no collection and no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from connector.hana.connection import HanaPool
from connector.model import Sample, StoredText
from connector.stores import filter_sql, filters, records
from connector.stores.hana.tables import VectorSql

LOOKUP_SIZES = (1, 8, 64, 512)
"""Ids per look-up statement: few sizes, so few statement texts in HANA's plan cache."""

Id = TypeVar("Id")


def portions(ids: Sequence[Id]) -> Iterator[list[Id]]:
    """All of them, in lists of LOOKUP_SIZES; the last id fills up the last list."""
    start = 0
    while start < len(ids):
        size = next((n for n in LOOKUP_SIZES if n >= len(ids) - start), LOOKUP_SIZES[-1])
        some = list(ids[start : start + size])
        yield some + [some[-1]] * (size - len(some))
        start += size


class HanaReading:
    def __init__(self, pool: HanaPool, table: VectorSql, condition: filters.Condition | None) -> None:
        """`condition`: the only rows that there are for who reads."""
        self._pool = pool
        self._table = table
        self._only = filter_sql.Compiled("", ()) if condition is None else filter_sql.to_hana(condition)

    def texts_of(self, ids: Sequence[str]) -> list[StoredText]:
        asked = records.AskedIds.of(ids)
        found = [
            *self._read(self._table.texts_of, asked.documents),
            *self._read(self._table.texts_of_foreign, asked.foreign),
        ]
        return records.in_order_of(ids, found)

    def _read(self, statement: Callable[[int, str], str], ids: Sequence[str] | Sequence[int]) -> Iterator[StoredText]:
        for some in portions(ids):
            sql = statement(len(some), self._only.sql)
            rows = self._pool.read(sql, (*some, *self._only.parameters), doing="reading rows")
            yield from map(_text, rows)

    def sample(self, count: int, *, texts: bool) -> Sample:
        doing, parameters = "reading a sample of rows", self._only.parameters
        (rows,) = self._pool.read(self._table.count_rows(self._only.sql), parameters, doing=doing)[0]
        chosen = self._pool.read(self._table.sample(count, self._only.sql, texts=texts), parameters, doing=doing)
        return Sample([_text(row) for row in chosen], max(rows, len(chosen)))


def _text(row: Sequence[Any]) -> StoredText:
    id_, key, number, text, meta = row
    return StoredText(
        id=f"{records.FOREIGN}{id_}" if key is None else key,
        number=number or 0,
        text=text or "",
        metadata=records.metadata_of(meta),
        record=id_,
    )
