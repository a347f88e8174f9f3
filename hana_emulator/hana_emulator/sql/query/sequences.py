"""NEXTVAL and CURRVAL of sequences in statements."""

from __future__ import annotations

from sqlglot import exp

from hana_emulator.errors import HanaError
from hana_emulator.sql.language.names import hana_identifier, literal
from hana_emulator.sql.query.scope import Binding, Bound, Scope
from hana_emulator.types import BIGINT

_PSEUDO_COLUMNS = ("NEXTVAL", "CURRVAL")


def mentioned(node: exp.Expr) -> bool:
    """Whether `node` may contain NEXTVAL or CURRVAL."""
    return any(column.name.upper() in _PSEUDO_COLUMNS and column.table for column in node.find_all(exp.Column))


def _is_column(scope: Scope, name: str, table: str, schema: str) -> bool:
    try:
        scope.resolve(name, table, schema)
    except HanaError:
        return False
    return True


def bind(binding: Binding, scope: Scope, name: str, table: str, schema: str) -> Bound | None:
    """Bind sequence.NEXTVAL or sequence.CURRVAL; None for other columns. Raises HanaError 313."""
    if name not in _PSEUDO_COLUMNS or not table or _is_column(scope, name, table, schema):
        return None
    sequence = binding.catalog.objects.sequences.get((schema or binding.schema, table))
    if sequence is None:
        raise HanaError(313, f"invalid sequence: {hana_identifier(table)}")
    label = literal(sequence.name)
    if name == "CURRVAL":
        return Bound(f"owl_currval({sequence.id}, {label})", BIGINT, nullable=False)
    values = (
        sequence.start, sequence.increment, sequence.minimum, sequence.maximum, int(sequence.cycles), sequence.version
    )  # fmt: skip
    text = ", ".join(map(str, values))
    return Bound(f"owl_nextval({sequence.id}, {label}, {text})", BIGINT, nullable=False)
