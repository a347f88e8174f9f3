"""Search of the HANA store in one vector table: by vector, by words, narrowed by filters; and the vectors of what was
found. Knows the pool and the table's statements, no collection and no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from connector.errors import PermissionRefused, RowRejected, StatementFailed
from connector.hana.connection import HanaPool, Rows, Session
from connector.model import Hit, IndexUse, Vectors
from connector.stores import filter_sql, filters, records
from connector.stores.hana import keywords as hana_keywords
from connector.stores.hana import tables as hana_tables
from connector.stores.hana.tables import VectorSql
from connector.stores.words import as_key_value

VECTORS_PAGE = 500
_INCONSISTENT = 266
_TIE_STEPS = 3
"""How often a result is enlarged only because more rows share the last score."""


class HanaSearch:
    def __init__(self, pool: HanaPool, table: VectorSql) -> None:
        self._pool = pool
        self._table = table

    def nearest(
        self, vector: NDArray[np.float32], dimension: int, k: int, condition: filters.Condition | None
    ) -> list[Hit]:
        query = records.vector_text(records.unit_query(vector, dimension))
        compiled = _compiled(condition)

        def read(count: int) -> Rows:
            sql = self._table.search(count, compiled.sql, compiled.projection)
            return self._pool.read(sql, (query, *compiled.parameters), doing="searching")

        with _filter_errors(condition):
            return _best(read, k)

    def exact(self, vector: NDArray[np.float32], dimension: int, k: int) -> list[Hit]:
        """As `nearest` over all rows, without an index."""
        query = records.vector_text(records.unit_query(vector, dimension))
        return _best(lambda count: self._pool.read(self._table.exact(count), (query,), doing="searching exactly"), k)

    def index_use(self, k: int, condition: filters.Condition | None) -> IndexUse:
        """As HANA's plan of the search says."""
        compiled, name = _compiled(condition), f"OWL_{uuid4().hex}"
        sql = hana_tables.explain(name, self._table.search(max(k, 1), compiled.sql, compiled.projection))

        def ask(session: Session) -> Rows:
            session.execute(sql, doing="explaining a search")
            rows = session.query(hana_tables.EXPLAINED, (name,), doing="explaining a search")
            session.execute(hana_tables.FORGET_PLAN, (name,), doing="explaining a search")
            return rows

        try:
            plan = self._pool.in_transaction(ask, doing="explaining a search")
        except (StatementFailed, PermissionRefused) as error:
            return IndexUse(None, f"HANA does not explain the search (error {error.code})")
        operators = [(str(operator), str(details or "")) for operator, details in plan]
        for operator, details in operators:
            if "HNSW" in operator.upper() or "VECTOR INDEX" in operator.upper():
                return IndexUse(True, f"{operator}: {details}" if details else operator)
        exact = [details for _, details in operators if "COSINE_SIMILARITY" in details]
        return IndexUse(False, exact[-1] if exact else "no operator of HANA's plan names a vector index")

    def by_words(self, text: str, k: int, condition: filters.Condition | None, *, full_text: bool) -> list[Hit]:
        """`full_text`: whether HANA takes text search on these columns."""
        if k < 1:
            return []
        within = _compiled(condition.within if isinstance(condition, filters.Guarded) else None)
        query = hana_keywords.prepare(self._pool, self._table, text, within, full_text=full_text)
        if query is None:
            return []
        compiled = _compiled(condition)

        def read(count: int) -> Rows:
            sql, parameters = query.statement(count, compiled)
            return self._pool.read(sql, parameters, doing="searching by words")

        with _filter_errors(condition):
            return _best(read, k)

    def by_key(self, number: str, count: int, condition: filters.Condition | None) -> list[Hit]:
        compiled, whole = _compiled(condition), as_key_value(number)
        sql = self._table.keyed(count, len(whole), compiled.sql, compiled.projection)
        parameters = [*(f"%{each}%" for each in (*whole, number)), *compiled.parameters]
        with _filter_errors(condition):
            rows = self._pool.read(sql, parameters, doing="looking for a number in keys")
        return [_hit((*row[:5], 0.0)) for row in rows]

    def vectors(self, ids: Sequence[int], dimension: int) -> Vectors:
        """In the order of `ids`, zeros where there is none."""
        stored: dict[int, NDArray[np.float32] | None] = {}
        for start in range(0, len(ids), VECTORS_PAGE):
            some = list(dict.fromkeys(ids[start : start + VECTORS_PAGE]))
            rows = self._pool.read(self._table.vectors(len(some)), some, doing="reading the vectors of hits")
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


def _hit(row: Sequence[Any]) -> Hit:
    id_, key, number, text, meta, score = row
    return Hit(
        id=f"{records.FOREIGN}{id_}" if key is None else key,
        score=float(score),
        text=text or "",
        metadata=records.metadata_of(meta),
        number=number or 0,
        record=id_,
    )
