"""Records of the local store by their ids: those that pass a filter, their texts and their vectors, and the best chunk
of each document. Reads within the transaction it is given; ranks nothing itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from connector.model import Hit, Vectors
from connector.stores import filter_sql, filters, records

IN_LIMIT = 500
"""Ids in one IN list: short statements that SQLite prepares once."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A record by its score, its text not yet read."""

    score: float
    document: str
    number: int
    record: int

    @property
    def rank(self) -> tuple[float, str, int]:
        return -self.score, self.document, self.number


def best_documents(candidates: Sequence[Candidate], k: int) -> list[Candidate]:
    """The best chunk of each of the best `k` documents."""
    best: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda one: one.rank):
        best.setdefault(candidate.document, candidate)
        if len(best) == k:
            break
    return list(best.values())


class Records:
    """Looks records up within one transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def candidates(self, scores: Mapping[int, float], condition: filters.Condition | None) -> list[Candidate]:
        """Those of the scored records that pass the filter, in no order."""
        sql = "SELECT document, number, id FROM records WHERE id IN ({})"
        parameters: tuple[Any, ...] = ()
        if condition is not None:
            compiled = filter_sql.to_sqlite(condition)
            sql, parameters = f"{sql} AND ({compiled.sql})", compiled.parameters
        return [Candidate(scores[row[2]], *row) for row in self._rows(sql, list(scores), parameters)]

    def with_vectors(
        self, ids: Sequence[int], condition: filters.Condition | None
    ) -> list[tuple[str, int, int, bytes]]:
        """Document, number, id and vector of those of the records that pass the filter, in no order."""
        sql = "SELECT document, number, id, vector FROM records JOIN vectors ON record = id WHERE id IN ({})"
        parameters: tuple[Any, ...] = ()
        if condition is not None:
            compiled = filter_sql.to_sqlite(condition)
            sql, parameters = f"{sql} AND ({compiled.sql})", compiled.parameters
        return [(row[0], row[1], row[2], row[3]) for row in self._rows(sql, ids, parameters)]

    def hits(self, best: Sequence[Candidate]) -> list[Hit]:
        """The same in the same order, with text and metadata."""
        sql = "SELECT id, text, meta FROM records WHERE id IN ({})"
        found = {row[0]: row[1:] for row in self._rows(sql, [candidate.record for candidate in best], ())}
        return [
            Hit(
                id=one.document,
                score=one.score,
                text=found[one.record][0],
                metadata=records.metadata_of(found[one.record][1]),
                number=one.number,
                record=one.record,
            )
            for one in best
        ]

    def vectors(self, ids: Sequence[int], dimension: int) -> Vectors:
        """In the order of `ids`, zeros where there is none."""
        found = dict(self._rows("SELECT record, vector FROM vectors WHERE record IN ({})", list(set(ids)), ()))
        gathered = np.zeros((len(ids), dimension), np.float32)
        for place, id_ in enumerate(ids):
            data = found.get(id_, b"")
            if len(data) == 4 * dimension:
                gathered[place] = np.frombuffer(data, dtype="<f4")
        return gathered

    def _rows(self, sql: str, ids: Sequence[int], parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(ids), IN_LIMIT):
            some = ids[start : start + IN_LIMIT]
            yield from self._db.execute(sql.format(", ".join("?" * len(some))), (*some, *parameters))
