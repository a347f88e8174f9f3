"""One filter language for every store: parsed once into a small typed tree, then compiled to bound SQL for HANA or
SQLite (`filter_sql`), or evaluated here in Python. Names are always checked. Knows no SQL.

    {"MTART": "FERT"}                              equal; several fields in one object: all of them
    {"PRIO": {"$gte": 2}}                          $eq $ne $lt $lte $gt $gte, one operator per field
    {"MTART": {"$in": ["FERT", "HALB"]}}           $nin likewise: at least one value, all of one type
    {"PRIO": {"$between": [1, 3]}}                 both ends included
    {"MAKTX": {"$like": "Pump%"}}                  % any text, _ one character, no escape, case-sensitive
    {"MAKTX": {"$contains": "ball bearing"}}       these adjacent whole words, in any case
    {"ERDAT": {"$gt": {"type": "date", "date": "2024-01-31"}}}
    {"LVORM": null}                                missing or null; {"$ne": null}: present
    {"$or": [{...}, {...}]}                        $and likewise; at least one operand

Semantics, the same in all three forms and those of HANA's JSON_VALUE:
- A field that is missing, null, an object or an array is NULL. No comparison with NULL holds, not even `$ne` or `$nin`.
- The type of the given value decides: text compares with the field's JSON text (numbers as written, true and false in
  lower case) by code point; a number, boolean or date makes the field be read as one (text "5" equals 5). All numbers
  are doubles.
- A field that cannot be read so is an error of the filter (BadFilter), where it is met.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from connector.errors import BadFilter
from connector.model import Filter

MAX_DEPTH = 5
MAX_TERMS = 100
MAX_IN = 1000
MAX_OPERANDS = 10_000
"""In all; both databases bound the parameters of a statement at about 32,000."""
MAX_TEXT = 5000
"""Characters; NVARCHAR's limit in HANA."""
LONGEST_PIECE = 100
"""Characters between two % of a pattern that a search may try at each place of a text. Longer pieces are found in other
ways, which know no _: so this is also the most characters of a pattern's pieces with _ between two %."""

T = TypeVar("T")


# -------------------------------------------------------------------------------------------------------- the tree


class Kind(Enum):
    """The type of the given value; the field is read as the same type."""

    BOOLEAN = "boolean"
    NUMBER = "number"
    TEXT = "text"
    DATE = "date"


@dataclass(frozen=True, slots=True)
class Operand:
    """`value` is a bool, a finite float, a str, or 'YYYY-MM-DD' for a date."""

    kind: Kind
    value: bool | float | str


@dataclass(frozen=True, slots=True)
class Compare:
    """`operator` is one of = <> < <= > >=."""

    field: str
    operator: str
    operand: Operand


@dataclass(frozen=True, slots=True)
class Between:
    field: str
    low: Operand
    high: Operand


@dataclass(frozen=True, slots=True)
class OneOf:
    field: str
    operands: tuple[Operand, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class IsNull:
    field: str
    negated: bool


@dataclass(frozen=True, slots=True)
class Like:
    field: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Contains:
    field: str
    phrase: str


@dataclass(frozen=True, slots=True)
class Group:
    """`word` is AND or OR."""

    word: str
    parts: tuple[Term | Group, ...]


@dataclass(frozen=True, slots=True)
class Guarded:
    """`where` (None: anything) among the rows that match `within`, which cannot fail. The others have no effect: they
    do not match, and `where` does not fail at their values."""

    within: Term | Group
    where: Term | Group | None


Term = Compare | Between | OneOf | IsNull | Like | Contains
Condition = Term | Group | Guarded


def terms(condition: Condition) -> Iterator[Term]:
    match condition:
        case Group(parts=parts):
            for part in parts:
                yield from terms(part)
        case Guarded(within=within, where=where):
            yield from terms(within)
            if where is not None:
                yield from terms(where)
        case _:
            yield condition


def kind_of(term: Term) -> Kind:
    match term:
        case Compare(operand=operand) | Between(low=operand):
            return operand.kind
        case OneOf(operands=operands):
            return operands[0].kind
        case _:
            return Kind.TEXT


def not_comparable(condition: Condition) -> BadFilter:
    """Return the error for a stored value that cannot be read as the filter's type."""
    typed = {f"{term.field} as {kind_of(term).value}" for term in terms(condition) if kind_of(term) is not Kind.TEXT}
    return BadFilter(
        f"the filter compares {', '.join(sorted(typed)) or 'a field'}, but some stored values cannot be read so: "
        "give a value of the type that is stored (text in quotes, numbers without)"
    )


# ---------------------------------------------------------------------------------------------------------- parsing

_COMPARISONS = {"$eq": "=", "$ne": "<>", "$lt": "<", "$lte": "<=", "$gt": ">", "$gte": ">="}
_GROUPS = {"$and": "AND", "$or": "OR"}
_FIELD_OPERATORS = (*_COMPARISONS, "$in", "$nin", "$between", "$like", "$contains")
_OPERATORS = (*_FIELD_OPERATORS, *_GROUPS)
_LIKENED = 130
"""Characters of a wrong name that are compared with known ones: a body may have one of megabytes."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,126}", re.ASCII)


def parse(where: Filter | None, names: Mapping[str, str] | None = None) -> Term | Group | None:
    """Return the tree of a filter, None for no filter (`None` or `{}`).

    `names` maps a source column to its name in the metadata, where the two differ; both may be used in filters.
    Raises BadFilter whose message begins with the path of the fault (`$and[1].MTART`).
    """
    if where is None or (isinstance(where, Mapping) and not where):
        return None
    return _Parser(names or {}).object(where, "", 0)


def narrowed(where: Filter | None, within: Filter | None, names: Mapping[str, str] | None = None) -> Condition | None:
    """Return the tree of `where` restricted to the rows of `within` (None: all). Each has the limits of `parse`. Raises
    BadFilter, and ValueError for a `within` that is empty or might fail at a stored value.
    """
    asked = parse(where, names)
    if within is None:
        return asked
    seen = parse(within, names)
    if seen is None or any(kind_of(term) is not Kind.TEXT for term in terms(seen)):
        raise ValueError("what may be seen is told by comparisons with texts, at least one: no other is safe")
    return Guarded(seen, asked)


def fields(where: Filter | None, names: Mapping[str, str] | None = None) -> list[str]:
    """Return the metadata names that a filter compares; `names` as for `parse`. Raises BadFilter."""
    condition = parse(where, names)
    return [] if condition is None else [term.field for term in terms(condition)]


def texts_compared(where: Filter | None, names: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield each text that a filter compares with its metadata name, without patterns and phrases. Raises BadFilter."""
    condition = parse(where, names)
    for term in () if condition is None else terms(condition):
        match term:
            case Compare(operand=operand):
                operands: tuple[Operand, ...] = (operand,)
            case Between(low=low, high=high):
                operands = low, high
            case OneOf(operands=several):
                operands = several
            case _:
                operands = ()
        yield from (
            (term.field, each.value) for each in operands if each.kind is Kind.TEXT and isinstance(each.value, str)
        )


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
            return self._group(key, value, here, depth)
        self._terms += 1
        if self._terms > MAX_TERMS:
            raise _bad(here, f"more than {MAX_TERMS} conditions")
        return self._term(self._field(key, here), value, here)

    def _group(self, key: str, value: Any, here: str, depth: int) -> Term | Group:
        if key in _FIELD_OPERATORS:
            raise _bad(here, f'{key} stands under a field name: {{"FIELD": {{"{key}": ...}}}}')
        if key not in _GROUPS:
            raise _unknown_operator(here, key)
        if depth >= MAX_DEPTH:
            raise _bad(here, f"nested deeper than {MAX_DEPTH} levels")
        if not isinstance(value, list | tuple) or not value:
            raise _bad(here, f"{key} takes a list of at least one filter, found {_shown(value)}")
        parts = tuple(self.object(part, f"{here}[{index}]", depth + 1) for index, part in enumerate(value))
        return parts[0] if len(parts) == 1 else Group(_GROUPS[key], parts)

    def _field(self, key: str, here: str) -> str:
        name = self._names.get(key, key)
        if _NAME.fullmatch(name) is None:
            near = get_close_matches(key[:_LIKENED], list(self._names), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise _bad(here, f"a field name has up to 127 letters, digits and _, no digit first{hint}")
        return name

    def _term(self, field: str, value: Any, here: str) -> Term:
        if not isinstance(value, Mapping) or "type" in value:
            return self._compare(field, "$eq", value, here)
        if len(value) != 1:
            raise _bad(here, "one operator per field: join several with $and, or use $between")
        operator, operand = next(iter(value.items()))
        return self._operation(field, operator, operand, f"{here}.{str(operator)[:40]}")

    def _operation(self, field: str, operator: Any, value: Any, here: str) -> Term:
        match operator:
            case str() if operator in _COMPARISONS:
                return self._compare(field, operator, value, here)
            case "$in" | "$nin":
                return OneOf(field, self._operands_of(value, here), operator == "$nin")
            case "$between":
                ends = self._operands_of(value, here)
                if len(ends) != 2 or ends[0].kind is Kind.BOOLEAN:
                    raise _bad(here, "takes two numbers, texts or dates: [lowest, highest]")
                return Between(field, ends[0], ends[1])
            case "$like":
                return Like(field, self._pattern(value, here))
            case "$contains":
                return Contains(field, self._text(value, here, empty=False))
            case _:
                raise _unknown_operator(here, operator)

    def _compare(self, field: str, operator: str, value: Any, here: str) -> Term:
        if value is None and operator in ("$eq", "$ne"):
            return IsNull(field, negated=operator == "$ne")
        operand = self._operand(value, here)
        if operand.kind is Kind.BOOLEAN and operator not in ("$eq", "$ne"):
            raise _bad(here, "true and false have no order: use $eq or $ne")
        return Compare(field, _COMPARISONS[operator], operand)

    def _operands_of(self, values: Any, here: str) -> tuple[Operand, ...]:
        if not isinstance(values, list | tuple) or not 1 <= len(values) <= MAX_IN:
            raise _bad(here, f"takes a list of 1 to {MAX_IN} values, found {_shown(values)}")
        operands = tuple(self._operand(value, f"{here}[{index}]") for index, value in enumerate(values))
        if len({operand.kind for operand in operands}) > 1:
            raise _bad(here, "all values must be of one type")
        return operands

    def _operand(self, value: Any, here: str) -> Operand:
        self._operands += 1
        if self._operands > MAX_OPERANDS:
            raise _bad(here, f"more than {MAX_OPERANDS} values in one filter")
        match value:
            case bool():
                return Operand(Kind.BOOLEAN, value)
            case int() | float():
                return Operand(Kind.NUMBER, _finite(value, here))
            case str():
                return Operand(Kind.TEXT, self._text(value, here))
            case {"type": "date", **rest} if set(rest) == {"date"}:
                return Operand(Kind.DATE, _day(rest["date"], here))
            case Mapping():
                raise _bad(here, 'a date is written {"type": "date", "date": "2024-01-31"}; no other object is a value')
            case _:
                raise _bad(here, f"expected text, a number, true, false or a date, found {_shown(value)}")

    def _pattern(self, value: Any, here: str) -> str:
        pattern = self._text(value, here)
        gapped = sum(len(piece) for piece in pattern.split("%")[1:-1] if "_" in piece)
        if gapped > LONGEST_PIECE:
            raise _bad(
                here,
                f"the parts with _ between two % have {gapped} characters together; at most {LONGEST_PIECE} are "
                "allowed: write out more characters, or use fewer _",
            )
        return pattern

    @staticmethod
    def _text(value: Any, here: str, *, empty: bool = True) -> str:
        if not isinstance(value, str) or (not value and not empty):
            raise _bad(here, f"takes {'a' if empty else 'a non-empty'} text, found {_shown(value)}")
        if len(value) > MAX_TEXT:
            raise _bad(here, f"a text of more than {MAX_TEXT} characters")
        if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value):
            raise _bad(here, "a text with NUL or half a character in it")
        return value


def _finite(value: float, here: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _bad(here, "a number must be finite")
    return number


def _day(value: Any, here: str) -> str:
    try:
        if isinstance(value, str) and len(value) == 10:
            return date.fromisoformat(value).isoformat()
    except ValueError:
        pass
    raise _bad(here, "not a date of the form 2024-01-31")


def _bad(path: str, message: str) -> BadFilter:
    return BadFilter(f"filter at {path or 'the top'}: {message}")


def _unknown_operator(path: str, operator: Any) -> BadFilter:
    wanted = str(operator)[:_LIKENED].lower()
    near = get_close_matches(wanted if wanted.startswith("$") else f"${wanted}", _OPERATORS, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return _bad(path, f"unknown operator {str(operator)[:40]!r}; {hint}known are {' '.join(_OPERATORS)}")


def _shown(value: Any) -> str:
    """Return the type of a wrong value, never the value, which may be confidential."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text" if value else "an empty text"
        case Mapping():
            return "an object" if value else "an empty object"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return type(value).__name__


# ------------------------------------------------------------------------------------------------------ reading values

# A run of digits can be matched in one way only: with two, a long run that does not match takes quadratic time.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DATE = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})(?=$|[ T])", re.ASCII)
_WORD = re.compile(r"[^\W_]+")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Unreadable(ValueError):
    """A stored value is not of the filter's kind."""


def json_text(value: Any) -> str | None:
    """A metadata value as JSON_VALUE gives it."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return value
        case _:
            return None


def read_number(text: str) -> float:
    number = float(text) if _NUMBER.fullmatch(text.strip()) else math.inf
    if not math.isfinite(number):
        raise Unreadable
    return number


def read_boolean(text: str) -> bool:
    value = _BOOLEANS.get(text.strip().lower())
    if value is None:
        raise Unreadable
    return value


def read_date(text: str) -> str:
    found = _DATE.match(text.strip())
    if found is None:
        raise Unreadable
    try:
        return date(*map(int, found.groups())).isoformat()
    except ValueError:
        raise Unreadable from None


_READERS: dict[Kind, Callable[[str], Any]] = {
    Kind.BOOLEAN: read_boolean,
    Kind.NUMBER: read_number,
    Kind.TEXT: str,
    Kind.DATE: read_date,
}


def _spaced(text: str) -> str:
    """The words of a text, each between blanks, which no word holds; "" without any."""
    words = _WORD.findall(text.casefold())
    return f" {' '.join(words)} " if words else ""


@lru_cache(maxsize=2 * MAX_TERMS)
def _phrase(text: str) -> str:
    return _spaced(text)


@lru_cache(maxsize=64)
def _held(text: str) -> str:
    """Remembered for the next condition of the same filter: a hundred of them may look at one text."""
    return _spaced(text)


_held_long = lru_cache(maxsize=1)(_spaced)
"""The same for a text of any length: one at a time."""


def contains(phrase: str, text: str) -> bool:
    """Return whether `text` contains the words of `phrase` as adjacent whole words; False for an empty phrase."""
    wanted = _phrase(phrase)
    return bool(wanted) and wanted in (_held if len(text) <= MAX_TEXT else _held_long)(text)


def like(pattern: str, text: str) -> bool:
    """SQL's LIKE without escape. Each piece of the pattern is taken where it first fits behind the piece before it, so
    the time grows with the length of the text, not with that times the length of the pattern."""
    first, *middle = _pieces(pattern)
    if not middle:
        return len(first.text) == len(text) and first.stands_at(0, text)
    *middle, last = middle
    place, end = len(first.text), len(text) - len(last.text)
    if place > end or not (first.stands_at(0, text) and last.stands_at(end, text)):
        return False
    for piece in middle:
        place = piece.find(text, place, end)
        if place < 0:
            return False
        place += len(piece.text)
    return True


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a pattern between two %."""

    text: str
    gapped: re.Pattern[str] | None
    """For a piece with _."""

    def stands_at(self, place: int, text: str) -> bool:
        if self.gapped is None:
            return text.startswith(self.text, place)
        return self.gapped.match(text, place) is not None

    def find(self, text: str, start: int, end: int) -> int:
        """-1 where it is not within `text[start:end]`."""
        if self.gapped is None:
            return text.find(self.text, start, end)
        found = self.gapped.search(text, start, end)
        return -1 if found is None else found.start()


@lru_cache(maxsize=2 * MAX_TERMS)
def _pieces(pattern: str) -> tuple[_Piece, ...]:
    return tuple(_Piece(piece, _gapped(piece) if "_" in piece else None) for piece in pattern.split("%"))


def _gapped(piece: str) -> re.Pattern[str]:
    return re.compile(".".join(map(re.escape, piece.split("_"))), re.DOTALL)


def is_short(pattern: str) -> bool:
    """Whether a search that tries each piece at each place of a text is as fast as `like`."""
    return all(len(piece) <= LONGEST_PIECE for piece in pattern.split("%")[1:])


# -------------------------------------------------------------------------------------------------------- in Python

_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda left, right: bool(left == right),
    "<>": lambda left, right: bool(left != right),
    "<": lambda left, right: bool(left < right),
    "<=": lambda left, right: bool(left <= right),
    ">": lambda left, right: bool(left > right),
    ">=": lambda left, right: bool(left >= right),
}


def matches(condition: Condition, metadata: Mapping[str, Any]) -> bool:
    """Whether one record fits: what both compilers are tested against. Raises BadFilter as a store would."""
    try:
        return _holds(condition, metadata)
    except Unreadable:
        raise not_comparable(condition) from None


def _holds(condition: Condition, metadata: Mapping[str, Any]) -> bool:
    if isinstance(condition, Guarded):
        return _holds(condition.within, metadata) and (condition.where is None or _holds(condition.where, metadata))
    if isinstance(condition, Group):
        test = all if condition.word == "AND" else any
        return test(_holds(part, metadata) for part in condition.parts)
    text = json_text(metadata.get(condition.field))
    if isinstance(condition, IsNull):
        return (text is None) is not condition.negated
    return text is not None and _term_holds(condition, text)


def _term_holds(term: Term, text: str) -> bool:
    value = _READERS[kind_of(term)](text)
    match term:
        case Compare(operator=operator, operand=operand):
            return _TESTS[operator](value, operand.value)
        case Between(low=low, high=high):
            return bool(low.value <= value <= high.value)
        case OneOf(operands=operands, negated=negated):
            return any(value == operand.value for operand in operands) is not negated
        case Like(pattern=pattern):
            return like(pattern, text)
        case Contains(phrase=phrase):
            return contains(phrase, text)
        case IsNull():
            raise AssertionError("handled by the caller")
