"""Plan and score top-k vector searches: a whole column at once, with NumPy.

Applies to SELECT TOP k ..., COSINE_SIMILARITY(column, constant) AS s FROM table [WHERE ...] ORDER BY s DESC. Other
statements call the scalar functions for each row, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlglot import exp

from hana_emulator.seam import Storage
from hana_emulator.sql.catalog.catalog import Relation
from hana_emulator.sql.query import expressions
from hana_emulator.sql.query.queries import SelectParts
from hana_emulator.sql.query.scope import Binding, Bound
from hana_emulator.sql.query.writes import Step, step
from hana_emulator.sql.storage.column_cache import Key
from hana_emulator.sql.storage.vectors import Column, Metric
from hana_emulator.types import VECTORS

SCORE_FUNCTION = "owl_score"
_ROWID = "_rowid_"
_METRICS = {metric.value: metric for metric in Metric}
Rowids = NDArray[np.int64]
Ranking = tuple[list[int], dict[int, float]]
Run = Callable[[str, Sequence[Storage]], list[tuple[Storage, ...]]]


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """The statements of one search. `final` takes the row's parameters and the chosen rowids as a JSON array."""

    key: Key
    metric: Metric
    descending: bool
    query: Step
    filter: Step | None
    final: str
    limit: str
    offset: str

    def wanted(self, row: Sequence[Storage]) -> int:
        """The number of best rows that the result can need."""
        return _number(self.limit, row) + (_number(self.offset, row) if self.offset else 0)


def _number(text: str, row: Sequence[Storage]) -> int:
    value = row[int(text[1:]) - 1] if text.startswith("?") else int(text)
    return value if isinstance(value, int) and value >= 0 else 0


def plan_search(binding: Binding, node: exp.Expr, parts: SelectParts, parameters: int) -> SearchPlan | None:
    """Plan a bound SELECT of the shape in the module docstring; None for other statements."""
    relation = _single_table(binding, node, parts)
    if relation is None or not parts.limit:
        return None
    ranking = _ranking(node, parts)
    if ranking is None:
        return None
    call, descending = ranking
    column, constant = _operands(binding, parts, call)
    text = parts.scope.trace.get(id(call), "")
    if column is None or constant is None or not text or text in parts.where:
        return None
    alias = parts.scope.sources[0].alias
    assert column.column is not None
    # `final` is the statement over the chosen rows, with each score looked up instead of computed.
    where, parts.where = parts.where, f"{alias}.{_ROWID} IN (SELECT value FROM json_each(?{parameters + 1}))"
    final = parts.render().replace(text, f"{SCORE_FUNCTION}({alias}.{_ROWID})")
    parts.where = where
    return SearchPlan(
        key=(relation.table_key, column.column.name),
        metric=_METRICS[str(call.this).upper()],
        descending=descending,
        query=step(f"SELECT {constant.sql}"),
        filter=step(f"SELECT {alias}.{_ROWID} FROM {parts.source} WHERE {parts.where}") if parts.where else None,
        final=final,
        limit=parts.limit,
        offset=parts.offset,
    )


def _single_table(binding: Binding, node: exp.Expr, parts: SelectParts) -> Relation | None:
    busy = any(node.args.get(part) for part in ("with_", "joins", "group", "having", "distinct"))
    if busy or parts.scope.aggregates or len(parts.scope.sources) != 1:
        return None
    table = node.args["from_"].this
    if not isinstance(table, exp.Table) or not isinstance(table.this, exp.Identifier):
        return None
    schema = expressions.identifier(table.args.get("db")) or binding.schema
    relation = binding.catalog.find(schema, expressions.identifier(table.this))
    if relation is None or relation.is_view or relation.is_shared_by_sessions:
        return None
    if relation.hides_rowid:
        return None
    return relation


def _ranking(node: exp.Expr, parts: SelectParts) -> tuple[exp.Anonymous, bool] | None:
    """The vector function that is the first sort key, and whether the order is descending."""
    order = node.args.get("order")
    if order is None:
        return None
    first = order.expressions[0]
    descending = bool(first.args.get("desc"))
    if bool(first.args.get("nulls_first")) is descending:
        return None
    key = first.this
    if parts.order[0].split(" ")[0].isdigit():
        position = int(parts.order[0].split(" ")[0])
        if len(node.expressions) != len(parts.items):
            return None
        key = node.expressions[position - 1]
    key = key.this if isinstance(key, exp.Alias) else key
    if isinstance(key, exp.Anonymous) and str(key.this).upper() in _METRICS and len(key.expressions) == 2:
        return key, descending
    return None


def _operands(binding: Binding, parts: SelectParts, call: exp.Anonymous) -> tuple[Bound | None, Bound | None]:
    column = constant = None
    for argument in call.expressions:
        bound = expressions.bind(binding, parts.scope, argument, None)
        if bound.column is not None and bound.type is not None and bound.type.code in VECTORS:
            column = bound
        elif bound.constant:
            constant = bound
    return column, constant


def rank(plan: SearchPlan, vectors: Callable[[], Column], run: Run, row: Sequence[Storage]) -> Ranking | None:
    """Choose the best rows and their scores, including ties at the last place for further sort keys to decide; a row
    without a vector has no score.
    Return None for a NULL query vector; the scalar functions then score each row as NULL."""
    ((query,),) = run(plan.query.sql, row[: plan.query.parameters])
    if not isinstance(query, bytes):
        return None

    column = vectors()
    rowids, scores = column.scores(query, plan.metric)
    nulls = column.nulls
    if plan.filter is not None:
        found = np.array(run(plan.filter.sql, row[: plan.filter.parameters]), dtype=np.int64).reshape(-1)
        keep = np.isin(rowids, found)
        rowids, scores, nulls = rowids[keep], scores[keep], nulls[np.isin(nulls, found)]
    best = _best(scores, plan.wanted(row), descending=plan.descending)
    chosen = rowids[best].tolist()
    scored = dict(zip(chosen, scores[best].tolist(), strict=True))
    # As in HANA, rows without a vector come last in descending order and first in ascending order.
    needless = plan.descending and len(chosen) >= plan.wanted(row)
    return (chosen if needless else chosen + nulls.tolist()), scored


def _best(scores: NDArray[np.float32], wanted: int, *, descending: bool) -> NDArray[np.intp]:
    keys = -scores if descending else scores
    if wanted >= len(keys):
        return np.arange(len(keys))
    if wanted <= 0:
        return np.zeros(0, np.intp)
    return np.flatnonzero(keys <= np.partition(keys, wanted - 1)[wanted - 1])
