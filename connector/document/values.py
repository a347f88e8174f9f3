"""Format a column's values for texts and metadata, by SAP's conventions for dates, times, numbers and amounts. The
catalogue decides once per column which convention to try.

HANA stores ABAP's dates and numbers in character columns. A convention applies when type and length, the column's name
or comment, and the value all fit; other values stay unchanged.

| convention | column | shown in a text | in metadata |
|---|---|---|---|
| DATS | characters, length 8, name or comment says date | 20240131 -> 2024-01-31; 00000000 -> "" | ISO; null |
| TIMS | characters, length 6, name or comment says time | 093000 -> 09:30:00; 000000 (initial) -> "" | ISO; null |
| NUMC, ALPHA | characters; a known key (MATNR, KUNNR ...) or a value of full length >= 10; never codes whose zeros count (postal, phone, EAN, bank ...) | 0000012345 -> 12345; all zeros -> "" | as stored |
| UTC time stamp | DECIMAL(15) or (21,7), name or comment says so | 20240131093000 -> 2024-01-31 09:30:00 | as stored |
| CURR with CUKY | DECIMAL(n,2) directly followed by its currency in the template | 12.50 EUR; 1250 JPY for a stored 12.50 | as stored |
"""  # noqa: E501  (a table row cannot be wrapped)

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache
from types import NoneType
from typing import Any, TypeVar

from connector.model import Column, Scalar

Formatter = Callable[[Any], str]
T = TypeVar("T")

CHARACTER_TYPES = frozenset(
    {"NVARCHAR", "VARCHAR", "NCHAR", "CHAR", "ALPHANUM", "SHORTTEXT", "NCLOB", "CLOB", "TEXT", "BINTEXT"}
)


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_DATE_NAMES = _names("ERSDA LAEDA DATAB DATBI BEGDA ENDDA STRMN LTRMN AUSVN AUSBS GSTRP GLTRP GSTRS GLTRS EINDT VDATU")
_DATE_NAME = re.compile(r"(DAT|DATE|DATUM|DATS)$", re.IGNORECASE)
_DATE_COMMENT = re.compile(
    r"\b(date|dats)\b|datum\b|\b(created|changed) on\b|\b(angelegt|geändert) am\b", re.IGNORECASE
)
_TIME_NAMES = _names("ERZET AEZET CPUTM AUZTV AUZTB STRUR LTRUR")
_TIME_NAME = re.compile(r"(ZEIT|TIME|TIMS|TIM|UHR)$", re.IGNORECASE)
_TIME_COMMENT = re.compile(r"\b(time|tims)\b|zeit\b", re.IGNORECASE)
_STAMP = re.compile(r"T(IME)?ST(A)?MP|_AT$|CHANGED|CREATED|\btime ?stamp\b|zeitstempel", re.IGNORECASE)
# SAP's names for numbers that are stored with leading zeros.
ALPHA_NAMES = _names(
    "MATNR KUNNR LIFNR VBELN EBELN EBELP BELNR AUFNR QMNUM EQUNR POSNR BANFN MBLNR RSNUM PERNR PARNR KOSTL PRCTR SAKNR "
    "HKONT ANLN1 CHARG VBELV KUNAG KUNWE WARPL WAPOS"
)
_ZEROS_COUNT = re.compile(
    r"PSTL|PLZ|ZIP|POST|TEL|FAX|PHONE|MOBIL|EAN|GTIN|UPC|ISBN|IBAN|BANK|BLZ|SWIFT|STCD|STEUER|TAX|HASH|GUID|BARCODE",
    re.IGNORECASE,
)
_CURRENCY_NAME = re.compile(r"WAER|CURR|CUKY", re.IGNORECASE)
_CURRENCY_COMMENT = re.compile(r"currency|cuky|währung|waehrung", re.IGNORECASE)
_CUKY_LENGTH = 5
_CURR_SCALE = 2
_NO_DECIMALS = _names("BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF")
_THREE_DECIMALS = _names("BHD IQD JOD KWD LYD OMR TND")
# And U+FEFF, the byte order mark: hdbcli drops one at the start of an NCLOB, where the HANA store keeps texts.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff]")


def formatter(column: Column) -> Formatter:
    """Return a function that formats values of this column for a text; "" for NULL and initial values. The function
    raises ValueError for NaN."""
    if (convention := _date_or_time(column)) is not None:
        return convention
    if (full := padded_length(column)) is not None:

        def without_zeros(value: Any) -> str:
            text = plain(value)
            padded = text[:1] == "0" and full in (0, len(text)) and text.isascii() and text.isdigit()
            return text.lstrip("0") if padded else text

        return without_zeros
    return _stamp if is_stamp(column) else plain


def padded_length(column: Column) -> int | None:
    """Return the length of numbers whose leading zeros a text omits; 0: of any length; None: zeros count."""
    described = f"{column.name} {column.comment}"
    if column.type_name not in CHARACTER_TYPES or not column.length or _ZEROS_COUNT.search(described):
        return None
    return 0 if column.name in ALPHA_NAMES else max(column.length, 10)  # 10: the shortest NUMC of unknown columns


def is_stamp(column: Column) -> bool:
    """Return whether a DECIMAL column looks like ABAP's UTC time stamp."""
    shape = column.type_name == "DECIMAL" and (column.length, column.scale) in ((15, 0), (21, 7))
    return shape and bool(_STAMP.search(f"{column.name} {column.comment}"))


def convert_all(convert: Callable[[Any], T], column: Sequence[Any]) -> list[T]:
    """Convert each value of a column. Texts that repeat are converted once; other equal values may look different."""
    if set(map(type, column)) <= {str, NoneType} and 2 * len(distinct := set(column)) <= len(column):
        converted = {value: convert(value) for value in distinct}
        return [converted[value] for value in column]
    return list(map(convert, column))


def plain(value: Any) -> str:
    """Format a value without SAP's conventions."""
    if isinstance(value, str):
        return clean(value).strip()
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return _trimmed(value)
    if isinstance(value, float):
        return f"{_finite(value):.15g}"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex().upper()
    return str(value)


def clean(text: str) -> str:
    """Replace control characters (except line breaks and tabs), U+FEFF and unpaired surrogates."""
    if text.isprintable():  # none of these is printable
        return text
    text = _CONTROL.sub(" ", text)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _plain_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise ValueError("not a finite number")
    return format(value, "f")


def _trimmed(value: Decimal) -> str:
    """Return plain notation without trailing zeros."""
    text = _plain_decimal(value)
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value + 0.0  # -0.0 becomes 0.0


# ------------------------------------------------------------------------------------------------- dates and times


def is_dats(column: Column) -> bool:
    """Return whether a character column looks like ABAP's DATS, YYYYMMDD."""
    return column.length == 8 and (
        column.name in _DATE_NAMES or bool(_DATE_NAME.search(column.name) or _DATE_COMMENT.search(column.comment))
    )


def is_tims(column: Column) -> bool:
    """Return whether a character column looks like ABAP's TIMS, HHMMSS."""
    return column.length == 6 and (
        column.name in _TIME_NAMES or bool(_TIME_NAME.search(column.name) or _TIME_COMMENT.search(column.comment))
    )


def _date_or_time(column: Column) -> Formatter | None:
    """Return a function that formats DATS or TIMS and leaves other values unchanged; None for other columns."""
    digits = 8 if is_dats(column) else 6 if is_tims(column) else 0
    if not digits or column.type_name not in CHARACTER_TYPES:
        return None

    def convention(value: Any) -> str:
        text = plain(value)
        shown = _iso(text, digits)
        return text if shown is None else shown

    return convention


def iso_date(text: str) -> str | None:
    """Return an ISO date, "" for the initial value, None for other texts."""
    return _iso(text, 8)


@lru_cache(maxsize=16_384)
def _iso(text: str, digits: int) -> str | None:
    """Return ABAP's date (8 digits) or time (6) as ISO, "" for the initial value (midnight, for a time), None for
    other texts."""
    if text == "0" * digits:
        return ""
    if len(text) != digits or not (text.isascii() and text.isdigit()):
        return None
    try:
        return (date if digits == 8 else time)(int(text[:-4]), int(text[-4:-2]), int(text[-2:])).isoformat()
    except ValueError:
        return None


def _stamp(value: Any) -> str:
    text = plain(value)
    whole = text.partition(".")[0]
    if whole == "0":
        return ""
    day, clock = iso_date(whole[:8]), _iso(whole[8:], 6)
    return f"{day} {clock or '00:00:00'}" if day and clock is not None else text


# ------------------------------------------------------------------------------------------------------------ amounts


def is_amount(column: Column) -> bool:
    """Return whether the column looks like ABAP's CURR, stored with two decimals for every currency."""
    return column.type_name == "DECIMAL" and column.scale == _CURR_SCALE


def is_currency(column: Column) -> bool:
    named = _CURRENCY_NAME.search(column.name) or _CURRENCY_COMMENT.search(column.comment)
    return column.type_name in CHARACTER_TYPES and column.length in (3, _CUKY_LENGTH) and bool(named)


def amount(value: Any, currency: str, currency_column: Column) -> str:
    """Format an amount with the decimals of its currency, or without decimals if it is whole.

    ABAP stores 1250 yen as 12.50. In an ABAP table, marked by a currency column of CUKY's length (5), the point moves
    for currencies with zero or three decimals (ISO 4217; a customised TCURX is not read).
    """
    if not isinstance(value, Decimal):
        return plain(value)
    decimals = 0 if currency in _NO_DECIMALS else 3 if currency in _THREE_DECIMALS else 2
    if currency_column.length == _CUKY_LENGTH and value.is_finite():
        sign, digits, exponent = value.as_tuple()  # scaleb would round to the context's precision
        value = Decimal((sign, digits, int(exponent) + _CURR_SCALE - decimals))
    trimmed = _trimmed(value)
    whole, point, fraction = trimmed.partition(".")
    return whole + point + fraction.ljust(decimals, "0") if point else whole


def scalar(column: Column) -> Callable[[Any], Scalar]:
    """Return a function that formats values of this column for metadata and raises ValueError for NaN. Integers, finite
    floats and booleans stay unchanged; DECIMAL becomes plain text, dates and times ISO, bytes hexadecimal."""
    convention = _date_or_time(column)
    return canonical if convention is None else lambda value: convention(value) or None


def canonical(value: Any) -> Scalar:
    """Format a value for metadata without SAP's conventions."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return clean(value).rstrip(" ")
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Decimal):
        return _plain_decimal(value)
    if isinstance(value, date | time):  # datetime is a date
        return value.isoformat()
    return plain(value)
