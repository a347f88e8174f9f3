"""Filters as bound SQL: for HANA in the shapes of langchain-hana's HanaDB, for SQLite over its JSON functions. Values
are always parameters, names were checked by the parser. Sends nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from connector.stores.filters import (
    Between,
    Compare,
    Condition,
    Contains,
    Group,
    Guarded,
    IsNull,
    Kind,
    Like,
    OneOf,
    Operand,
    Term,
    contains,
    is_short,
    kind_of,
    like,
    read_boolean,
    read_date,
    read_number,
    terms,
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A SQL condition with its parameters in order. `projected`: metadata fields that the statement must offer as
    columns, under the names that `projection` gives (HANA's SCORE takes columns only)."""

    sql: str
    parameters: tuple[Any, ...]
    projected: tuple[str, ...] = ()

    @property
    def projection(self) -> str:
        """The columns for `WITH ... AS (SELECT *, <projection> FROM ...)`."""
        return ", ".join(f'{_json_value(name)} AS "META_{place}"' for place, name in enumerate(self.projected))


def _json_value(field: str) -> str:
    return f"JSON_VALUE(\"VEC_META\", '$.{field}')"


_HANA_VALUES = {
    Kind.BOOLEAN: "TO_BOOLEAN(?)",
    Kind.NUMBER: "TO_DOUBLE(?)",
    Kind.TEXT: "TO_NVARCHAR(?)",
    Kind.DATE: "TO_DATE(?)",
}


def to_hana(condition: Condition) -> Compiled:
    """The WHERE of langchain-hana's HanaDB, over column VEC_META."""
    if not isinstance(condition, Guarded):
        return _in_hana(condition, None)
    within = _in_hana(condition.within, None)
    if condition.where is None:
        return within
    where = _in_hana(condition.where, within)
    return Compiled(f"({within.sql}) AND ({where.sql})", within.parameters + where.parameters, where.projected)


def _in_hana(condition: Term | Group, within: Compiled | None) -> Compiled:
    """HANA evaluates the parts of a WHERE in any order. So what can fail at a value that is not of its kind is given
    no value of a row outside `within`: whatever the order, what fails and what does not tells nothing of those."""
    projected = tuple(sorted({term.field for term in terms(condition) if isinstance(term, Contains)}))

    def mask(term: Term) -> Compiled | None:
        return None if kind_of(term) is Kind.TEXT else within

    def compiled(term: Term) -> str:
        if isinstance(term, Contains):
            return f"SCORE(TO_NVARCHAR(?) IN (\"META_{projected.index(term.field)}\" EXACT SEARCH MODE 'text')) > 0"
        field = _json_value(term.field)
        if (seen := mask(term)) is not None:
            field = f"CASE WHEN {seen.sql} THEN {field} END"
        return _plain_term(term, field, _HANA_VALUES[kind_of(term)])

    def parameters(term: Term) -> list[Any]:
        seen = mask(term)
        return [*(() if seen is None else seen.parameters), *_hana_parameters(term)]

    return Compiled(_joined(condition, compiled), _parameters(condition, parameters), projected)


def _joined(condition: Term | Group, compiled: Callable[[Term], str]) -> str:
    if isinstance(condition, Group):
        return f" {condition.word} ".join(f"({_joined(part, compiled)})" for part in condition.parts)
    return compiled(condition)


def _parameters(condition: Condition, of: Callable[[Term], Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(value for term in terms(condition) for value in of(term))


def _operands(term: Term) -> tuple[Operand, ...]:
    match term:
        case Compare(operand=operand):
            return (operand,)
        case Between(low=low, high=high):
            return (low, high)
        case OneOf(operands=operands):
            return operands
        case Like(pattern=text) | Contains(phrase=text):
            return (Operand(Kind.TEXT, text),)
        case IsNull():
            return ()


def _hana_parameters(term: Term) -> list[Any]:
    return [
        ("true" if operand.value else "false") if operand.kind is Kind.BOOLEAN else operand.value
        for operand in _operands(term)
    ]


def _plain_term(term: Term, field: str, value: str) -> str:
    """The shapes that both databases share, given how to read the field and how to write a value."""
    match term:
        case Compare(operator=operator):
            return f"{field} {operator} {value}"
        case Between():
            return f"{field} BETWEEN {value} AND {value}"
        case OneOf(operands=operands, negated=negated):
            return f"{field} {'NOT IN' if negated else 'IN'} ({', '.join([value] * len(operands))})"
        case IsNull(negated=negated):
            return f"{field} IS {'NOT ' if negated else ''}NULL"
        case Like():
            return f"{field} LIKE {value}"
        case Contains():
            raise AssertionError("each database has its own shape")


_SQLITE_FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "owl_number": (1, read_number),
    "owl_boolean": (1, read_boolean),
    "owl_date": (1, read_date),
    "owl_real_text": (1, repr),
    "owl_contains": (2, contains),
    "owl_like": (2, like),
}
_UNREADABLE = "user-defined function raised exception"


def register(connection: sqlite3.Connection) -> None:
    """The functions that `to_sqlite` relies on. They give NULL for NULL."""
    for name, (arguments, function) in _SQLITE_FUNCTIONS.items():
        connection.create_function(name, arguments, _strict(function), deterministic=True)


def _strict(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        return None if None in values else function(*values)

    return call


def is_unreadable(error: sqlite3.Error) -> bool:
    """Whether SQLite failed because a stored value could not be read as the filter's kind."""
    return isinstance(error, sqlite3.OperationalError) and _UNREADABLE in str(error)


def to_sqlite(condition: Condition, column: str = "meta") -> Compiled:
    """A condition over the JSON in `column`, for a connection that went through `register`."""
    parameters = _parameters(condition, _sqlite_parameters)
    if isinstance(condition, Guarded):
        within = _in_sqlite(condition.within, column)
        where = "1" if condition.where is None else _in_sqlite(condition.where, column)
        # The order of an AND is SQLite's to choose; of a CASE it is not: `where` is never evaluated outside.
        return Compiled(f"CASE WHEN {within} THEN {where} ELSE 0 END", parameters)
    return Compiled(_in_sqlite(condition, column), parameters)


def _in_sqlite(condition: Term | Group, column: str) -> str:
    return _joined(condition, lambda term: _sqlite_term(term, column))


def _sqlite_parameters(term: Term) -> list[Any]:
    if isinstance(term, Like):
        return [_glob(term.pattern) if is_short(term.pattern) else term.pattern]
    return [int(operand.value) if operand.kind is Kind.BOOLEAN else operand.value for operand in _operands(term)]


def _glob(pattern: str) -> str:
    """LIKE's pattern for GLOB, which is case-sensitive and knows * ? [..]."""
    return "".join({"%": "*", "_": "?"}.get(char) or (f"[{char}]" if char in "*?[" else char) for char in pattern)


def _sqlite_term(term: Term, column: str) -> str:
    value = f"json_extract({column}, '$.{term.field}')"
    kind = f"json_type({column}, '$.{term.field}')"
    text = (
        f"CASE {kind} WHEN 'text' THEN {value} WHEN 'integer' THEN CAST({value} AS TEXT) "
        f"WHEN 'real' THEN owl_real_text({value}) WHEN 'true' THEN 'true' WHEN 'false' THEN 'false' END"
    )
    if isinstance(term, Contains):
        return f"owl_contains(?, {text})"
    if isinstance(term, Like):
        # GLOB compares each piece at each place; without the interpreter's lock, which a function of Python's takes.
        return f"({text}) GLOB ?" if is_short(term.pattern) else f"owl_like(?, {text})"
    return _plain_term(term, f"({_sqlite_read(kind_of(term), kind, value, text)})", "?")


def _sqlite_read(wanted: Kind, kind: str, value: str, text: str) -> str:
    match wanted:
        case Kind.NUMBER:
            return (
                f"CASE {kind} WHEN 'integer' THEN CAST({value} AS REAL) WHEN 'real' THEN {value} "
                f"ELSE owl_number({text}) END"
            )
        case Kind.BOOLEAN:
            return f"CASE {kind} WHEN 'true' THEN 1 WHEN 'false' THEN 0 ELSE owl_boolean({text}) END"
        case Kind.DATE:
            return f"owl_date({text})"
        case Kind.TEXT:
            return text
