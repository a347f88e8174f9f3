"""Generated values of every type, bound and fetched by the real driver: what went in comes out, wherever it is cut."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hana_emulator.protocol import decimals, temporal
from hana_emulator.protocol.input import ParameterDecoder
from hana_emulator.testing import Emulator
from hana_emulator.types import HanaType, Parameter, TypeCode

_numbers = itertools.count(1)
DAYS = st.dates(datetime.date(1582, 10, 15), datetime.date(9999, 12, 31))
"""From the first day of the Gregorian calendar on (see `temporal.py`)."""
MOMENTS = st.datetimes(datetime.datetime(1582, 10, 15), datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999))
# Half characters cannot be bound by the driver, and NUL ends a text nowhere: both sides count lengths.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def exactly(number: int, scale: int) -> Decimal:
    """`Decimal.scaleb` would round to the 28 digits of the default context."""
    sign, digits, _ = Decimal(number).as_tuple()
    return Decimal((sign, digits, -scale))


def _decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**digits - 1
    return st.integers(-most, most).map(lambda number: exactly(number, scale))


TYPES: dict[str, st.SearchStrategy[Any]] = {
    "TINYINT": st.integers(0, 255),
    "SMALLINT": st.integers(-(2**15), 2**15 - 1),
    "INTEGER": st.integers(-(2**31), 2**31 - 1),
    "BIGINT": st.integers(-(2**63), 2**63 - 1),
    "REAL": st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
    "DOUBLE": st.floats(allow_nan=False, allow_infinity=False),
    "BOOLEAN": st.booleans(),
    "DECIMAL(18,4)": _decimals(18, 4),
    "DECIMAL(34,10)": _decimals(34, 10),
    "DECIMAL(38,2)": _decimals(38, 2),
    "NVARCHAR(200)": TEXTS,
    "NCLOB": TEXTS,
    "VARBINARY(300)": st.binary(max_size=300),
    "BLOB": st.binary(max_size=300),
    "DATE": DAYS,
    "TIME": st.times().map(lambda time: time.replace(microsecond=0)),
    "SECONDDATE": MOMENTS.map(lambda moment: moment.replace(microsecond=0)),
    "TIMESTAMP": MOMENTS,
}


@pytest.fixture(scope="module")
def connection(emulator: Emulator) -> Iterator[Any]:
    with closing(emulator.connect(autocommit=True)) as connection:
        connection.cursor().execute('CREATE SCHEMA "TRIP"')
        connection.cursor().execute('SET SCHEMA "TRIP"')
        yield connection
        connection.cursor().execute('DROP SCHEMA "TRIP" CASCADE')


def plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


@pytest.mark.parametrize("type_", TYPES)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_generated_values_come_back(connection: Any, type_: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.one_of(st.none(), TYPES[type_]), min_size=1, max_size=40))
    table = f"T{next(_numbers)}"
    cursor = connection.cursor()
    cursor.execute(f'CREATE COLUMN TABLE "{table}" (N INTEGER PRIMARY KEY, V {type_})')
    cursor.executemany(f'INSERT INTO "{table}" VALUES (?, ?)', list(enumerate(values)))
    cursor.execute(f'SELECT V FROM "{table}" ORDER BY N')
    assert [plain(value) for (value,) in cursor.fetchall()] == values
    for value in (value for value in values[:3] if value is not None and type_ not in ("NCLOB", "BLOB", "REAL")):
        cursor.execute(f'SELECT COUNT(*) FROM "{table}" WHERE V = ?', (value,))
        assert cursor.fetchone()[0] == values.count(value), "a bound value equals the stored one"


LENGTHS = {
    (unit, length): unit in ("x", "a😀") and length < 100_000
    for unit in ("x", "ä", "漢", "😀", "a😀")
    for length in (0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 100_000)
}
"""Whether it is tried each time."""


@pytest.mark.parametrize(
    ("unit", "length"),
    [pytest.param(*pair, marks=[] if often else [pytest.mark.slow]) for pair, often in LENGTHS.items()],
)
def test_long_texts_around_the_inline_limit(connection: Any, unit: str, length: int) -> None:
    """Lengths count UTF-16 units; a piece may end in the middle of a character above U+FFFF."""
    text = (unit * length)[:length]
    table = f"T{next(_numbers)}"
    cursor = connection.cursor()
    cursor.execute(f'CREATE COLUMN TABLE "{table}" (V NCLOB)')
    cursor.execute(f'INSERT INTO "{table}" VALUES (?)', (text,))
    cursor.execute(f'SELECT V, LENGTH(V) FROM "{table}"')
    assert tuple(cursor.fetchone()) == (text, len(text.encode("utf-16-le")) // 2)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dimension=st.integers(1, 400), count=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_vectors_come_back_to_the_bit(connection: Any, dimension: int, count: int, seed: int) -> None:
    matrix = np.random.default_rng(seed).standard_normal((count, dimension)).astype("<f4")
    rows = [(n, np.uint32(dimension).tobytes() + row.tobytes()) for n, row in enumerate(matrix)]
    table = f"T{next(_numbers)}"
    cursor = connection.cursor()
    cursor.execute(f'CREATE COLUMN TABLE "{table}" (N INTEGER, V REAL_VECTOR({dimension}))')
    cursor.executemany(f'INSERT INTO "{table}" VALUES (?, ?)', rows)
    cursor.execute(f'SELECT N, V, CARDINALITY(V), TO_NVARCHAR(V) FROM "{table}" ORDER BY N')
    for (number, data), row in zip(rows, cursor.fetchall(), strict=True):
        assert (row[0], bytes(row[1]), row[2]) == (number, data, dimension)
        assert np.array(row[3].strip("[]").split(","), dtype=np.float32).tobytes() == data[4:]


# --------------------------------------------------------------------------------- without the driver, at length


@settings(max_examples=100, deadline=None)
@given(number=st.integers(-(10**34 - 1), 10**34 - 1), scale=st.integers(0, 30))
def test_decimals_of_34_digits_are_exact(number: int, scale: int) -> None:
    value = exactly(number, scale)
    assert decimals.decode(decimals.encode(str(value))) == value
    assert decimals.from_fixed(decimals.to_fixed(str(value), scale), scale) == value


@settings(max_examples=100, deadline=None)
@given(moment=MOMENTS, tick=st.integers(0, 9))
def test_times_are_ordered_as_their_numbers(moment: datetime.datetime, tick: int) -> None:
    text = f"{moment:%H:%M:%S.%f}{tick}"
    whole = f"{moment.date().isoformat()} {text}"
    assert temporal.timestamp_text(temporal.timestamp_number(whole)) == whole
    assert temporal.seconddate_text(temporal.seconddate_number(whole[:19])) == whole[:19]
    assert temporal.date_text(temporal.date_number(whole[:10])) == whole[:10]
    assert temporal.time_text(temporal.time_number(whole[11:19])) == whole[11:19]
    first = temporal.timestamp_number("1582-10-15 00:00:00.0000000")
    assert first <= temporal.timestamp_number(whole) <= temporal.timestamp_number("9999-12-31 23:59:59.9999999")


WHOLE: list[tuple[TypeCode, str]] = [
    (TypeCode.INTEGER, "03 01000000"),
    (TypeCode.BIGINT, "04 0100000000000000"),
    (TypeCode.DOUBLE, "07 000000000000f03f"),
    (TypeCode.NVARCHAR, "1d 05 68656c6c6f"),
    (TypeCode.NVARCHAR, "1d f6 f600" + "61" * 246),
    (TypeCode.VARBINARY, "0d 03 010203"),
    (TypeCode.DECIMAL, "05 7b" + "00" * 13 + "3c30"),
    (TypeCode.DATE, "3f 0a240b00"),
    (TypeCode.TIMESTAMP, "3d " + (630_824_544_000_000_013).to_bytes(8, "little").hex()),
    (TypeCode.NCLOB, "1a 06 03000000 00000000 616263"),
    (TypeCode.BLOB, "1b 06 03000000 00000000 616263"),
]


@pytest.mark.parametrize("digits", ["9" * 28, "9" * 29, "1" + "0" * 27 + "1", "9" * 34])
@pytest.mark.parametrize("sign", ["", "-"])
def test_long_decimals_keep_every_digit_whatever_their_sign(digits: str, sign: str) -> None:
    """Python's default decimal context would round to 28."""
    data = b"\x05" + decimals.encode(sign + digits)
    assert ParameterDecoder([Parameter(HanaType(TypeCode.DECIMAL, 34))]).rows(data, 1) == [[sign + digits]]


@pytest.mark.parametrize(("code", "data"), WHOLE)
def test_a_value_cut_anywhere_is_a_protocol_error(code: TypeCode, data: str) -> None:
    from hana_emulator.protocol.codes import ProtocolError

    whole = bytes.fromhex(data)
    decoder = ParameterDecoder([Parameter(HanaType(code, 400))])
    assert len(decoder.rows(whole, 1)) == 1
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            decoder.rows(whole[:length], 1)
    with pytest.raises(ProtocolError, match="1 bytes follow"):
        decoder.rows(whole + b"\0", 1)


JULIAN = [(1, "0001-01-01"), (36_219, "0100-02-29"), (577_737, "1582-10-04"), (577_738, "1582-10-15")]


@pytest.mark.parametrize(("number", "text"), JULIAN)
def test_days_before_the_gregorian_calendar_are_julian(number: int, text: str) -> None:
    assert (temporal.date_number(text), temporal.date_text(number)) == (number, text)


def test_every_julian_day_has_its_number() -> None:
    texts = [temporal.date_text.__wrapped__(number) for number in range(1, 577_738, 29)]
    assert texts == sorted(set(texts))
    assert [temporal.date_number.__wrapped__(text) for text in texts] == list(range(1, 577_738, 29))
