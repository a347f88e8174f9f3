"""One filter language for every store: parsed once into a small typed tree, then compiled to bound SQL for HANA (in the
shapes of langchain-hana's HanaDB) or SQLite (over its JSON functions). Values are always parameters; the parser checks
names.

    {"MTART": "FERT"}                              equal; several fields in one object: all of them
    {"PRIO": {"$gte": 2}}                          $eq $ne $lt $lte $gt $gte, one operator per field
    {"MTART": {"$in": ["FERT", "HALB"]}}           $nin likewise: at least one value, all of one type
    {"PRIO": {"$between": [1, 3]}}                 both ends included
    {"MAKTX": {"$like": "Pump%"}}                  % any text, _ one character, no escape, case-sensitive
    {"MAKTX": {"$contains": "ball bearing"}}       these adjacent whole words, in any case
    {"ERDAT": {"$gt": {"type": "date", "date": "2024-01-31"}}}
    {"LVORM": null}                                missing or null; {"$ne": null}: present
    {"$or": [{...}, {...}]}                        $and likewise; at least one operand

Semantics, the same for HANA and SQLite, and those of HANA's JSON_VALUE:
- A field that is missing, null, an object or an array is NULL. No comparison with NULL holds, not even `$ne` or `$nin`.
- The type of the given value decides: text compares with the field's JSON text (numbers as written, true and false in
  lower case) by code point; for a number, boolean or date, the field is read as that type (text "5" equals 5). All
  numbers are doubles.
- A stored value that cannot be read as that type raises BadFilter when the search meets it.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from enum import Enum
from functools import lru_cache
from typing import Any

from connector.errors import BadFilter
from connector.model import Filter, Order, Place

MAX_DEPTH = 5
MAX_TERMS = 100
MAX_IN = 1000
MAX_OPERANDS = 10_000  # limit for a whole filter; both databases limit a statement to about 32,000 parameters
MAX_TEXT = 5000  # in characters; the limit of NVARCHAR in HANA
LONGEST_PIECE = 100  # in characters between two %; a database compares such a piece at each position of a text


# -------------------------------------------------------------------------------------------------------- the tree


class Kind(Enum):
    """The type of the given value; the field is read as this type."""

    BOOLEAN = "boolean"
    NUMBER = "number"
    TEXT = "text"
    DATE = "date"


@dataclass(frozen=True, slots=True)
class Term:
    """One comparison. `values`: bool, finite float, str, or 'YYYY-MM-DD' for a date, all of one kind; () for null."""

    field: str
    operator: str
    values: tuple[bool | float | str, ...]
    kind: Kind = Kind.TEXT


@dataclass(frozen=True, slots=True)
class Group:
    """`word` is AND or OR."""

    word: str
    parts: tuple[Term | Group, ...]


@dataclass(frozen=True, slots=True)
class Guarded:
    """`where` (None: anything) restricted to the rows that match `within`, which cannot fail. Other rows never match,
    and their values cannot make `where` fail."""

    within: Term | Group
    where: Term | Group | None


Condition = Term | Group | Guarded


def terms(condition: Condition | None) -> Iterator[Term]:
    if isinstance(condition, Term):
        yield condition
    elif condition is not None:
        parts = condition.parts if isinstance(condition, Group) else (condition.within, condition.where)
        for part in parts:
            yield from terms(part)


def not_comparable(condition: Condition) -> BadFilter:
    """Return the error for a stored value that cannot be read as the filter's type."""
    typed = {f"{term.field} as {term.kind.value}" for term in terms(condition) if term.kind is not Kind.TEXT}
    return BadFilter(
        f"the filter compares {', '.join(sorted(typed)) or 'a field'}, but some stored values have another type: "
        "give a value of the type that is stored (text in quotes, numbers without)"
    )


# ---------------------------------------------------------------------------------------------------------- parsing

_COMPARISONS = {"$eq": "=", "$ne": "<>", "$lt": "<", "$lte": "<=", "$gt": ">", "$gte": ">="}
_GROUPS = {"$and": "AND", "$or": "OR"}
_FIELD_OPERATORS = (*_COMPARISONS, "$in", "$nin", "$between", "$like", "$contains")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,126}", re.ASCII)


def parse(where: Filter | None, names: Mapping[str, str] | None = None) -> Term | Group | None:
    """Return the tree of a filter, None for no filter (`None` or `{}`).

    `names` maps a source column to its metadata name if the two differ; a filter may use either. Raises BadFilter; the
    message starts with the path of the invalid part (`$and[1].MTART`).
    """
    if where is None or (isinstance(where, Mapping) and not where):
        return None
    return _Parser(names or {}).object(where, "", 0)


def narrowed(where: Filter | None, within: Filter | None, names: Mapping[str, str] | None = None) -> Condition | None:
    """Return the tree of `where` restricted to the rows of `within` (None: all). The limits of `parse` apply to each.
    Raises BadFilter, and ValueError if `within` is empty or could fail on a stored value."""
    asked = parse(where, names)
    if within is None:
        return asked
    seen = parse(within, names)
    if seen is None or any(term.kind is not Kind.TEXT for term in terms(seen)):
        raise ValueError("a row filter must compare texts only, and at least one")
    return Guarded(seen, asked)


class _Parser:
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._terms = 0
        self._operands = 0

    def object(self, node: Any, path: str, depth: int) -> Term | Group:
        if not isinstance(node, Mapping) or not node:
            raise _bad(path, f'expected an object such as {{"MTART": "FERT"}}, found {_shown(node)}')
        parts = tuple(self._entry(key, value, path, depth) for key, value in node.items())
        return parts[0] if len(parts) == 1 else Group("AND", parts)

    def _entry(self, key: Any, value: Any, path: str, depth: int) -> Term | Group:
        if not isinstance(key, str):
            raise _bad(path, f"a field name must be text, found {_shown(key)}")
        here = f"{path}.{key[:130]}" if path else key[:130]
        if key.startswith("$"):
            if key in _FIELD_OPERATORS:
                raise _bad(here, f'{key} belongs below a field name: {{"FIELD": {{"{key}": ...}}}}')
            if key not in _GROUPS:
                raise _unknown_operator(here, key)
            if depth >= MAX_DEPTH:
                raise _bad(here, f"nested deeper than {MAX_DEPTH} levels")
            if not isinstance(value, list | tuple) or not value:
                raise _bad(here, f"{key} takes a list of at least one filter, found {_shown(value)}")
            parts = tuple(self.object(part, f"{here}[{index}]", depth + 1) for index, part in enumerate(value))
            return parts[0] if len(parts) == 1 else Group(_GROUPS[key], parts)
        self._terms += 1
        if self._terms > MAX_TERMS:
            raise _bad(here, f"more than {MAX_TERMS} conditions")
        field, operator = self._names.get(key, key), "$eq"
        if _NAME.fullmatch(field) is None:
            raise _bad(here, "a field name has at most 127 letters, digits and _, and does not start with a digit")
        if isinstance(value, Mapping) and "type" not in value:
            if len(value) != 1:
                raise _bad(here, "one operator per field: join several with $and, or use $between")
            operator, value = next(iter(value.items()))
            here = f"{here}.{str(operator)[:40]}"
        return self._term(field, operator, value, here)

    def _term(self, field: str, operator: Any, value: Any, here: str) -> Term:
        if operator not in _FIELD_OPERATORS:
            raise _unknown_operator(here, operator)
        if value is None and operator in ("$eq", "$ne"):
            return Term(field, operator, ())
        if operator in ("$like", "$contains"):
            text = _text(value, here)
            if operator == "$like" and any(len(piece) > LONGEST_PIECE for piece in text.split("%")[1:]):
                raise _bad(here, f"at most {LONGEST_PIECE} characters from one % to the next")
            if operator == "$contains" and not text:
                raise _bad(here, "takes a non-empty text")
            return Term(field, operator, (text,))
        if operator not in ("$in", "$nin", "$between"):
            read = [self._operand(value, here)]
        elif not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_IN:
            raise _bad(here, f"takes a list of 1 to {MAX_IN} values, found {_shown(value)}")
        else:
            read = [self._operand(each, f"{here}[{index}]") for index, each in enumerate(value)]
        kind = read[0][0]
        if any(other is not kind for other, _ in read):
            raise _bad(here, "all values must be of one type")
        if operator == "$between" and (len(read) != 2 or kind is Kind.BOOLEAN):
            raise _bad(here, "takes two numbers, texts or dates: [lowest, highest]")
        if kind is Kind.BOOLEAN and operator in ("$lt", "$lte", "$gt", "$gte"):
            raise _bad(here, "true and false have no order: use $eq or $ne")
        return Term(field, operator, tuple(value for _, value in read), kind)

    def _operand(self, value: Any, here: str) -> tuple[Kind, bool | float | str]:
        self._operands += 1
        if self._operands > MAX_OPERANDS:
            raise _bad(here, f"more than {MAX_OPERANDS} values in one filter")
        match value:
            case bool():
                return Kind.BOOLEAN, value
            case int() | float():
                with suppress(OverflowError):
                    if math.isfinite(number := float(value)):
                        return Kind.NUMBER, number
                raise _bad(here, "a number must be finite")
            case str():
                return Kind.TEXT, _text(value, here)
            case {"type": "date", "date": str() as day, **rest} if not rest and len(day) == 10:
                try:
                    return Kind.DATE, date.fromisoformat(day).isoformat()
                except ValueError:
                    raise _bad(here, "not a date of the form 2024-01-31") from None
            case Mapping():
                raise _bad(here, 'a date is written {"type": "date", "date": "2024-01-31"}; no other object is a value')
            case _:
                raise _bad(here, f"expected text, a number, true, false or a date, found {_shown(value)}")


def _text(value: Any, here: str) -> str:
    if not isinstance(value, str):
        raise _bad(here, f"takes a text, found {_shown(value)}")
    if len(value) > MAX_TEXT:
        raise _bad(here, f"a text of more than {MAX_TEXT} characters")
    if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value):
        raise _bad(here, "a text with NUL or an unpaired surrogate")
    return value


def _bad(path: str, message: str) -> BadFilter:
    return BadFilter(f"filter at {path or 'the top'}: {message}")


def _unknown_operator(path: str, operator: Any) -> BadFilter:
    return _bad(path, f"unknown operator {str(operator)[:40]!r}; known are {' '.join((*_FIELD_OPERATORS, *_GROUPS))}")


def _shown(value: Any) -> str:
    """Return the type of an invalid value. The value itself may be confidential."""
    if isinstance(value, Mapping):
        return "an object" if value else "an empty object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text"}
    return names.get(type(value), type(value).__name__)


# ---------------------------------------------------------------------------------------- reading values, in Python

# Keep this pattern unambiguous: otherwise a long run of digits that does not match takes quadratic time.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DATE = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})(?=$|[ T])", re.ASCII)
_WORD = re.compile(r"[^\W_]+")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def _number_or_none(text: str) -> float | None:
    with suppress(ValueError):
        return read_number(text)
    return None


class Unreadable(ValueError):
    """A stored value cannot be read as the filter's kind."""


def read_number(text: str) -> float:
    if _NUMBER.fullmatch(text.strip()) and math.isfinite(number := float(text)):
        return number
    raise Unreadable


def _read_boolean(text: str) -> bool:
    try:
        return _BOOLEANS[text.strip().lower()]
    except KeyError:
        raise Unreadable from None


def _read_date(text: str) -> str:
    found = _DATE.match(text.strip())
    try:
        return date(*map(int, found.groups() if found else ())).isoformat()
    except (TypeError, ValueError):
        raise Unreadable from None


@lru_cache(maxsize=16)
def _spaced(text: str) -> str:
    """Return the words of a text, each between blanks; "" for a text without words. Cached, because many conditions of
    one filter may read the same text."""
    words = _WORD.findall(text.casefold())
    return f" {' '.join(words)} " if words else ""


def contains(phrase: str, text: str) -> bool:
    """Return whether `text` contains the words of `phrase` as adjacent whole words; False for an empty phrase."""
    wanted = _spaced(phrase)
    return bool(wanted) and wanted in _spaced(text)


# --------------------------------------------------------------------------------------------------------- bound SQL


@dataclass(frozen=True, slots=True)
class Compiled:
    """A SQL condition with its parameters in order. `projection`: metadata fields as columns, for
    `WITH ... AS (SELECT *, <projection> FROM ...)`, because HANA's SCORE takes only columns."""

    sql: str = ""
    parameters: tuple[Any, ...] = ()
    projection: str = ""

    @property
    def and_also(self) -> str:
        """Return ` AND (condition)` to append to another condition; "" if there is no condition."""
        return f" AND ({self.sql})" if self.sql else ""


def _json_value(field: str) -> str:
    return f"JSON_VALUE(\"VEC_META\", '$.{field}')"


def _joined(condition: Term | Group, compiled: Callable[[Term], str]) -> str:
    if isinstance(condition, Group):
        return f" {condition.word} ".join(f"({_joined(part, compiled)})" for part in condition.parts)
    return compiled(condition)


def _plain_term(term: Term, field: str, value: str) -> str:
    """Return SQL that both databases accept. `field` reads the field, `value` formats the given value."""
    if not term.values:
        return f"{field} IS {'NOT ' if term.operator == '$ne' else ''}NULL"
    if term.operator in ("$in", "$nin"):
        word = "NOT IN" if term.operator == "$nin" else "IN"
        return f"{field} {word} ({', '.join([value] * len(term.values))})"
    if term.operator == "$between":
        return f"{field} BETWEEN {value} AND {value}"
    return f"{field} {_COMPARISONS.get(term.operator, 'LIKE')} {value}"


_HANA_VALUES = {
    Kind.BOOLEAN: "TO_BOOLEAN(?)",
    Kind.NUMBER: "TO_DOUBLE(?)",
    Kind.TEXT: "TO_NVARCHAR(?)",
    Kind.DATE: "TO_DATE(?)",
}


def to_hana(condition: Condition) -> Compiled:
    """Return the WHERE of langchain-hana's HanaDB, over column VEC_META."""
    if not isinstance(condition, Guarded):
        return _in_hana(condition, None)
    within = _in_hana(condition.within, None)
    if condition.where is None:
        return within
    where = _in_hana(condition.where, within)
    return Compiled(f"({within.sql}) AND ({where.sql})", within.parameters + where.parameters, where.projection)


def _in_hana(condition: Term | Group, within: Compiled | None) -> Compiled:
    """Guard each term that can fail, because HANA evaluates a WHERE in any order. Such a term reads no value of a row
    outside `within`, so those rows affect neither its result nor its errors."""
    projected = sorted({term.field for term in terms(condition) if term.operator == "$contains"})
    parameters: list[Any] = []

    def compiled(term: Term) -> str:
        if term.operator == "$contains":
            parameters.extend(term.values)
            return f"SCORE(TO_NVARCHAR(?) IN (\"META_{projected.index(term.field)}\" EXACT SEARCH MODE 'text')) > 0"
        field = _json_value(term.field)
        if within is not None and term.kind is not Kind.TEXT:
            field = f"CASE WHEN {within.sql} THEN {field} END"
            parameters.extend(within.parameters)
        boolean = term.kind is Kind.BOOLEAN
        parameters.extend(("true" if value else "false") if boolean else value for value in term.values)
        return _plain_term(term, field, _HANA_VALUES[term.kind])

    projection = ", ".join(f'{_json_value(field)} AS "META_{place}"' for place, field in enumerate(projected))
    return Compiled(_joined(condition, compiled), tuple(parameters), projection)


_SQLITE_FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "owl_number": (1, read_number),
    "owl_number_or_null": (1, _number_or_none),
    "owl_boolean": (1, _read_boolean),
    "owl_date": (1, _read_date),
    "owl_real_text": (1, repr),
    "owl_contains": (2, contains),
}
_SQLITE_READS = {
    Kind.NUMBER: "CASE {kind} WHEN 'integer' THEN CAST({value} AS REAL) WHEN 'real' THEN {value} "
    "ELSE owl_number({text}) END",
    Kind.BOOLEAN: "CASE {kind} WHEN 'true' THEN 1 WHEN 'false' THEN 0 ELSE owl_boolean({text}) END",
    Kind.DATE: "owl_date({text})",
    Kind.TEXT: "{text}",
}
_GLOB = str.maketrans({"%": "*", "_": "?", "*": "[*]", "?": "[?]", "[": "[[]"})


def register(connection: sqlite3.Connection) -> None:
    """Register the functions that `to_sqlite` uses. They return NULL for NULL."""

    for name, (count, function) in _SQLITE_FUNCTIONS.items():
        connection.create_function(
            name, count, lambda *values, f=function: None if None in values else f(*values), deterministic=True
        )


def is_unreadable(error: sqlite3.Error) -> bool:
    """Return whether SQLite failed because a stored value could not be read as the filter's kind."""
    return isinstance(error, sqlite3.OperationalError) and "user-defined function raised exception" in str(error)


def _sqlite_text(field: str, column: str = "meta") -> str:
    value, kind = f"json_extract({column}, '$.{field}')", f"json_type({column}, '$.{field}')"
    return (
        f"CASE {kind} WHEN 'text' THEN {value} WHEN 'integer' THEN CAST({value} AS TEXT) "
        f"WHEN 'real' THEN owl_real_text({value}) WHEN 'true' THEN 'true' WHEN 'false' THEN 'false' END"
    )


def to_sqlite(condition: Condition, column: str = "meta") -> Compiled:
    """Return a condition over the JSON in `column`, for a connection prepared by `register`."""
    parameters: list[Any] = []

    def compiled(term: Term) -> str:
        value, kind = f"json_extract({column}, '$.{term.field}')", f"json_type({column}, '$.{term.field}')"
        text = _sqlite_text(term.field, column)
        if term.operator == "$like":  # as GLOB, which is case-sensitive
            parameters.append(str(term.values[0]).translate(_GLOB))
            return f"({text}) GLOB ?"
        parameters.extend(int(value) if term.kind is Kind.BOOLEAN else value for value in term.values)
        if term.operator == "$contains":
            return f"owl_contains(?, {text})"
        return _plain_term(term, f"({_SQLITE_READS[term.kind].format(kind=kind, value=value, text=text)})", "?")

    if not isinstance(condition, Guarded):
        return Compiled(_joined(condition, compiled), tuple(parameters))
    within = _joined(condition.within, compiled)
    where = "1" if condition.where is None else _joined(condition.where, compiled)
    # SQLite may reorder an AND but not a CASE, so `where` is never evaluated for rows outside `within`.
    return Compiled(f"CASE WHEN {within} THEN {where} ELSE 0 END", tuple(parameters))


# --------------------------------------------------------------------------------------------------- the order of rows

_SORTED_CHARACTERS = 200  # of a text; it bounds the size of a cursor
# What a double can hold without overflow. HANA converts only texts of this form, so that no value makes a sort fail.
_HANA_NUMBER = r"^-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?$"


def hana_place(order: Order) -> str:
    """Return SQL for the value that `order` sorts by, in HANA; '' for the order of ids. Raises BadFilter for a field
    that a filter could not name."""
    if order.field is None:
        return "''"
    parse({order.field: 1})
    value = _json_value(order.field)
    if order.numeric:
        return f"CASE WHEN {value} LIKE_REGEXPR '{_HANA_NUMBER}' THEN TO_DOUBLE({value}) END"
    return f"LEFT({value}, {_SORTED_CHARACTERS})"


def sqlite_place(order: Order) -> str:
    if order.field is None:
        return "''"
    parse({order.field: 1})
    text = _sqlite_text(order.field)
    return f"owl_number_or_null({text})" if order.numeric else f"substr({text}, 1, {_SORTED_CHARACTERS})"


def behind(order: Order, after: Place | None) -> Compiled:
    """Return the condition for rows behind `after`, over the columns ROW_ID and PLACE, with ORDER BY in `projection`.
    A row keeps its place while others come and go, so that pages neither repeat nor skip rows that stay."""
    down, sign = (" DESC", "<") if order.descending else ("", ">")
    ordered = f'"ROW_ID"{down}' if order.field is None else f'"PLACE"{down} NULLS LAST, "ROW_ID"{down}'
    if after is None:
        return Compiled("", (), ordered)
    later, value = f'"ROW_ID" {sign} ?', after.value
    if order.field is None:
        return Compiled(later, (after.id,), ordered)
    if value is None:
        return Compiled(f'"PLACE" IS NULL AND {later}', (after.id,), ordered)
    same = f'"PLACE" {sign} ? OR ("PLACE" = ? AND {later}) OR "PLACE" IS NULL'
    return Compiled(same, (value, value, after.id), ordered)
