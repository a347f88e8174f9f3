"""Accumulators of aggregates: exact sums, variances, percentiles, joined texts, first and last values.

All work as window functions too. `inverse` removes the oldest row, because SQLite removes rows in insertion order.
"""

from __future__ import annotations

import sqlite3
import statistics
from collections import deque
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any, cast

from hana_emulator.seam import Storage
from hana_emulator.sql.functions import store
from hana_emulator.sql.language.datatypes import FLOATING_SCALE
from hana_emulator.types import HanaType, TypeCode

_WIDE = Context(prec=80)
_EXPRESSION = "an expression"


def register(connection: sqlite3.Connection) -> None:
    for name, accumulator in _ACCUMULATORS.items():
        connection.create_window_function(name, -1, cast(Any, accumulator))


class DecimalSum:
    """SUM of DECIMAL and the base of exact AVG; also a window function."""

    def __init__(self) -> None:
        self.total = Decimal(0)
        self.count = 0
        self.scale = FLOATING_SCALE

    def step(self, value: Storage, scale: int = FLOATING_SCALE) -> None:
        if value is not None:
            self.total = _WIDE.add(self.total, store.to_decimal(value, _EXPRESSION))
            self.count += 1
            self.scale = scale

    def inverse(self, value: Storage, scale: int = FLOATING_SCALE) -> None:
        if value is not None:
            self.total = _WIDE.subtract(self.total, store.to_decimal(value, _EXPRESSION))
            self.count -= 1

    def value(self) -> Storage:
        kind = HanaType(TypeCode.DECIMAL, 38, self.scale)
        return store.decimal_text(self.total, kind, _EXPRESSION) if self.count else None

    finalize = value


class DecimalAverage(DecimalSum):
    def value(self) -> Storage:
        return store.plain_decimal(_WIDE.divide(self.total, Decimal(self.count))) if self.count else None

    finalize = value


class Kept:
    """Keep all rows whose `counted` arguments are not NULL; `result` computes the aggregate from them."""

    counted: slice = slice(None)

    def __init__(self) -> None:
        self.rows: deque[tuple[Any, ...]] = deque()

    def step(self, *row: Any) -> None:
        if None not in row[self.counted]:
            self.rows.append(row)

    def inverse(self, *row: Any) -> None:
        if None not in row[self.counted]:
            self.rows.popleft()

    def value(self) -> Storage:
        return self.result(list(self.rows)) if self.rows else None

    finalize = value

    def result(self, rows: list[tuple[Any, ...]]) -> Storage:
        raise NotImplementedError


def _estimate(estimator: Callable[..., float]) -> type[Kept]:
    """An accumulator of one or two numeric columns; its result is NULL for too few rows."""

    class Estimate(Kept):
        def result(self, rows: list[tuple[Any, ...]]) -> Storage:
            try:
                return float(estimator(*(list(column) for column in zip(*rows, strict=True))))
            except statistics.StatisticsError:
                return None

    return Estimate


class Percentile(Kept):
    """PERCENTILE_CONT. Arguments: value, share, 1 for descending."""

    counted = slice(0, 1)

    def result(self, rows: list[tuple[Any, ...]]) -> Storage:
        share, descending = rows[0][1:]
        return self.at(sorted((row[0] for row in rows), reverse=bool(descending)), float(share))

    def at(self, values: list[float], share: float) -> float:
        """Interpolate linearly between two rows."""
        place = share * (len(values) - 1)
        below = int(place)
        above = min(below + 1, len(values) - 1)
        return float(values[below] + (values[above] - values[below]) * (place - below))


class DiscretePercentile(Percentile):
    def at(self, values: list[float], share: float) -> float:
        """Return the value of the first row at which the cumulative share is reached."""
        count = len(values)
        return float(next(value for number, value in enumerate(values, 1) if number / count >= share))


class StringAggregate(Kept):
    """STRING_AGG. Arguments: text, separator, the flags of `ordered`, sort keys. NULLs are omitted."""

    counted = slice(0, 1)

    def result(self, rows: list[tuple[Any, ...]]) -> Storage:
        return (rows[0][1] or "").join(row[0] for row in ordered(rows, rows[0][2], 3))


def ordered(rows: list[tuple[Any, ...]], flags: str, first: int) -> list[tuple[Any, ...]]:
    """Sort `rows` by their members from index `first` on. `flags` has three letters for each key: A or D (order),
    F or L (NULLs first or last), N (decimal number) or T (any other type)."""
    for place in reversed(range(len(flags) // 3)):
        order, nulls, kind = tuple(flags[3 * place : 3 * place + 3])
        column = first + place
        missing = [row for row in rows if row[column] is None]
        present = [row for row in rows if row[column] is not None]
        present.sort(key=lambda row: _key(row[column], kind), reverse=order == "D")
        rows = missing + present if nulls == "F" else present + missing
    return rows


def _key(value: Any, kind: str) -> Any:
    return Decimal(str(value)) if kind == "N" else value


_ACCUMULATORS: dict[str, type[Any]] = {
    "owl_sum": DecimalSum,
    "owl_avg": DecimalAverage,
    "owl_string_agg": StringAggregate,
    "owl_percentile_cont": Percentile,
    "owl_percentile_disc": DiscretePercentile,
    "owl_stddev": _estimate(statistics.stdev),
    "owl_stddev_pop": _estimate(statistics.pstdev),
    "owl_var": _estimate(statistics.variance),
    "owl_var_pop": _estimate(statistics.pvariance),
    "owl_median": _estimate(statistics.median),
    "owl_corr": _estimate(statistics.correlation),
}
