"""HANA's scalar functions by name: arguments, result type and the function in `builtin/` that computes them."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hana_emulator.errors import HanaError
from hana_emulator.sql.functions.builtin import (
    formats,
    fulltext,
    fvecs,
    json_path,
    moments,
    numbers,
    regular,
    texts,
)
from hana_emulator.sql.language.datatypes import FLOATING_DECIMAL, nvarchar
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


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments and result type of a HANA function. A parameter of None accepts any type.
    The last parameter of a variadic function repeats. `required` is the minimum number of arguments (-1: all)."""

    sqlite_name: str
    parameters: tuple[HanaType | None, ...]
    result: HanaType | ResultRule
    variadic: bool = False
    required: int = -1
    # Chooses the SQLite function by the arguments' types, if the storage values do not show the type
    by_type: Callable[[Sequence[HanaType]], str] | None = None

    def parameter(self, position: int) -> HanaType | None:
        if position < len(self.parameters):
            return self.parameters[position]
        return self.parameters[-1] if self.variadic and self.parameters else None

    def accepts(self, count: int) -> bool:
        least = len(self.parameters) if self.required < 0 else self.required
        return least <= count and (self.variadic or count <= len(self.parameters))

    def result_type(self, arguments: Sequence[HanaType]) -> HanaType:
        return self.result(arguments) if callable(self.result) else self.result

    def function(self, arguments: Sequence[HanaType]) -> str:
        return self.by_type(arguments) if self.by_type else self.sqlite_name


# ------------------------------------------------------------------------------------------------------ result types


def _first(arguments: Sequence[HanaType]) -> HanaType:
    return arguments[0] if arguments else TEXT


def _keeping(kept: Collection[TypeCode], otherwise: HanaType) -> ResultRule:
    """Return a rule: the first argument's type if it is one of `kept`, else `otherwise`."""
    return lambda arguments: arguments[0] if arguments and arguments[0].code in kept else otherwise


_string_piece = _keeping(STRINGS, TEXT)
_first_text = _keeping(STRINGS | {TypeCode.NCLOB, TypeCode.CLOB, TypeCode.TEXT}, TEXT)
_day_result = _keeping((TypeCode.DATE, TypeCode.SECONDDATE), TIMESTAMP)
_second_result = _keeping((TypeCode.SECONDDATE, TypeCode.TIME), TIMESTAMP)


def _substring(arguments: Sequence[HanaType]) -> HanaType:
    """Strings and binaries keep their type; BLOBs and vectors become VARBINARY; other types become strings."""
    kind = _first(arguments)
    if kind.code in VECTORS | {TypeCode.BLOB}:
        return VARBINARY
    return kind if kind.code in STRINGS | BINARIES else TEXT


def _vector_like(arguments: Sequence[HanaType]) -> HanaType:
    kind = _first(arguments)
    return kind if kind.code is TypeCode.HALF_VECTOR else REAL_VECTOR.sized(kind.length)


# ------------------------------------------------------------------------------------------------------ the functions


@dataclass(frozen=True, slots=True)
class Scalar:
    """A SQLite scalar function. `strict`: NULL in, NULL out. `pure`: same arguments, same result."""

    compute: Callable[..., Any]
    strict: bool = True
    pure: bool = True


SIGNATURES: dict[str, Signature] = {}
SCALARS: dict[str, Scalar] = {}


def _define(
    names: str,
    compute: Callable[..., Any],
    parameters: tuple[HanaType | None, ...],
    result: HanaType | ResultRule,
    **options: Any,
) -> None:
    """Define all `names` with one function; `strict` and `pure` go to the scalar, other options to the signature."""
    scalar = Scalar(compute, options.pop("strict", True), options.pop("pure", True))
    for name in names.split():
        sqlite_name = f"hana_{name.lower()}"
        SIGNATURES[name] = Signature(sqlite_name, parameters, result, **options)
        SCALARS[sqlite_name] = scalar


def _nvarchar_function(arguments: Sequence[HanaType]) -> str:
    code = _first(arguments).code
    if code in (TypeCode.REAL_VECTOR, TypeCode.HALF_VECTOR):
        return "hana_vector_text"
    if code in BINARIES:
        return "hana_bintohex"
    if len(arguments) > 1 and arguments[1].code in STRINGS and code in DATETIMES:
        return "hana_moment_text"
    return "hana_to_nvarchar"


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
    """ADD_DAYS and similar functions keep the types `kept`; others become TIMESTAMP first."""
    plain, converting = f"hana_{name.lower()}", f"hana_{name.lower()}_timestamp"
    _define(
        name,
        compute,
        (None, DOUBLE if name == "ADD_SECONDS" else INTEGER),
        result,
        by_type=lambda arguments: plain if _first(arguments).code in kept else converting,
    )
    SCALARS[converting] = Scalar(lambda value, count: compute(moments.to_timestamp(value), count))


def wrong_arguments(name: str) -> HanaError:
    return HanaError(316, f"wrong number of arguments in function invocation: {name}")


# --- vectors ----------------------------------------------------------------------------------------------------------

_define("COSINE_SIMILARITY", fvecs.cosine_similarity, (REAL_VECTOR, REAL_VECTOR), DOUBLE)
_define("L2DISTANCE", fvecs.l2_distance, (REAL_VECTOR, REAL_VECTOR), DOUBLE)
_define("CARDINALITY", fvecs.cardinality, (REAL_VECTOR,), INTEGER)
_define("L2NORM", fvecs.l2_norm, (REAL_VECTOR,), DOUBLE)
_define("L2NORMALIZE", fvecs.l2_normalize, (REAL_VECTOR,), _vector_like)
_define("TO_REAL_VECTOR", fvecs.to_real_vector, (NCLOB,), REAL_VECTOR)
_define("TO_HALF_VECTOR", fvecs.to_half_vector, (NCLOB,), HALF_VECTOR)
SCALARS["hana_vector_text"] = Scalar(fvecs.to_text)
# `registration.py` has the function, which needs the NLP service. The last arguments: [schema,] remote source.
SIGNATURES["VECTOR_EMBEDDING"] = Signature(
    "hana_vector_embedding", (NCLOB, TEXT, TEXT, TEXT, TEXT), REAL_VECTOR, required=3
)

# --- conversions ------------------------------------------------------------------------------------------------------

_EITHER: dict[str, Any] = {"required": 1, "by_type": _nvarchar_function}
_define("TO_NVARCHAR TO_VARCHAR", formats.to_nvarchar, (None, None), TEXT, **_EITHER)
SCALARS["hana_moment_text"] = Scalar(formats.write_moment)
_define("TO_NCLOB", texts.plain, (None,), NCLOB)
_define("TO_CLOB", texts.plain, (None,), CLOB)
for name, kind in (("TINYINT", TINYINT), ("SMALLINT", SMALLINT), ("INTEGER", INTEGER), ("BIGINT", BIGINT)):
    _define(f"TO_{name}", numbers.to_integer(name), (None,), kind)
_define("TO_INT", numbers.to_integer("INTEGER"), (None,), INTEGER)
_define("TO_DOUBLE", numbers.to_double, (DOUBLE,), DOUBLE)
_define("TO_REAL", numbers.to_real, (DOUBLE,), REAL)
_define("TO_SMALLDECIMAL", numbers.to_decimal, (None,), FLOATING_DECIMAL.sized(16, FLOATING_DECIMAL.scale))
_define("TO_DATE", formats.to_date, (None, TEXT), DATE, required=1)
_define("TO_TIME", formats.to_time, (None, TEXT), TIME, required=1)
_define("TO_SECONDDATE", formats.to_seconddate, (None, TEXT), SECONDDATE, required=1)
_define("TO_TIMESTAMP", formats.to_timestamp, (None, TEXT), TIMESTAMP, required=1)
_define("TO_DATS", moments.to_dats, (None,), nvarchar(8))
_define("TO_BINARY TO_VARBINARY", texts.to_binary, (None,), VARBINARY)
_define("TO_BLOB", texts.to_binary, (None,), BLOB)

# --- JSON -------------------------------------------------------------------------------------------------------------

_define("JSON_VALUE", json_path.value, (None, TEXT), TEXT)
_define("JSON_QUERY", json_path.query, (None, TEXT), TEXT)
_define("JSON_EXISTS", json_path.exists, (None, TEXT), BOOLEAN)

# --- texts ------------------------------------------------------------------------------------------------------------

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
# The replacement may be longer than the text it replaces.
_define(
    "REPLACE",
    texts.replace,
    (None, TEXT, TEXT),
    lambda kinds: kind.sized(TEXT.length) if (kind := _first_text(kinds)).code in STRINGS else kind,
)
_define("LOCATE", texts.locate, (None, TEXT, INTEGER, INTEGER), INTEGER, required=2)
_define("SUBSTR_BEFORE", texts.substring_before, (None, TEXT), TEXT)
_define("SUBSTR_AFTER", texts.substring_after, (None, TEXT), TEXT)
_define("REVERSE", texts.reverse, (None,), _first_text)
_define("ASCII UNICODE", texts.code_point, (None,), INTEGER)
_define("CHAR NCHAR", texts.character, (INTEGER,), nvarchar(1))
_define("ABAP_UPPER", texts.upper, (None,), _first_text)
_define("ABAP_LOWER", texts.lower, (None,), _first_text)

_define("IS_SQL_INJECTION_SAFE", texts.is_injection_safe, (TEXT, INTEGER), INTEGER, required=1)

SCALARS["hana_score"] = Scalar(lambda term, text: fulltext.score(texts.plain(term), texts.plain(text)))

# `calls.py` binds the clauses of these functions, so they have no signature.
SCALARS["hana_like_regexpr"] = Scalar(regular.like)
SCALARS["hana_replace_regexpr"] = Scalar(regular.replace)

# --- binaries ---------------------------------------------------------------------------------------------------------

_define("BINTOHEX BINTONHEX", texts.binary_to_hex, (None,), TEXT)
_define("HEXTOBIN", texts.hex_to_binary, (TEXT,), VARBINARY)
_define("BINTOSTR BINTONSTR", texts.binary_to_text, (None,), TEXT)
_define("STRTOBIN", texts.encoded, (TEXT, TEXT), VARBINARY, required=1)
_define("HASH_SHA256", texts.hash_sha256, (VARBINARY,), VARBINARY.sized(32), variadic=True)
_define("HASH_MD5", texts.hash_md5, (VARBINARY,), VARBINARY.sized(16), variadic=True)
_define("SYSUUID NEWUID", lambda: uuid.uuid4().bytes, (), VARBINARY.sized(16), pure=False)

# --- numbers ----------------------------------------------------------------------------------------------------------

_define("SIGN", numbers.sign, (None,), INTEGER)
_define("POWER", numbers.power, (DOUBLE, DOUBLE), DOUBLE)
_define("LOG", numbers.logarithm, (DOUBLE, DOUBLE), DOUBLE)
_define("ATAN2", numbers.arc_tangent, (DOUBLE, DOUBLE), DOUBLE)
_define("COT", numbers.function_of("COT", lambda angle: 1 / math.tan(angle)), (DOUBLE,), DOUBLE)

_define("BITNOT", numbers.bit_not, (BIGINT,), BIGINT)
_define("BITCOUNT", numbers.bit_count, (BIGINT,), INTEGER)
_define("RAND", random.random, (), DOUBLE, pure=False)
_define("BITAND", numbers.bit_and, (BIGINT, BIGINT), BIGINT)
_define("BITOR", numbers.bit_or, (BIGINT, BIGINT), BIGINT)
_define("BITXOR", numbers.bit_xor, (BIGINT, BIGINT), BIGINT)
_define("LN", numbers.function_of("LN", math.log), (DOUBLE,), DOUBLE)
for name in ("SQRT", "EXP", "SIN", "COS", "TAN", "ASIN", "ACOS", "ATAN", "SINH", "COSH", "TANH"):
    _define(name, numbers.function_of(name, getattr(math, name.lower())), (DOUBLE,), DOUBLE)

# --- dates and times --------------------------------------------------------------------------------------------------

for name, add in (("DAYS", moments.add_days), ("MONTHS", moments.add_months), ("YEARS", moments.add_years)):
    _define_shift(f"ADD_{name}", add, (TypeCode.DATE, TypeCode.SECONDDATE), _day_result)
_define_shift("ADD_SECONDS", moments.add_seconds, (TypeCode.SECONDDATE, TypeCode.TIME), _second_result)

_define("DAYS_BETWEEN", moments.days_between, (TIMESTAMP, TIMESTAMP), INTEGER)
_define("SECONDS_BETWEEN", moments.seconds_between, (TIMESTAMP, TIMESTAMP), BIGINT)
_define("NANO100_BETWEEN", moments.nano100_between, (TIMESTAMP, TIMESTAMP), BIGINT)
_define("MONTHS_BETWEEN", moments.months_between, (TIMESTAMP, TIMESTAMP), INTEGER)
_define("YEARS_BETWEEN", moments.years_between, (TIMESTAMP, TIMESTAMP), INTEGER)
# The emulator's clock is UTC.
_define(
    "LOCALTOUTC UTCTOLOCAL",
    lambda value, zone="UTC": moments.to_timestamp(value),
    (TIMESTAMP, TEXT),
    TIMESTAMP,
    required=1,
)
_define("LAST_DAY", moments.last_day, (TIMESTAMP,), DATE)
_define("NEXT_DAY", moments.next_day, (TIMESTAMP,), DATE)

_define("SECOND", moments.second, (None,), FLOATING_DECIMAL)
for name, read, kind in _PARTS:
    _define(name, moments.part(read), (None,), kind)
