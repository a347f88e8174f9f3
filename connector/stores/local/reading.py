"""Rows of the local store to be read by people and programs: by their ids, or a sample of all. Reads within the
transaction it is given; writes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from connector.model import Hit, Sample, StoredText
from connector.stores import filter_sql, filters, records
from connector.stores.local.records import IN_LIMIT
from connector.stores.records import SPREAD_FACTOR, SPREAD_MODULUS
from connector.stores.words import as_key_value

# What is put together below are constants, names that were checked, and places for parameters.
# ruff: noqa: S608


class Reading:
    """Of one collection. Nobody else writes to this store, so there are no foreign rows in it."""

    def __init__(self, db: sqlite3.Connection, collection: int, condition: filters.Condition | None) -> None:
        """`condition`: the only rows that there are for who reads."""
        self._db = db
        only = filter_sql.Compiled("", ()) if condition is None else filter_sql.to_sqlite(condition)
        self._where = "collection = ?" + (f" AND ({only.sql})" if only.sql else "")
        self._parameters = (collection, *only.parameters)

    def texts_of(self, ids: Sequence[str]) -> list[StoredText]:
        asked = records.AskedIds.of(ids).documents
        return records.in_order_of(ids, self._read("document", asked, texts=True))

    def sample(self, count: int, *, texts: bool) -> Sample:
        """In one pass, because a condition costs about 3 µs a row; 8 bytes a row meanwhile."""
        sql = f"SELECT id FROM records WHERE number = 0 AND {self._where}"
        ids = np.fromiter((id_ for (id_,) in self._db.execute(sql, self._parameters)), np.int64)
        spread = ids % SPREAD_MODULUS * SPREAD_FACTOR % SPREAD_MODULUS
        chosen = ids[np.lexsort((ids, spread))[:count]].tolist()
        found = {text.record: text for text in self._read("id", chosen, texts=texts)}
        return Sample([found[id_] for id_ in chosen], len(ids))

    def keyed(self, number: str, count: int) -> list[Hit]:
        whole = as_key_value(number)
        sql = (
            "SELECT document, text, meta, number, id FROM records "
            f"WHERE instr(document, ?) > 0 AND number = 0 AND {self._where} "
            f"ORDER BY NOT ({' OR '.join(['instr(document, ?) > 0'] * len(whole))}), document LIMIT ?"
        )
        rows = self._db.execute(sql, (number, *self._parameters, *whole, count))
        return [Hit(id_, 0.0, text, records.metadata_of(meta), *place) for id_, text, meta, *place in rows]

    def _read(self, column: str, ids: Sequence[Any], *, texts: bool) -> list[StoredText]:
        text = "text" if texts else "''"
        found: list[StoredText] = []
        for start in range(0, len(ids), IN_LIMIT):
            some = ids[start : start + IN_LIMIT]
            places = ", ".join("?" * len(some))
            sql = (
                f"SELECT document, number, {text}, meta, id FROM records WHERE {column} IN ({places}) AND {self._where}"
            )
            rows = self._db.execute(sql, (*some, *self._parameters))
            found += map(_text, rows)
        return found


def _text(row: Sequence[Any]) -> StoredText:
    return StoredText(row[0], row[1], row[2], records.metadata_of(row[3]), row[4])
