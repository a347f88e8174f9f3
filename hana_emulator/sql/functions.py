"""HANA's SQL functions by name: argument and result types for the compiler, and their registration with SQLite.

What they compute stands in `builtin/`. SQLite swallows exceptions of user functions, so the last HanaError is kept in
`Context.error` for the caller to raise after `sqlite3.OperationalError`.
"""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from hana_emulator.errors import HanaError
from hana_emulator.seam import Storage
from hana_emulator.sql import fulltext
from hana_emulator.sql.builtin import conversion, formats, fvecs, json_path, moments, numbers, texts
from hana_emulator.sql.datatypes import FLOATING_DECIMAL, nvarchar
from hana_emulator.types import (
    BIGINT,
    BINARIES,
    BOOLEAN,
    DATE,
    DATETIMES,
    DEFAULT_PARAMETER,
    DOUBLE,
    INTEGER,
    NCLOB,
    STRINGS,
    TIMESTAMP,
    VECTORS,
    HanaType,
    TypeCode,
)

ResultRule = Callable[[Sequence[HanaType]], HanaType]
TEXT = DEFAULT_PARAMETER
REAL = HanaType(TypeCode.REAL, 7)
SMALLINT = HanaType(TypeCode.SMALLINT, 5)
TINYINT = HanaType(TypeCode.TINYINT, 3)
SECONDDATE = HanaType(TypeCode.SECONDDATE, 19)
TIME = HanaType(TypeCode.TIME, 8)
BLOB = HanaType(TypeCode.BLOB)
CLOB = HanaType(TypeCode.CLOB)
VARBINARY = HanaType(TypeCode.VARBINARY, 5000)
REAL_VECTOR = HanaType(TypeCode.REAL_VECTOR)
HALF_VECTOR = HanaType(TypeCode.HALF_VECTOR)
NAME = nvarchar(256)


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Context:
    """What a session's functions may ask for, and where their errors go."""

    user: str = "OWL"
    schema: str = "OWL"
    connection_id: int = 0
    isolation_level: str = "READ COMMITTED"
    clock: Callable[[], datetime] = utc_now
    last_identity: int | None = None
    error: HanaError | None = None
    statement_time: datetime | None = None
    """The moment that CURRENT_TIMESTAMP and its kin give; None: the clock's, anew at each call."""
    session_variables: dict[str, str] = field(default_factory=dict)
    current_numbers: dict[int, int] = field(default_factory=dict)
    """CURRVAL of each sequence, by its id."""

    def begin_statement(self) -> None:
        """Forget the last error and fix the time: HANA gives one CURRENT_TIMESTAMP to a whole statement."""
        self.error = None
        self.statement_time = self.clock()

    def now(self) -> moments.Moment:
        return moments.now(lambda: self.statement_time or self.clock())


@dataclass(frozen=True, slots=True)
class Signature:
    """How a HANA function is called and typed. A parameter of None takes any type; so does what follows the list of a
    variadic function, unless its last entry says more. `required` counts the arguments that must be there."""

    sqlite_name: str
    parameters: tuple[HanaType | None, ...]
    result: HanaType | ResultRule
    variadic: bool = False
    required: int = -1
    by_type: Callable[[Sequence[HanaType]], str] | None = None
    """Chooses the SQLite function by the arguments' types, where storage values alone do not tell them apart."""

    def parameter(self, position: int) -> HanaType | None:
        """The type wanted at a 0-based position; None when any will do."""
        if position < len(self.parameters):
            return self.parameters[position]
        return self.parameters[-1] if self.variadic and self.parameters else None

    def accepts(self, count: int) -> bool:
        """Whether that many arguments may be given."""
        least = len(self.parameters) if self.required < 0 else self.required
        return least <= count and (self.variadic or count <= len(self.parameters))

    def result_type(self, arguments: Sequence[HanaType]) -> HanaType:
        return self.result(arguments) if callable(self.result) else self.result

    def function(self, arguments: Sequence[HanaType]) -> str:
        """The SQLite function to call for arguments of these types."""
        return self.by_type(arguments) if self.by_type else self.sqlite_name


# ------------------------------------------------------------------------------------------------------ result types


def _first(arguments: Sequence[HanaType]) -> HanaType:
    return arguments[0] if arguments else TEXT


def _first_text(arguments: Sequence[HanaType]) -> HanaType:
    """Text functions keep the kind of string they are given; anything else becomes NVARCHAR."""
    kind = _first(arguments)
    return kind if kind.code in STRINGS or kind.code in (TypeCode.NCLOB, TypeCode.CLOB, TypeCode.TEXT) else TEXT


def _substring(arguments: Sequence[HanaType]) -> HanaType:
    """Of a LOB, a string; of a string or binary, its own kind."""
    kind = _first(arguments)
    if kind.code in VECTORS | {TypeCode.BLOB}:
        return VARBINARY
    return kind if kind.code in STRINGS | BINARIES else TEXT


def _string_piece(arguments: Sequence[HanaType]) -> HanaType:
    kind = _first(arguments)
    return kind if kind.code in STRINGS else TEXT


def _day_result(arguments: Sequence[HanaType]) -> HanaType:
    kind = _first(arguments)
    return kind if kind.code in (TypeCode.DATE, TypeCode.SECONDDATE) else TIMESTAMP


def _second_result(arguments: Sequence[HanaType]) -> HanaType:
    kind = _first(arguments)
    return kind if kind.code in (TypeCode.SECONDDATE, TypeCode.TIME) else TIMESTAMP


def _vector_like(arguments: Sequence[HanaType]) -> HanaType:
    kind = _first(arguments)
    return kind if kind.code is TypeCode.HALF_VECTOR else REAL_VECTOR.sized(kind.length)


# ------------------------------------------------------------------------------------------------------ the functions


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A SQLite scalar function. `strict`: NULL in, NULL out. `pure`: same arguments, same result."""

    compute: Callable[..., Any]
    strict: bool = True
    pure: bool = True


SIGNATURES: dict[str, Signature] = {}
_SCALARS: dict[str, _Scalar] = {}
_SESSION: dict[str, Callable[[Context], Any]] = {}


def _define(
    names: str,
    compute: Callable[..., Any],
    parameters: tuple[HanaType | None, ...],
    result: HanaType | ResultRule,
    **options: Any,
) -> None:
    """All `names` for one function; `strict` and `pure` go to the scalar, other options to the signature."""
    scalar = _Scalar(compute, options.pop("strict", True), options.pop("pure", True))
    for name in names.split():
        sqlite_name = f"hana_{name.lower()}"
        SIGNATURES[name] = Signature(sqlite_name, parameters, result, **options)
        _SCALARS[sqlite_name] = scalar


def _define_session(names: str, read: Callable[[Context], Any], result: HanaType) -> None:
    for name in names.split():
        SIGNATURES[name] = Signature(f"hana_{name.lower()}", (), result)
        _SESSION[f"hana_{name.lower()}"] = read


def _define_vectors() -> None:
    _define("COSINE_SIMILARITY", fvecs.cosine_similarity, (REAL_VECTOR, REAL_VECTOR), DOUBLE)
    _define("L2DISTANCE", fvecs.l2_distance, (REAL_VECTOR, REAL_VECTOR), DOUBLE)
    _define("CARDINALITY", fvecs.cardinality, (REAL_VECTOR,), INTEGER)
    _define("L2NORM", fvecs.l2_norm, (REAL_VECTOR,), DOUBLE)
    _define("L2NORMALIZE", fvecs.l2_normalize, (REAL_VECTOR,), _vector_like)
    _define("TO_REAL_VECTOR", fvecs.to_real_vector, (NCLOB,), REAL_VECTOR)
    _define("TO_HALF_VECTOR", fvecs.to_half_vector, (NCLOB,), HALF_VECTOR)
    _SCALARS["hana_vector_text"] = _Scalar(fvecs.to_text)


def _nvarchar_function(arguments: Sequence[HanaType]) -> str:
    code = _first(arguments).code
    if code in (TypeCode.REAL_VECTOR, TypeCode.HALF_VECTOR):
        return "hana_vector_text"
    if code in BINARIES:
        return "hana_bintohex"
    if len(arguments) > 1 and arguments[1].code in STRINGS:
        return "hana_moment_text" if code in DATETIMES else "hana_number_text"
    return "hana_to_nvarchar"


def _define_conversions() -> None:
    either = {"required": 1, "by_type": _nvarchar_function}
    _define("TO_NVARCHAR TO_VARCHAR", conversion.to_nvarchar, (None, None), TEXT, **either)
    _SCALARS["hana_moment_text"] = _Scalar(formats.write_moment)
    _SCALARS["hana_number_text"] = _Scalar(formats.write_number)
    _define("TO_NCLOB", texts.plain, (None,), NCLOB)
    _define("TO_CLOB", texts.plain, (None,), CLOB)
    for name, kind in (("TINYINT", TINYINT), ("SMALLINT", SMALLINT), ("INTEGER", INTEGER), ("BIGINT", BIGINT)):
        _define(f"TO_{name}", numbers.to_integer(name), (None,), kind)
    _define("TO_INT", numbers.to_integer("INTEGER"), (None,), INTEGER)
    _define("TO_DOUBLE", numbers.to_double, (DOUBLE,), DOUBLE)
    _define("TO_REAL", numbers.to_real, (DOUBLE,), REAL)
    _define("TO_SMALLDECIMAL", numbers.to_decimal, (None,), FLOATING_DECIMAL.sized(16, FLOATING_DECIMAL.scale))
    _define("TO_DATE", conversion.to_date, (None, TEXT), DATE, required=1)
    _define("TO_TIME", conversion.to_time, (None, TEXT), TIME, required=1)
    _define("TO_SECONDDATE", conversion.to_seconddate, (None, TEXT), SECONDDATE, required=1)
    _define("TO_TIMESTAMP", conversion.to_timestamp, (None, TEXT), TIMESTAMP, required=1)
    _define("TO_DATS", moments.to_dats, (None,), nvarchar(8))
    _define("TO_BINARY TO_VARBINARY", texts.to_binary, (None,), VARBINARY)
    _define("TO_BLOB", texts.to_binary, (None,), BLOB)


def _define_json() -> None:
    _define("JSON_VALUE", json_path.value, (None, TEXT), TEXT)
    _define("JSON_QUERY", json_path.query, (None, TEXT, TEXT), TEXT, required=2)
    _define("JSON_EXISTS", json_path.exists, (None, TEXT), BOOLEAN)


def _define_texts() -> None:
    _define("UPPER UCASE", texts.upper, (None,), _first_text)
    _define("LOWER LCASE", texts.lower, (None,), _first_text)
    _define("INITCAP", texts.initcap, (None,), _first_text)
    _define("LENGTH", texts.length, (None,), INTEGER)
    _define("SUBSTRING SUBSTR", texts.substring, (None, INTEGER, INTEGER), _substring, required=2)
    _define("LEFT", texts.left, (None, INTEGER), _string_piece)
    _define("RIGHT", texts.right, (None, INTEGER), _string_piece)
    _define("TRIM", texts.trim, (None, TEXT), _first_text, required=1)
    _define("LTRIM", texts.ltrim, (None, TEXT), _first_text, required=1)
    _define("RTRIM", texts.rtrim, (None, TEXT), _first_text, required=1)
    _define("LPAD", texts.lpad, (None, INTEGER, TEXT), TEXT, required=2)
    _define("RPAD", texts.rpad, (None, INTEGER, TEXT), TEXT, required=2)
    _define("REPLACE", texts.replace, (None, TEXT, TEXT), _replaced)
    _define("LOCATE", texts.locate, (None, TEXT, INTEGER, INTEGER), INTEGER, required=2)
    _define("SUBSTR_BEFORE", texts.substring_before, (None, TEXT), TEXT)
    _define("SUBSTR_AFTER", texts.substring_after, (None, TEXT), TEXT)
    _define("REVERSE", texts.reverse, (None,), _first_text)
    _define("ASCII UNICODE", texts.code_point, (None,), INTEGER)
    _define("CHAR NCHAR", texts.character, (INTEGER,), nvarchar(1))
    _define("ESCAPE_SINGLE_QUOTES", texts.escape_single_quotes, (TEXT,), TEXT)
    _define("ESCAPE_DOUBLE_QUOTES", texts.escape_double_quotes, (TEXT,), TEXT)
    _SCALARS["hana_score"] = _Scalar(lambda term, text: fulltext.score(texts.plain(term), texts.plain(text)))


def _replaced(arguments: Sequence[HanaType]) -> HanaType:
    """The replacement may be longer than what it replaces, so the length is the greatest there is."""
    kind = _first_text(arguments)
    return kind.sized(TEXT.length) if kind.code in STRINGS else kind


def _define_binaries() -> None:
    _define("BINTOHEX BINTONHEX", texts.binary_to_hex, (None,), TEXT)
    _define("HEXTOBIN", texts.hex_to_binary, (TEXT,), VARBINARY)
    _define("BINTOSTR BINTONSTR", texts.binary_to_text, (None,), TEXT)
    _define("STRTOBIN", lambda text, _codepage="UTF-8": texts.to_binary(text), (TEXT, TEXT), VARBINARY, required=1)
    _define("HASH_SHA256", texts.hash_sha256, (None,), VARBINARY.sized(32), variadic=True)
    _define("HASH_MD5", texts.hash_md5, (None,), VARBINARY.sized(16), variadic=True)
    _define("SYSUUID NEWUID", conversion.sysuuid, (), VARBINARY.sized(16), pure=False)


def _define_numbers() -> None:
    _define("SIGN", numbers.sign, (None,), INTEGER)
    _define("POWER", numbers.power, (DOUBLE, DOUBLE), DOUBLE)
    _define("LOG", numbers.logarithm, (DOUBLE, DOUBLE), DOUBLE)
    _define("RAND", random.random, (), DOUBLE, pure=False)
    _define("BITAND", numbers.bit_and, (BIGINT, BIGINT), BIGINT)
    _define("BITOR", numbers.bit_or, (BIGINT, BIGINT), BIGINT)
    _define("BITXOR", numbers.bit_xor, (BIGINT, BIGINT), BIGINT)
    _define("LN", numbers.function_of("LN", math.log), (DOUBLE,), DOUBLE)
    for name in ("SQRT", "EXP", "SIN", "COS", "TAN", "ASIN", "ACOS", "ATAN", "SINH", "COSH", "TANH"):
        _define(name, numbers.function_of(name, getattr(math, name.lower())), (DOUBLE,), DOUBLE)


def _define_moments() -> None:
    for name, add in (("DAYS", moments.add_days), ("MONTHS", moments.add_months), ("YEARS", moments.add_years)):
        _define_shift(f"ADD_{name}", add, (TypeCode.DATE, TypeCode.SECONDDATE), _day_result)
    _define_shift("ADD_SECONDS", moments.add_seconds, (TypeCode.SECONDDATE, TypeCode.TIME), _second_result)
    _define("DAYS_BETWEEN", moments.days_between, (TIMESTAMP, TIMESTAMP), INTEGER)
    _define("SECONDS_BETWEEN", moments.seconds_between, (TIMESTAMP, TIMESTAMP), BIGINT)
    _define("NANO100_BETWEEN", moments.nano100_between, (TIMESTAMP, TIMESTAMP), BIGINT)
    _define("MONTHS_BETWEEN", moments.months_between, (TIMESTAMP, TIMESTAMP), INTEGER)
    _define("YEARS_BETWEEN", moments.years_between, (TIMESTAMP, TIMESTAMP), INTEGER)
    _define("LAST_DAY", moments.last_day, (TIMESTAMP,), DATE)
    _define("NEXT_DAY", moments.next_day, (TIMESTAMP,), DATE)
    _define("LOCALTOUTC UTCTOLOCAL", moments.local_to_utc, (TIMESTAMP, TEXT), TIMESTAMP, required=1)
    _define("SECOND", moments.second, (None,), FLOATING_DECIMAL)
    for name, read, kind in _PARTS:
        _define(name, moments.part(read), (None,), kind)


_PARTS: tuple[tuple[str, Callable[[datetime], int | str], HanaType], ...] = (
    ("YEAR", lambda at: at.year, INTEGER),
    ("MONTH", lambda at: at.month, INTEGER),
    ("DAYOFMONTH", lambda at: at.day, INTEGER),
    ("DAYOFYEAR", lambda at: at.timetuple().tm_yday, INTEGER),
    ("HOUR", lambda at: at.hour, INTEGER),
    ("MINUTE", lambda at: at.minute, INTEGER),
    ("WEEKDAY", lambda at: at.weekday(), INTEGER),
    ("WEEK", moments.week, INTEGER),
    ("ISOWEEK", moments.iso_week, nvarchar(8)),
    ("QUARTER", moments.quarter, nvarchar(7)),
    ("DAYNAME", lambda at: at.strftime("%A").upper(), nvarchar(9)),
    ("MONTHNAME", lambda at: at.strftime("%B").upper(), nvarchar(9)),
)


def _define_shift(
    name: str, compute: Callable[[Any, Any], str], kept: tuple[TypeCode, ...], result: ResultRule
) -> None:
    """ADD_DAYS and its kin keep some types; whatever else they are given becomes a TIMESTAMP first."""
    plain, converting = f"hana_{name.lower()}", f"hana_{name.lower()}_timestamp"
    _define(
        name,
        compute,
        (None, DOUBLE if name == "ADD_SECONDS" else INTEGER),
        result,
        by_type=lambda arguments: plain if _first(arguments).code in kept else converting,
    )
    _SCALARS[converting] = _Scalar(lambda value, count: compute(moments.to_timestamp(value), count))


def _define_sessions() -> None:
    _define_session("CURRENT_USER SESSION_USER", lambda context: context.user, NAME)
    _define_session("CURRENT_SCHEMA", lambda context: context.schema, NAME)
    _define_session("CURRENT_CONNECTION", lambda context: context.connection_id, INTEGER)
    _define_session("CURRENT_IDENTITY_VALUE", lambda context: context.last_identity, BIGINT)
    _define_session("CURRENT_TRANSACTION_ISOLATION_LEVEL", lambda context: context.isolation_level, NAME)
    _define_session("CURRENT_DATE CURRENT_UTCDATE", lambda context: context.now().date(), DATE)
    _define_session("CURRENT_TIME CURRENT_UTCTIME", lambda context: context.now().time(), TIME)
    _define_session("CURRENT_TIMESTAMP CURRENT_UTCTIMESTAMP NOW", lambda context: context.now().timestamp(), TIMESTAMP)
    SIGNATURES["SESSION_CONTEXT"] = Signature("hana_session_context", (TEXT,), nvarchar(512))


for _group in (
    _define_vectors,
    _define_conversions,
    _define_json,
    _define_texts,
    _define_binaries,
    _define_numbers,
    _define_moments,
    _define_sessions,
):
    _group()


# ------------------------------------------------------------------------------------------------------- registration


def register(connection: sqlite3.Connection, context: Context) -> None:
    """Make every function known to `connection`, under names that begin with `hana_`."""
    for name, scalar in _SCALARS.items():
        compute = _null_in_null_out(scalar.compute) if scalar.strict else scalar.compute
        connection.create_function(name, -1, _guarded(compute, context), deterministic=scalar.pure)
    for name, read in _SESSION.items():
        connection.create_function(name, 0, _guarded(_reading(read, context), context))
    connection.create_function("hana_session_context", 1, context.session_variables.get)


def _reading(read: Callable[[Context], Any], context: Context) -> Callable[[], Any]:
    return lambda: read(context)


def _null_in_null_out(compute: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Storage) -> Any:
        return None if None in arguments else compute(*arguments)

    return call


def _guarded(compute: Callable[..., Any], context: Context) -> Callable[..., Storage]:
    def call(*arguments: Storage) -> Storage:
        try:
            return _storage(compute(*arguments))
        except Exception as error:
            context.error = _as_hana_error(error)
            raise

    return call


def _storage(value: Any) -> Storage:
    """A result as a storage value: half of a surrogate pair becomes U+FFFD; 314 for an integer beyond 64 bits."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        return texts.whole(value)
    if isinstance(value, Decimal):
        return numbers.decimal_text(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise numbers.overflow("BIGINT")
    return value  # type: ignore[no-any-return]


def _as_hana_error(error: Exception) -> HanaError:
    """Errors of arithmetic and of a wrong number of arguments get HANA's codes; never with the values in the text."""
    if isinstance(error, HanaError):
        return error
    if isinstance(error, ZeroDivisionError):
        return numbers.division_by_zero()
    if isinstance(error, ArithmeticError):
        return numbers.overflow("result out of range")
    if isinstance(error, TypeError):
        return HanaError(266, "inconsistent datatype: a function does not take arguments of this number or kind")
    return HanaError(2, f"general error: {type(error).__name__} in a function of the stand-in")
