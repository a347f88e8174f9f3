"""How types are named, combined and kept: the rules behind every column, expression and stored value."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hana_emulator.errors import HanaError
from hana_emulator.sql.functions import accumulators, conversions, store
from hana_emulator.sql.language.datatypes import CATALOGUE_NAMES, FLOATING_DECIMAL, arithmetic, type_named, unify
from hana_emulator.types import HanaType, TypeCode

SHORT = {
    "int": type_named("INTEGER"), "big": type_named("BIGINT"), "dbl": type_named("DOUBLE"), "real": type_named("REAL"),
    "d52": type_named("DECIMAL", [5, 2]), "d83": type_named("DECIMAL", [8, 3]), "dec": FLOATING_DECIMAL,
    "n3": type_named("NVARCHAR", [3]), "n9": type_named("NVARCHAR", [9]), "v5": type_named("VARCHAR", [5]),
    "clob": type_named("NCLOB"), "bin": type_named("VARBINARY", [4]), "blob": type_named("BLOB"),
    "bool": type_named("BOOLEAN"),
    "date": type_named("DATE"), "ts": type_named("TIMESTAMP"), "vec": type_named("REAL_VECTOR", [3]),
    "vec4": type_named("REAL_VECTOR", [4]),
}  # fmt: skip


def kinds(names: str) -> list[HanaType | None]:
    return [None if name == "null" else SHORT[name] for name in names.split()]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("int int", SHORT["int"]),
        ("int big null", SHORT["big"]),
        ("int dbl", SHORT["dbl"]),
        ("d52 real", SHORT["dbl"]),
        ("d52 d83", HanaType(TypeCode.DECIMAL, 8, 3)),
        ("d52 int", HanaType(TypeCode.DECIMAL, 12, 2)),
        ("d52 dec", FLOATING_DECIMAL),
        ("n3 n9", SHORT["n9"]),
        ("n3 v5", HanaType(TypeCode.NVARCHAR, 5)),
        ("n3 clob", SHORT["clob"]),
        ("bin blob", HanaType(TypeCode.BLOB)),
        ("date ts", SHORT["ts"]),
        ("n3 int", HanaType(TypeCode.NVARCHAR, 11)),
        ("vec vec", SHORT["vec"]),
        ("vec vec4", SHORT["vec"].sized(0)),
        ("null bool", SHORT["bool"]),
        ("null null", None),
    ],
)
def test_branches_of_one_value(names: str, expected: HanaType | None) -> None:
    assert unify(kinds(names)) == expected
    assert unify(reversed(kinds(names))) == expected


@pytest.mark.parametrize("names", ["int date", "bin n3", "vec int", "bool ts", "vec n3"])
def test_branches_that_do_not_go_together(names: str) -> None:
    with pytest.raises(HanaError) as caught:
        unify(kinds(names))
    assert caught.value.code == 266


@pytest.mark.parametrize(
    ("operator", "names", "expected"),
    [
        ("+", "int int", SHORT["big"]),
        ("/", "int int", FLOATING_DECIMAL),
        ("*", "d52 d83", HanaType(TypeCode.DECIMAL, 13, 5)),
        ("+", "d52 d83", HanaType(TypeCode.DECIMAL, 9, 3)),
        ("-", "d52 int", HanaType(TypeCode.DECIMAL, 13, 2)),
        ("/", "d52 d52", FLOATING_DECIMAL),
        ("*", "dbl d52", SHORT["dbl"]),
        ("+", "n3 int", FLOATING_DECIMAL),
        ("+", "null dbl", SHORT["dbl"]),
    ],
)
def test_arithmetic(operator: str, names: str, expected: HanaType) -> None:
    assert arithmetic(operator, *kinds(names)) == expected


def test_product_too_wide_for_a_decimal_floats() -> None:
    wide = type_named("DECIMAL", [30, 10])
    assert arithmetic("*", wide, wide) == FLOATING_DECIMAL


def test_every_type_of_the_catalogue_can_be_named() -> None:
    for name in CATALOGUE_NAMES:
        assert type_named(name).code.name in (name, "DECIMAL")


@pytest.mark.parametrize(
    ("name", "sizes"), [("NVARCHAR", [0]), ("INTEGER", [3]), ("DECIMAL", [5, 6]), ("FIXED8", []), ("X", [])]
)
def test_impossible_types(name: str, sizes: list[int]) -> None:
    with pytest.raises(HanaError):
        type_named(name, sizes)


decimals = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20, places=10)


@given(decimals)
def test_wide_decimals_survive_storage(number: Decimal) -> None:
    kept = store.converter(type_named("DECIMAL", [38, 10]), "A")(str(number))
    assert isinstance(kept, str)
    assert Decimal(kept) == number
    assert len(kept.partition(".")[2]) == 10
    assert not kept.startswith("-0.0000000000")


@given(st.lists(decimals, min_size=2, max_size=2))
def test_decimal_texts_sort_as_their_numbers(numbers: list[Decimal]) -> None:
    left, right = numbers
    order = conversions.compare_decimals(str(left), str(right))
    assert order == (left > right) - (left < right)
    assert conversions.compare_decimals(f"{left:f}0", str(left)) == 0


@given(st.lists(decimals, max_size=8))
def test_decimal_sum_and_its_window_inverse_are_exact(numbers: list[Decimal]) -> None:
    total = accumulators.DecimalSum()
    for number in numbers:
        total.step(str(number))
    total.step(None)
    expected = sum(map(Fraction, numbers))
    assert (total.finalize() is None) is not bool(numbers)
    assert not numbers or Fraction(str(total.finalize())) == expected
    for number in numbers:
        total.inverse(str(number))
    assert total.value() is None


@given(st.datetimes().map(lambda moment: moment.isoformat(sep=" ", timespec="microseconds")))
def test_timestamps_have_seven_digits_and_sort_as_text(text: str) -> None:
    kept = store.timestamp_text(text, "A")
    assert kept == text + "0"
    assert store.timestamp_text(kept, "A") == kept
    assert store.date_text(kept, "A") == text[:10]
    assert store.time_text(kept, "A") == text[11:19]


@given(st.text())
def test_text_length_counts_utf16_units(text: str) -> None:
    assert store.utf16_length(text) == len(text) + sum(character > "\uffff" for character in text)
