"""Read one collection of the HANA store: vector and keyword search, rows by id, samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from connector.errors import PermissionRefused, RowRejected, StatementFailed
from connector.hana.connection import HanaPool, Rows, Session
from connector.model import Filter, Hit, IndexUse, Sample, StoredText, Vectors
from connector.stores import filters, records
from connector.stores.hana import keywords
from connector.stores.hana.tables import Collections, as_hit, as_text, compiled, portions
from connector.stores.records import SPREAD_FACTOR, SPREAD_MODULUS
from connector.stores.state import Collection
from connector.stores.words import as_key_value

VECTORS_PAGE = 500
_INCONSISTENT = 266
_TIE_STEPS = 3
"""How often to read more rows only because they share the last score."""

_FIRST = '("CHUNK_NO" = 0 OR "SRC_KEY" IS NULL)'
"""One record per row: the first chunk of a document, and every foreign record."""

# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HanaView:
    """A `View`."""

    collections: Collections
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
            table, only = self.collections.table(found), compiled(condition)

            def best(count: int) -> Rows:
                sql = table.search(count, only.sql, only.projection, exact=exact)
                return self.pool.read(sql, (query, *only.parameters), doing="searching")

            return _best(best, k)

        return self._read(where, read)

    def keyword(self, text: str, k: int, where: Filter | None = None) -> list[Hit]:
        """Search VEC_TEXT with HANA's text search, or LIKE if HANA rejects it; LIKE also finds parts of words. A word
        counts once per text."""

        def read(found: Collection, condition: filters.Condition | None) -> list[Hit]:
            if k < 1:
                return []
            table, only = self.collections.table(found), compiled(condition)
            within = compiled(condition.within if isinstance(condition, filters.Guarded) else None)
            full_text = self.collections.searches_texts(lambda: keywords.probe(table))
            weighed = keywords.weigh(self.pool, table, text, full_text, within)
            if weighed is None:
                return []

            def best(count: int) -> Rows:
                return self.pool.read(
                    *keywords.statement(table, full_text, weighed, count, only), doing="searching by words"
                )

            return _best(best, k)

        return self._read(where, read)

    def keyed(self, number: str, count: int, where: Filter | None = None) -> list[Hit]:
        def read(found: Collection, condition: filters.Condition | None) -> list[Hit]:
            only, whole = compiled(condition), as_key_value(number)
            head, source = self.collections.table(found).projected(only.projection)
            first = " OR ".join(['"SRC_KEY" LIKE ?'] * len(whole))
            sql = (
                f'{head}SELECT TOP {count:d} "ID", "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META", '
                f'CASE WHEN {first} THEN 0 ELSE 1 END AS "PLACE" FROM {source} '
                f'WHERE "SRC_KEY" LIKE ? AND "CHUNK_NO" = 0{only.and_also} ORDER BY "PLACE", "SRC_KEY"'
            )
            parameters = [*(f"%{each}%" for each in (*whole, number)), *only.parameters]
            rows = self.pool.read(sql, parameters, doing="looking for a number in keys")
            return [as_hit((*row[:5], 0.0)) for row in rows]

        return self._read(where, read)

    def texts(self, ids: Sequence[str]) -> list[StoredText]:
        documents, foreign = records.asked_ids(ids)

        def read(found: Collection, condition: filters.Condition | None) -> list[StoredText]:
            only, texts = compiled(condition), list[StoredText]()
            table = self.collections.table(found)
            for column, ours, asked in (("SRC_KEY", "", documents), ("ID", ' AND "SRC_KEY" IS NULL', foreign)):
                for some in portions(asked):
                    sql = (
                        'SELECT "ID", "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META" '
                        f"FROM {table.sql} "
                        f'WHERE "{column}" IN ({", ".join("?" * len(some))}){ours}{only.and_also}'
                    )
                    texts += map(as_text, self.pool.read(sql, (*some, *only.parameters), doing="reading rows"))
            return records.in_order_of(ids, texts)

        return self._read(None, read)

    def vectors(self, chunks: Sequence[Hit | StoredText]) -> Vectors:
        ids = [chunk.record for chunk in chunks]

        def read(found: Collection, _: filters.Condition | None) -> Vectors:
            dimension = found.stamp.dimension
            stored: dict[int, NDArray[np.float32] | None] = {}
            for start in range(0, len(ids), VECTORS_PAGE):
                some = list(dict.fromkeys(ids[start : start + VECTORS_PAGE]))
                places = ", ".join("?" * len(some))
                sql = f'SELECT "ID", "VEC_VECTOR" FROM {self.collections.table(found).sql} WHERE "ID" IN ({places})'
                rows = self.pool.read(sql, some, doing="reading the vectors of hits")
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
            doing, only, text = "reading a sample of rows", compiled(condition), '"VEC_TEXT"' if texts else "''"
            source = f"FROM {self.collections.table(found).sql} WHERE {_FIRST}{only.and_also}"
            (rows,) = self.pool.read(f"SELECT COUNT(*) {source}", only.parameters, doing=doing)[0]
            sql = (
                f'SELECT TOP {count:d} "ID", "SRC_KEY", "CHUNK_NO", {text} AS "VEC_TEXT", "VEC_META" {source} '
                f'ORDER BY MOD(MOD("ID", {SPREAD_MODULUS}) * TO_BIGINT({SPREAD_FACTOR}), {SPREAD_MODULUS}), "ID"'
            )
            chosen = self.pool.read(sql, only.parameters, doing=doing)
            return Sample([as_text(row) for row in chosen], max(rows, len(chosen)))

        return self._read(None, read)

    def index_use(self, k: int, where: Filter | None = None) -> IndexUse:
        """Ask HANA for the plan of the search."""
        doing, name = "explaining a search", f"OWL_{uuid4().hex}"

        def read(found: Collection, condition: filters.Condition | None) -> IndexUse:
            only = compiled(condition)
            searched = self.collections.table(found).search(max(k, 1), only.sql, only.projection)
            plan_of = (
                'SELECT "OPERATOR_NAME", "OPERATOR_DETAILS" FROM EXPLAIN_PLAN_TABLE WHERE "STATEMENT_NAME" = ? '
                'ORDER BY "OPERATOR_ID"'
            )

            explained = f"EXPLAIN PLAN SET STATEMENT_NAME = '{name}' FOR {searched}"

            def explain(session: Session) -> Rows:
                session.execute(explained, doing=doing)
                rows = session.query(plan_of, (name,), doing=doing)
                session.execute('DELETE FROM EXPLAIN_PLAN_TABLE WHERE "STATEMENT_NAME" = ?', (name,), doing=doing)
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


def _best(read: Callable[[int], Rows], k: int) -> list[Hit]:
    """Return the best `k` documents. `read` returns the best records. Call it with larger counts until it returns `k`
    different documents."""
    if k < 1:
        return []
    count, ties = k + min(k, 50), 0
    while True:
        rows = read(count)
        scored = [row for row in rows if row[5] is not None]
        best = records.best_per_document(map(as_hit, scored), k)
        exhausted = len(rows) < count or len(scored) < len(rows)
        full = len(best) == k
        if exhausted or (full and (best[-1].score > scored[-1][5] or ties == _TIE_STEPS)):
            return best
        ties += full
        count *= 4
