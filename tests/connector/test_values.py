"""SAP's conventions for dates, times, numbers and amounts, by column."""

from __future__ import annotations

from datetime import date, datetime, time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.document.values import amount, canonical, clean, formatter, is_amount, is_currency, plain, scalar
from connector.model import Column


def characters(name: str, length: int, comment: str = "") -> Column:
    return Column(name, "NVARCHAR", length, comment=comment)


DATS = characters("ERSDA", 8)
TIMS = characters("MZEIT", 6)
MATNR = characters("MATNR", 40)
STAMP = Column("CHANGED_AT", "DECIMAL", 15, 0)


@pytest.mark.parametrize(
    ("column", "value", "shown", "kept"),
    [
        (DATS, "20240131", "2024-01-31", "2024-01-31"),
        (DATS, "00000000", "", None),
        (DATS, "        ", "", None),
        (DATS, None, "", None),
        (DATS, "20240231", "20240231", "20240231"),
        (DATS, "2024013", "2024013", "2024013"),
        (DATS, "٢٠٢٤٠١٣١", "٢٠٢٤٠١٣١", "٢٠٢٤٠١٣١"),
        (characters("AEDAT", 8), "20240131", "2024-01-31", "2024-01-31"),
        (characters("X", 8, "Date of birth"), "19991231", "1999-12-31", "1999-12-31"),
        (characters("X", 8, "Erstellungsdatum"), "19991231", "1999-12-31", "1999-12-31"),
        (characters("X", 8, "Created On"), "19991231", "1999-12-31", "1999-12-31"),
        (characters("X", 8), "20240131", "20240131", "20240131"),
        (characters("ERDAT", 10), "20240131", "20240131", "20240131"),
        (characters("X", 8, "candidate"), "20240131", "20240131", "20240131"),
        (TIMS, "093005", "09:30:05", "09:30:05"),
        (TIMS, "000000", "", None),
        (TIMS, "250000", "250000", "250000"),
        (characters("X", 6, "Uhrzeit"), "235959", "23:59:59", "23:59:59"),
        (characters("X", 6), "093005", "093005", "093005"),
        (MATNR, "000000000000012345", "12345", "000000000000012345"),
        (MATNR, "000000000000000000", "", "000000000000000000"),
        (MATNR, "00AB", "00AB", "00AB"),
        (MATNR, "P-0042", "P-0042", "P-0042"),
        (characters("NUMBER", 12), "000000004711", "4711", "000000004711"),
        (characters("NUMBER", 12), "04711", "04711", "04711"),
        (characters("CODE", 4), "0042", "0042", "0042"),
        (characters("MANDT", 3), "001", "001", "001"),
        (characters("PSTLZ", 10), "0123456789", "0123456789", "0123456789"),
        (characters("X", 10, "Telephone"), "0123456789", "0123456789", "0123456789"),
        (characters("EAN11", 18), "000400638133393100", "000400638133393100", "000400638133393100"),
        (STAMP, Decimal(20240131093005), "2024-01-31 09:30:05", "20240131093005"),
        (STAMP, Decimal(20240131000000), "2024-01-31 00:00:00", "20240131000000"),
        (STAMP, Decimal(0), "", "0"),
        (STAMP, Decimal(123), "123", "123"),
        (Column("CRTSTMP", "DECIMAL", 21, 7), Decimal("20240131093005.1234567"), "2024-01-31 09:30:05", None),
        (Column("AMOUNT", "DECIMAL", 15, 0), Decimal(20240131093005), "20240131093005", "20240131093005"),
    ],
)
def test_conventions(column, value, shown, kept):
    assert formatter(column)(value) == shown
    if kept is not None or value is None or shown == "":
        assert scalar(column)(value) == kept


@pytest.mark.parametrize(
    ("value", "shown", "kept"),
    [
        (None, "", None),
        ("text  ", "text", "text"),
        ("  text", "text", "  text"),
        ("", "", ""),
        (True, "true", True),
        (False, "false", False),
        (0, "0", 0),
        (-5, "-5", -5),
        (2**63 - 1, "9223372036854775807", 2**63 - 1),
        (1.5, "1.5", 1.5),
        (0.1 + 0.2, "0.3", 0.1 + 0.2),
        (-0.0, "0", 0.0),
        (1e300, "1e+300", 1e300),
        (Decimal("12.500"), "12.5", "12.500"),
        (Decimal("12.00"), "12", "12.00"),
        (Decimal("100"), "100", "100"),
        (Decimal("1E+3"), "1000", "1000"),
        (Decimal("-0.00"), "0", "-0.00"),
        (Decimal("0.0000001"), "0.0000001", "0.0000001"),
        (Decimal("12345678901234567890123456789012345.678"), "12345678901234567890123456789012345.678", None),
        (date(2024, 1, 31), "2024-01-31", "2024-01-31"),
        (time(9, 30), "09:30:00", "09:30:00"),
        (datetime(2024, 1, 31, 9, 30), "2024-01-31 09:30:00", "2024-01-31T09:30:00"),
        (datetime(2024, 1, 31, 9, 30, 0, 5), "2024-01-31 09:30:00.000005", "2024-01-31T09:30:00.000005"),
        (b"\x01\xff", "01FF", "01FF"),
        (memoryview(b"\x01\xff"), "01FF", "01FF"),
    ],
)
def test_values_without_a_convention(value, shown, kept):
    assert plain(value) == shown
    if kept is not None or value is None:
        assert canonical(value) == kept
        assert type(canonical(value)) is type(kept)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), Decimal("NaN"), Decimal("Infinity")])
@pytest.mark.parametrize("convert", [plain, canonical])
def test_what_is_no_number_is_refused(convert, bad):
    with pytest.raises(ValueError, match="finite"):
        convert(bad)


@given(st.text(st.characters()))
def test_clean_text_can_be_stored_and_is_stable(text):
    cleaned = clean(text)
    assert cleaned.encode().decode() == cleaned
    assert not any(char < " " and char not in "\t\n\r" for char in cleaned)
    assert clean(cleaned) == cleaned


def test_clean_keeps_what_is_text():
    assert clean("Größe\n\t😀 — „x“") == "Größe\n\t😀 — „x“"
    assert clean("a\0b\x1fc") == "a b c"
    assert clean("\ufeffa\ufeffb") == " a b"
    assert clean("a\ud83db") == "a\ufffdb"
    assert clean("\ud83d\ude00") == "😀"


AMOUNT = Column("NETWR", "DECIMAL", 15, 2)
CUKY = characters("WAERS", 5)
ISO = characters("CURRENCY_CODE", 3)


@pytest.mark.parametrize(
    ("value", "currency", "column", "shown"),
    [
        (Decimal("12.50"), "EUR", CUKY, "12.50"),
        (Decimal("12.00"), "EUR", CUKY, "12"),
        (Decimal("0.00"), "EUR", CUKY, "0"),
        (Decimal("-12.50"), "EUR", CUKY, "-12.50"),
        (Decimal("12.50"), "JPY", CUKY, "1250"),
        (Decimal("12.00"), "JPY", CUKY, "1200"),
        (Decimal("12.50"), "JPY", ISO, "12.5"),
        (Decimal("12.34"), "KWD", CUKY, "1.234"),
        (Decimal("12.34"), "KWD", ISO, "12.340"),
        (Decimal("12.50"), "", CUKY, "12.50"),
        (None, "EUR", CUKY, ""),
        (12, "EUR", CUKY, "12"),
        (Decimal("123456789012345678901234567890123456.78"), "JPY", CUKY, "12345678901234567890123456789012345678"),
    ],
)
def test_amounts_by_currency(value, currency, column, shown):
    assert amount(value, currency, column) == shown


def test_which_columns_are_amounts_and_currencies():
    assert is_amount(AMOUNT)
    assert not is_amount(Column("MENGE", "DECIMAL", 13, 3))
    assert not is_amount(Column("N", "INTEGER"))
    assert is_currency(CUKY)
    assert is_currency(ISO)
    assert is_currency(characters("X", 5, "Währung"))
    assert not is_currency(characters("WAERS", 20))
    assert not is_currency(characters("MEINS", 3))


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**12), max_value=10**12))
def test_an_amount_keeps_its_value(value):
    assert Decimal(amount(value, "EUR", CUKY)) == value
    assert Decimal(amount(value, "JPY", CUKY)) == value * 100
