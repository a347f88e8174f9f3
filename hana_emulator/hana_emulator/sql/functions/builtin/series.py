"""SERIES_GENERATE_...: the periods of an equidistant series between two bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from hana_emulator.errors import HanaError

from . import moments, numbers

MOST = 100_000
"""More rows than this are refused: they are made at once, in a second or two that cannot be cancelled."""
_INTERVAL = re.compile(r"INTERVAL\s+(?P<count>-?\d+)\s+(?P<unit>YEAR|MONTH|DAY|HOUR|MINUTE|SECOND)S?", re.IGNORECASE)
_SECONDS = {"DAY": 86_400, "HOUR": 3_600, "MINUTE": 60, "SECOND": 1}


def _fault(detail: str) -> HanaError:
    return HanaError(306, f"invalid argument: a series {detail}")


def numeric(increment: Any, low: Any, high: Any, *, exact: bool = False) -> str:
    """The rows of a numeric series as JSON: start, end, element number, share of the range before the start."""
    step, first, last = (Decimal(str(numbers.number(value))) for value in (increment, low, high))
    if step <= 0:
        raise _fault("needs an increment above 0")
    show: Callable[[Decimal], Any] = numbers.decimal_text if exact else int

    def periods() -> Iterator[tuple[Any, Any, float]]:
        start = first
        while start < last:
            yield show(start), show(start + step), float((start - first) / (last - first))
            start += step

    return _rows(periods())


def timed(shape: Callable[[Any], str], increment: Any, low: Any, high: Any) -> str:
    """The rows of a date or time series. `increment` is like 'INTERVAL 1 DAY'; `shape` formats the bounds."""
    match = _INTERVAL.fullmatch(str(increment).strip())
    if match is None or int(match["count"]) <= 0:
        raise _fault("needs an interval such as 'INTERVAL 1 DAY', above 0")
    count, unit = int(match["count"]), match["unit"].upper()
    first, last = shape(low), shape(high)
    whole = max(moments.moment(last).ticks - moments.moment(first).ticks, 1)

    def moved(number: int) -> str:
        """Add steps to `first`. Counting months from the start preserves the 31st."""
        if unit in _SECONDS:
            return shape(moments.add_seconds(moments.to_timestamp(first), number * count * _SECONDS[unit]))
        return moments.add_months(first, number * count * (12 if unit == "YEAR" else 1))

    def periods() -> Iterator[tuple[Any, Any, float]]:
        number, start = 0, first
        while start < last:
            end = moved(number + 1)
            if end <= start:
                raise _fault("of dates needs steps of whole days")
            yield start, end, (moments.moment(start).ticks - moments.moment(first).ticks) / whole
            number, start = number + 1, end

    return _rows(periods())


def _rows(periods: Iterator[tuple[Any, Any, float]]) -> str:
    found = []
    for number, (start, end, share) in enumerate(periods, 1):
        if number > MOST:
            raise _fault(f"has {MOST} periods at most (in this emulator)")
        found.append((start, end, number, share))
    return json.dumps(found)
