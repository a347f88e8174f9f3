"""Read one collection of the HANA store: vector and keyword search, rows by id, samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from connector.errors import PermissionRefused, RowRejected, StatementFailed
from connector.hana.connection import HanaPool, Rows, Session
from connector.model import Filter, Hit, IndexUse, Sample, StoredText, Vectors
from connector.stores import filters, records
from connector.stores.hana.keywords import Keywords
from connector.stores.hana.state import Collection, Collections
from connector.stores.hana.tables import portions
from connector.stores.words import as_key_value

VECTORS_PAGE = 500
_INCONSISTENT = 266
_TIE_STEPS = 3
"""How often to read more rows only because they share the last score."""

_EXPLAINED = (
    'SELECT "OPERATOR_NAME", "OPERATOR_DETAILS" FROM EXPLAIN_PLAN_TABLE WHERE "STATEMENT_NAME" = ? '
    'ORDER BY "OPERATOR_ID"'
)
_FORGET_PLAN = 'DELETE FROM EXPLAIN_PLAN_TABLE WHERE "STATEMENT_NAME" = ?'

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HanaView:
    """A `View`."""

    collections: Collections
    words: Keywords
    collection: str
    generation: int | None
    row_filter: Filter | None

    def _read(self, where: Filter | None, read: Callable[[Collection, filters.Condition | None], T]) -> T:
        def in_generation(found: Collection) -> T:
            condition = filters.narrowed(where, self.row_filter, self.collections.names_of(found))
            with _filter_errors(condition):
                return read(found, condition)

        return self.collections.reading(self.collection, self.generation, in_generation)

    @property
    def pool(self) -> HanaPool:
        return self.collections.pool

    def search(
        self, vector: NDArray[np.float32], k: int, where: Filter | None = None, *, exact: bool = False
    ) -> list[Hit]:
        """Search in HANA: exact without an HNSW index, approximate with one. Never finds rows without a vector. If many
        rows share the last score, HANA chooses among them."""

        def read(found: Collection, condition: filters.Condition | None) -> list[Hit]:
            query = records.vector_text(records.unit_query(vector, found.stamp.dimension))
            compiled = _compiled(condition)

            def best(count: int) -> Rows:
                sql = found.table.search(count, compiled.sql, compiled.projection, exact=exact)
                return self.pool.read(sql, (query, *compiled.parameters), doing="searching")

            return _best(best, k)

        return self._read(where, read)

    def keyword(self, text: str, k: int, where: Filter | None = None) -> list[Hit]:
        """Search VEC_TEXT with HANA's text search, or LIKE if HANA rejects it; LIKE also finds parts of words. A word
        counts once per text."""

        def read(found: Collection, condition: filters.Condition | None) -> list[Hit]:
            if k < 1:
                return []
            within = _compiled(condition.within if isinstance(condition, filters.Guarded) else None)
            query = self.words.query(found.table, text, within)
            if query is None:
                return []
            compiled = _compiled(condition)

            def best(count: int) -> Rows:
                sql, parameters = query.statement(count, compiled)
                return self.pool.read(sql, parameters, doing="searching by words")

            return _best(best, k)

        return self._read(where, read)

    def keyed(self, number: str, count: int, where: Filter | None = None) -> list[Hit]:
        def read(found: Collection, condition: filters.Condition | None) -> list[Hit]:
            compiled, whole = _compiled(condition), as_key_value(number)
            sql = found.table.keyed(count, len(whole), compiled.sql, compiled.projection)
            parameters = [*(f"%{each}%" for each in (*whole, number)), *compiled.parameters]
            rows = self.pool.read(sql, parameters, doing="looking for a number in keys")
            return [_hit((*row[:5], 0.0)) for row in rows]

        return self._read(where, read)

    def texts(self, ids: Sequence[str]) -> list[StoredText]:
        asked = records.AskedIds.of(ids)

        def read(found: Collection, condition: filters.Condition | None) -> list[StoredText]:
            only, rows = _compiled(condition), list[StoredText]()

            def add(sql: str, some: Sequence[Any]) -> None:
                rows.extend(map(_text, self.pool.read(sql, (*some, *only.parameters), doing="reading rows")))

            for documents in portions(asked.documents):
                add(found.table.texts_of(len(documents), only.sql), documents)
            for foreign in portions(asked.foreign):
                add(found.table.texts_of_foreign(len(foreign), only.sql), foreign)
            return records.in_order_of(ids, rows)

        return self._read(None, read)

    def vectors(self, chunks: Sequence[Hit | StoredText]) -> Vectors:
        ids = [chunk.record for chunk in chunks]

        def read(found: Collection, _: filters.Condition | None) -> Vectors:
            dimension = found.stamp.dimension
            stored: dict[int, NDArray[np.float32] | None] = {}
            for start in range(0, len(ids), VECTORS_PAGE):
                some = list(dict.fromkeys(ids[start : start + VECTORS_PAGE]))
                rows = self.pool.read(found.table.vectors(len(some)), some, doing="reading the vectors of hits")
                stored |= {id_: records.from_fvecs(vector, dimension) for id_, vector in rows}
            gathered = np.zeros((len(ids), dimension), np.float32)
            for place, id_ in enumerate(ids):
                vector = stored.get(id_)
                if vector is not None:
                    gathered[place] = vector
            return gathered

        return self._read(None, read)

    def sample(self, count: int, *, texts: bool = True) -> Sample:
        def read(found: Collection, condition: filters.Condition | None) -> Sample:
            doing, only = "reading a sample of rows", _compiled(condition)
            (rows,) = self.pool.read(found.table.count_rows(only.sql), only.parameters, doing=doing)[0]
            chosen = self.pool.read(found.table.sample(count, only.sql, texts=texts), only.parameters, doing=doing)
            return Sample([_text(row) for row in chosen], max(rows, len(chosen)))

        return self._read(None, read)

    def index_use(self, k: int, where: Filter | None = None) -> IndexUse:
        """Ask HANA for the plan of the search."""
        doing, name = "explaining a search", f"OWL_{uuid4().hex}"

        def read(found: Collection, condition: filters.Condition | None) -> IndexUse:
            compiled = _compiled(condition)
            searched = found.table.search(max(k, 1), compiled.sql, compiled.projection)
            sql = f"EXPLAIN PLAN SET STATEMENT_NAME = '{name}' FOR {searched}"

            def explain(session: Session) -> Rows:
                session.execute(sql, doing=doing)
                rows = session.query(_EXPLAINED, (name,), doing=doing)
                session.execute(_FORGET_PLAN, (name,), doing=doing)
                return rows

            try:
                plan = self.pool.in_transaction(explain, doing=doing)
            except (StatementFailed, PermissionRefused) as error:
                return IndexUse(None, f"HANA does not explain the search (error {error.code})")
            operators = [(str(operator), str(details or "")) for operator, details in plan]
            for operator, details in operators:
                if "HNSW" in operator.upper() or "VECTOR INDEX" in operator.upper():
                    return IndexUse(True, f"{operator}: {details}" if details else operator)
            exact = [details for _, details in operators if "COSINE_SIMILARITY" in details]
            return IndexUse(False, exact[-1] if exact else "no operator of HANA's plan names a vector index")

        return self._read(where, read)


@contextmanager
def _filter_errors(condition: filters.Condition | None) -> Iterator[None]:
    try:
        yield
    except (RowRejected, StatementFailed) as error:
        if condition is not None and (isinstance(error, RowRejected) or error.code == _INCONSISTENT):
            raise filters.not_comparable(condition) from None
        raise


def _compiled(condition: filters.Condition | None) -> filters.Compiled:
    return filters.Compiled("", ()) if condition is None else filters.to_hana(condition)


def _best(read: Callable[[int], Rows], k: int) -> list[Hit]:
    """Return the best `k` documents. `read` returns the best records. Call it with larger counts until it returns `k`
    different documents."""
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


def _hit(row: Sequence[Any]) -> Hit:
    text = _text(row[:5])
    return Hit(text.id, float(row[5]), text.text, text.metadata, text.number, text.record)


def _text(row: Sequence[Any]) -> StoredText:
    record, key, number, text, meta = row
    id_ = f"{records.FOREIGN}{record}" if key is None else key
    return StoredText(id_, number or 0, text or "", records.metadata_of(meta), record)
