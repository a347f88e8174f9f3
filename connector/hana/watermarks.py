"""Watermark columns: how a mark stores their values, and how far a run may read. Does not access HANA.

Marks store text: a TIMESTAMP has seven decimals in HANA but six in Python, and rounding would lose rows or repeat them
forever at a page border.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

from connector.errors import ConfigurationError
from connector.model import Column, TableRef

_TIMESTAMP = "'YYYY-MM-DD HH24:MI:SS.FF7'"
_INTEGERS = {"TINYINT": 0, "SMALLINT": -(2**15), "INTEGER": -(2**31), "BIGINT": -(2**63)}  # with their lowest values
_TEXTS = frozenset({"NVARCHAR", "VARCHAR"})
_WEST = timedelta(hours=12)  # a clock that writes dates may be this far behind UTC
_FIRST = datetime(1000, 1, 1, tzinfo=UTC)  # before every change; strftime does not pad earlier years
_MICROSECOND, _SECOND, _DAY = timedelta(microseconds=1), timedelta(seconds=1), timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Watermark:
    """How to read a watermark column. `step`: the smallest difference between two times; None for a number. `selected`:
    SQL with `{}` for the quoted column. `bound`: SQL of a parameter. `form` converts a time to mark text, `bind` mark
    text to a parameter, `text` a column value to mark text. `lowest`: mark text that is not above any value."""

    step: timedelta | None
    selected: str
    bound: str
    form: Callable[[datetime], str]
    bind: Callable[[str], Any]
    text: Callable[[Any], str]
    lowest: str


def watermark(column: Column, table: TableRef, setting: str = "changes.column") -> Watermark:
    """Return how to read the column. Raises ConfigurationError, which names `setting`, for a type that does not order
    changes."""
    found = _known(column)
    if found is None:
        shown = f"{column.type_name}({column.length})" if column.length else column.type_name
        raise ConfigurationError(
            f"`{setting}`: {column.name!r} of {table} is {shown}, which cannot be a watermark; use a "
            "TIMESTAMP, SECONDDATE, DATE, a rising integer, or SAP's time stamps in UTC, DECIMAL(15), DECIMAL(21,7), "
            "NVARCHAR(14), or a day in NVARCHAR(8)"
        )
    return found


def tells_time(column: Column) -> bool:
    """Return whether the column can be a watermark precise to the second."""
    found = _known(column)
    return found is not None and found.step in (_SECOND, _MICROSECOND)


def reach(mark: Watermark, now: datetime, delay: float) -> tuple[str, str]:
    """Return the value up to which a run at `now` (UTC, by the database's clock) may read, and the value to which its
    mark may then advance, because no new row can have that value or a lower one.

    The current second or microsecond is left to the next run, because more rows may get it. A day is read repeatedly
    until it has ended in every time zone, so some rows are compared more than once. For numbers see
    `sync/feeds/watermark.py`.
    """
    end = now - timedelta(seconds=delay)
    if mark.step == _DAY:
        return mark.form(now + _DAY), mark.form(end - _WEST - _DAY)
    text = mark.form(end - (mark.step or timedelta()))
    return text, text


def less(mark: Watermark, one: str, other: str) -> bool:
    """Return whether `one` comes before `other`."""
    first, second = mark.bind(one), mark.bind(other)
    return bool(first < second)


def earlier(mark: Watermark, text: str, seconds: float) -> str:
    """Return the time `seconds` before that of mark text; `mark.lowest` if the value is not a time, such as ABAP's
    initial zeros."""
    try:
        return mark.form(max(_FIRST, moment(text) - timedelta(seconds=seconds)))
    except (ValueError, OverflowError):
        return mark.lowest


def moment(text: str) -> datetime:
    """Return the time in a mark's text, UTC. Raises ValueError for a number."""
    digits = "".join(filter(str.isdigit, text))
    if len(digits) not in (8, 14, 21):
        raise ValueError("a number has no time")
    return datetime.strptime(digits[:14].ljust(14, "0"), "%Y%m%d%H%M%S").replace(tzinfo=UTC)


def _known(column: Column) -> Watermark | None:
    kind, length, scale = column.type_name, column.length, column.scale

    def timed(
        step: timedelta, form: str, bind: Callable[[str], Any] = str, text: Callable[[Any], str] = str
    ) -> Watermark:
        lowest = _FIRST.strftime(form)
        return Watermark(step, "{}", "?", lambda when: when.astimezone(UTC).strftime(form), bind, text, lowest)

    if kind == "TIMESTAMP":
        found = timed(_MICROSECOND, "%Y-%m-%d %H:%M:%S.%f0")
        return replace(found, selected=f"TO_NVARCHAR({{}}, {_TIMESTAMP})", bound=f"TO_TIMESTAMP(?, {_TIMESTAMP})")
    if kind == "SECONDDATE":
        as_text = partial(datetime.isoformat, sep=" ", timespec="seconds")
        return timed(_SECOND, "%Y-%m-%d %H:%M:%S", datetime.fromisoformat, as_text)
    if kind == "DATE":
        return timed(_DAY, "%Y-%m-%d", date.fromisoformat)
    if kind in _TEXTS and length in (8, 14):
        return timed(_DAY, "%Y%m%d") if length == 8 else timed(_SECOND, "%Y%m%d%H%M%S")
    if kind == "DECIMAL" and (length, scale) == (15, 0):
        return timed(_SECOND, "%Y%m%d%H%M%S", Decimal, "{:f}".format)
    if kind == "DECIMAL" and (length, scale) == (21, 7):
        return timed(_MICROSECOND, "%Y%m%d%H%M%S.%f0", Decimal, "{:f}".format)
    if kind in _INTEGERS or (kind == "DECIMAL" and scale == 0 and 0 < length < 34):
        lowest = str(_INTEGERS.get(kind, 1 - 10**length))
        return Watermark(None, "{}", "?", str, int, lambda value: str(int(value)), lowest)
    return None
