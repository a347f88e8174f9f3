"""The `owl_...` functions and the decimal collation that `coercion.py` and `calls.py` use.

They add what SQLite lacks: exact decimals, integer range checks, strict conversion of numbers and dates.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_UP, Context, Decimal, DecimalException, InvalidOperation
from typing import Any

from hana_emulator.errors import HanaError
from hana_emulator.seam import Storage
from hana_emulator.sql.functions import accumulators, store
from hana_emulator.types import DOUBLE, HanaType, TypeCode

DECIMAL_COLLATION = "hana_decimal"
Report = Callable[[HanaError], None]
_WIDE = Context(prec=80)
_EXPRESSION = "an expression"
_BIGINT = HanaType(TypeCode.BIGINT, 19)


def _decimal(value: Storage) -> Decimal:
    return store.to_decimal(value, _EXPRESSION)


def _sized(number: Decimal, precision: int, scale: int) -> str:
    return store.decimal_text(number, HanaType(TypeCode.DECIMAL, precision, scale), _EXPRESSION)


def _binary(operation: Callable[[Decimal, Decimal], Decimal]) -> Callable[[Storage, Storage, int, int], Storage]:
    def apply(left: Storage, right: Storage, precision: int, scale: int) -> Storage:
        return _sized(operation(_decimal(left), _decimal(right)), precision, scale)

    return apply


def _division(left: Decimal, right: Decimal) -> Decimal:
    if not right:
        raise HanaError(304, "division by zero undefined")
    return _WIDE.divide(left, right)


def _bigint(value: Storage) -> Storage:
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise HanaError(314, "numeric overflow: the result does not fit BIGINT")
    return value


def _divide_double(left: float, right: float) -> float:
    if right == 0:
        raise HanaError(304, "division by zero undefined")
    return _finite(left / right)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise HanaError(314, "numeric overflow: the result does not fit DOUBLE")
    return value


def _modulo(left: Any, right: Any) -> Any:
    """The result has the dividend's sign. As in HANA, a zero divisor returns the dividend."""
    if right == 0:
        return left
    if isinstance(left, int) and isinstance(right, int):
        return abs(left) % abs(right) * (-1 if left < 0 else 1)
    return float(_WIDE.remainder(Decimal(left), Decimal(right)))


_ROUNDINGS = {"round": ROUND_HALF_UP, "floor": ROUND_FLOOR, "ceil": ROUND_CEILING}


def _rounding(mode: str) -> Callable[[str, Storage, int], Storage]:
    """Return the rounding function for this mode. `flavour`: the numeric type of argument and result."""

    def apply(flavour: str, value: Storage, digits: int) -> Storage:
        number = _decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=_ROUNDINGS[mode], context=_WIDE)
        if flavour == "decimal":
            return store.plain_decimal(number, 38)
        return _bigint(int(number)) if flavour == "integer" else float(number)

    return apply


def _absolute(flavour: str, value: Any, digits: int) -> Storage:
    if flavour == "decimal":
        return store.plain_decimal(abs(_decimal(value)), 38)
    return _bigint(abs(value)) if flavour == "integer" else float(abs(value))


def _stored(value: Storage, code: int, length: int, scale: int, column: str) -> Storage:
    return store.converter(HanaType(TypeCode(code), length, scale), column)(value)


def _converting(kind: HanaType) -> Callable[[Storage], Storage]:
    return store.converter(kind, _EXPRESSION)


# Each function returns NULL if any argument is NULL
_FUNCTIONS: dict[str, tuple[int, Callable[..., Storage]]] = {
    "owl_integer": (1, _converting(_BIGINT)),
    "owl_double": (1, _converting(DOUBLE)),
    "owl_boolean": (1, _converting(HanaType(TypeCode.BOOLEAN, 1))),
    "owl_date": (1, _converting(HanaType(TypeCode.DATE, 10))),
    "owl_time": (1, _converting(HanaType(TypeCode.TIME, 8))),
    "owl_seconddate": (1, _converting(HanaType(TypeCode.SECONDDATE, 19))),
    "owl_timestamp": (1, _converting(HanaType(TypeCode.TIMESTAMP, 27, 7))),
    "owl_text": (1, store.as_text),
    "owl_decimal": (3, lambda value, precision, scale: _sized(_decimal(value), precision, scale)),
    "owl_add": (4, _binary(_WIDE.add)),
    "owl_subtract": (4, _binary(_WIDE.subtract)),
    "owl_multiply": (4, _binary(_WIDE.multiply)),
    "owl_divide": (4, _binary(_division)),
    "owl_modulo": (4, _binary(lambda left, right: _WIDE.remainder(left, right) if right else left)),
    "owl_bigint": (1, _bigint),
    "owl_divide_double": (2, _divide_double),
    "owl_remainder": (2, _modulo),
    "owl_round": (3, _rounding("round")),
    "owl_floor": (3, _rounding("floor")),
    "owl_ceil": (3, _rounding("ceil")),
    "owl_abs": (3, _absolute),
}


def register(connection: sqlite3.Connection, report: Report) -> None:
    """Register the functions. `report` receives each HanaError, because sqlite3 hides the error code."""
    for name, (arity, function) in _FUNCTIONS.items():
        connection.create_function(name, arity, _guarded(function, report), deterministic=True)
    stored = _reporting(_stored, report)
    connection.create_function("owl_store", 5, stored, deterministic=True)
    connection.create_collation(DECIMAL_COLLATION, compare_decimals)
    accumulators.register(connection)


def _guarded(function: Callable[..., Storage], report: Report) -> Callable[..., Storage]:
    reporting = _reporting(function, report)

    def call(*arguments: Storage) -> Storage:
        return None if None in arguments else reporting(*arguments)

    return call


def _reporting(function: Callable[..., Storage], report: Report) -> Callable[..., Storage]:
    def call(*arguments: Storage) -> Storage:
        try:
            return function(*arguments)
        except HanaError as error:
            report(error)
            raise
        except (DecimalException, OverflowError):
            report(HanaError(314, "numeric overflow in an expression"))
            raise

    return call


def compare_decimals(left: str, right: str) -> int:
    """Compare canonical decimal texts by value; non-numeric text compares as text."""
    if left == right:
        return 0
    try:
        one, two = Decimal(left), Decimal(right)
    except InvalidOperation:
        return -1 if left < right else 1
    return 0 if one == two else -1 if one < two else 1
