"""Decide whether HANA would use an HNSW index for a vector search, by its documented rules.

The index must match the function and direction of SELECT TOP k ... ORDER BY function(column, vector) on one table, and
no hint may forbid it. WHERE is allowed, although HANA does not document whether it prevents use of the index.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlglot import exp

from hana_emulator.sql.catalog.catalog import Catalog, Index, Relation
from hana_emulator.sql.query.expressions import identifier, unwrapped

NO_INDEX_HINT = "NO_VECTOR_INDEX"
_DESCENDING = {"COSINE_SIMILARITY": True, "L2DISTANCE": False}


@dataclass(frozen=True, slots=True)
class VectorUse:
    """How HANA runs a vector search: through an index, or exactly, with the reasons."""

    function: str
    column: str
    index: Index | None
    reasons: tuple[str, ...]

    @property
    def properties(self) -> str:
        if self.index is None:
            return "EXACT VECTOR SEARCH"
        return f"VECTOR INDEX: {self.index.schema}.{self.index.name}"

    @property
    def details(self) -> str:
        search = f"{self.function} on {self.column}"
        if self.index is None:
            return f"{search}: exact search, since {', '.join(self.reasons)}"
        return f"{search}: HNSW index {self.index.schema}.{self.index.name}"


def use(catalog: Catalog, select: exp.Select, relation: Relation | None, hints: frozenset[str]) -> VectorUse | None:
    """Return None unless the SELECT reads only `relation` and sorts by a vector function of one of its columns."""
    order = select.args.get("order")
    if order is None or relation is None or relation.is_view or select.args.get("joins"):
        return None
    first = order.expressions[0]
    call = _call(select, first.this)
    column = _vector_column(relation, call) if call is not None else None
    if call is None or column is None:
        return None
    function = str(call.this).upper()
    descending = bool(first.args.get("desc"))
    reasons = [*_shape(select), *([f"the hint {NO_INDEX_HINT} forbids an index"] if NO_INDEX_HINT in hints else [])]
    if descending is not _DESCENDING[function]:
        reasons.append(f"{function} is sorted {'descending' if descending else 'ascending'}")
    indexes = [i for i in catalog.indexes_of(relation) if i.similarity and i.columns == (column,)]
    fitting = [index for index in indexes if index.similarity == function]
    if not indexes:
        reasons.append(f"{column} has no HNSW index")
    elif not fitting:
        reasons.append(f"the HNSW index of {column} is for {indexes[0].similarity}")
    return VectorUse(function, column, fitting[0] if fitting and not reasons else None, tuple(reasons))


def _shape(select: exp.Select) -> list[str]:
    reasons = [] if select.args.get("limit") is not None else ["there is neither TOP nor LIMIT"]
    if len(select.args["order"].expressions) > 1:
        reasons.append("there are further sort keys")
    if any(select.args.get(part) is not None for part in ("group", "having", "distinct")):
        reasons.append("rows are grouped")
    return reasons


def _call(select: exp.Select, key: exp.Expr) -> exp.Anonymous | None:
    """The vector function of a sort key: written there, or referred to by alias or position."""
    key = unwrapped(key)
    if isinstance(key, exp.Literal) and not key.is_string and 1 <= int(key.this) <= len(select.expressions):
        key = select.expressions[int(key.this) - 1]
    elif isinstance(key, exp.Column):
        name = identifier(key.this)
        named = [e for e in select.expressions if isinstance(e, exp.Alias) and identifier(e.args["alias"]) == name]
        key = named[0] if named else key
    key = unwrapped(key.this if isinstance(key, exp.Alias) else key)
    known = isinstance(key, exp.Anonymous) and str(key.this).upper() in _DESCENDING and len(key.expressions) == 2
    return key if known and isinstance(key, exp.Anonymous) else None


def _vector_column(relation: Relation, call: exp.Anonymous) -> str | None:
    """The only argument that is a column of the table, if the other argument depends on no column."""
    columns = [unwrapped(argument) for argument in call.expressions]
    names = [identifier(node.this) for node in columns if isinstance(node, exp.Column)]
    others = [node for node in columns if not isinstance(node, exp.Column)]
    if len(names) != 1 or any(node.find(exp.Column) is not None for node in others):
        return None
    return names[0] if any(column.name == names[0] for column in relation.columns) else None
