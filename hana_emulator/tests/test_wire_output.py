"""Result fields, metadata and pages against bytes written by hand from the protocol's description."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from hana_emulator.errors import HanaError
from hana_emulator.protocol import metadata, output
from hana_emulator.protocol.lobs import LobStore
from hana_emulator.protocol.output import ResultSet, field_encoder, row_encoder
from hana_emulator.seam import Storage
from hana_emulator.types import Column, HanaType, Parameter, TypeCode

T = TypeCode
VECTOR = "03000000 0000803f 00000040 00004040"


def _i64(number: int) -> str:
    return number.to_bytes(8, "little").hex()


GOLDEN: list[tuple[HanaType, Storage, str]] = [
    (HanaType(T.TINYINT), 255, "01 ff"),
    (HanaType(T.SMALLINT), -2, "01 feff"),
    (HanaType(T.INTEGER), 66051, "01 03020100"),
    (HanaType(T.BIGINT), -(2**63), "01 0000000000000080"),
    (HanaType(T.BIGINT), None, "00"),
    (HanaType(T.REAL), 1.5, "0000c03f"),
    (HanaType(T.REAL), None, "ffffffff"),
    (HanaType(T.DOUBLE), 1.0, "000000000000f03f"),
    (HanaType(T.DOUBLE), 2, "0000000000000040"),
    (HanaType(T.DOUBLE), None, "ffffffffffffffff"),
    (HanaType(T.BOOLEAN), 0, "00"),
    (HanaType(T.BOOLEAN), 1, "02"),
    (HanaType(T.BOOLEAN), None, "01"),
    (HanaType(T.DECIMAL, 10, 2), "1.23", "01 7b" + "00" * 7),
    (HanaType(T.DECIMAL, 18, 2), "-1.23", "01 85" + "ff" * 7),
    (HanaType(T.DECIMAL, 19, 2), "1.23", "01 7b" + "00" * 11),
    (HanaType(T.DECIMAL, 28, 2), "-1.23", "01 85" + "ff" * 11),
    (HanaType(T.DECIMAL, 29, 2), "1.23", "01 7b" + "00" * 15),
    (HanaType(T.DECIMAL, 18, 0), "9" * 18, "01 ffff63a7b3b6e00d"),
    (HanaType(T.DECIMAL, 10, 2), None, "00"),
    (HanaType(T.DECIMAL), "1.23", "7b" + "00" * 13 + "3c30"),
    (HanaType(T.DECIMAL, 38, 2), "-1.00", "01 9c" + "ff" * 15),
    (HanaType(T.DECIMAL, 38, 2), None, "00"),
    (HanaType(T.NVARCHAR, 9), "", "00"),
    (HanaType(T.NVARCHAR, 9), "Aä😀", "09 41 c3a4 eda0bd edb880"),
    (HanaType(T.NVARCHAR, 9), None, "ff"),
    (HanaType(T.VARCHAR, 9), "A", "01 41"),
    (HanaType(T.NCHAR, 2), "A ", "02 4120"),
    (HanaType(T.ALPHANUM, 4), "0012", "04 30303132"),
    (HanaType(T.SHORTTEXT, 4), "x", "01 78"),
    (HanaType(T.VARBINARY, 9), b"\x00\xff", "02 00ff"),
    (HanaType(T.VARBINARY, 9), None, "ff"),
    (HanaType(T.REAL_VECTOR, 3), bytes.fromhex(VECTOR), "10" + VECTOR),
    (HanaType(T.REAL_VECTOR, 3), None, "ff"),
    (HanaType(T.HALF_VECTOR, 2), bytes.fromhex("02000000 003c 0040"), "08 02000000 003c 0040"),
    (HanaType(T.DATE), "2000-01-01", "0a240b00"),  # day 730,122
    (HanaType(T.DATE), "1582-10-15", "cad00800"),  # day 577,738: the first of the Gregorian calendar
    (HanaType(T.DATE), "9999-12-31", "ddb93700"),
    (HanaType(T.DATE), None, "deb93700"),
    (HanaType(T.TIME), "00:00:00", "01000000"),
    (HanaType(T.TIME), "23:59:59", "80510100"),
    (HanaType(T.TIME), None, "82510100"),
    (HanaType(T.SECONDDATE), "2000-01-01 00:00:01", _i64(63_082_454_402)),  # 730,121 whole days before it
    (HanaType(T.SECONDDATE), None, _i64(315_538_070_401)),
    (HanaType(T.TIMESTAMP), "2000-01-01 00:00:00.0000000", _i64(630_824_544_000_000_001)),
    (HanaType(T.TIMESTAMP), "2000-01-01 00:00:00.0000012", _i64(630_824_544_000_000_013)),
    (HanaType(T.TIMESTAMP), None, _i64(3_155_380_704_000_000_001)),
    (HanaType(T.NCLOB), None, "03 01"),
    (HanaType(T.CLOB), None, "03 01"),
    (HanaType(T.BLOB), None, "01 01"),
    (HanaType(T.TEXT), None, "03 01"),
    (
        HanaType(T.NCLOB),
        "ä😀",
        "03 06 0000 0300000000000000 0800000000000000 0000000000000000 08000000 c3a4 eda0bd edb880",
    ),
    (HanaType(T.CLOB), "", "03 06 0000 0000000000000000 0000000000000000 0000000000000000 00000000"),
    (HanaType(T.BLOB), b"\x00\x01", "01 06 0000 0200000000000000 0200000000000000 0000000000000000 02000000 0001"),
]


@pytest.mark.parametrize(("type_", "value", "expected"), GOLDEN)
def test_field_bytes(type_: HanaType, value: Storage, expected: str) -> None:
    assert field_encoder(type_, LobStore())(value) == bytes.fromhex(expected)


@pytest.mark.parametrize(
    ("size", "prefix"), [(245, "f5"), (246, "f6 f600"), (32767, "f6 ff7f"), (32768, "f7 00800000")]
)
def test_length_prefix_boundaries(size: int, prefix: str) -> None:
    expected = bytes.fromhex(prefix)
    assert field_encoder(HanaType(T.NVARCHAR), LobStore())("x" * size) == expected + b"x" * size
    assert field_encoder(HanaType(T.VARBINARY), LobStore())(b"\0" * size) == expected + b"\0" * size


def test_rows_are_fields_back_to_back() -> None:
    columns = [Column("A", HanaType(T.INTEGER)), Column("B", HanaType(T.NVARCHAR, 5))]
    assert row_encoder(columns, LobStore())((1, "x")) == bytes.fromhex("01 01000000 01 78")


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (HanaType(T.INTEGER), "1"),
        (HanaType(T.INTEGER), 2**31),
        (HanaType(T.NVARCHAR, 5), 7),
        (HanaType(T.DATE), "99999999"),
        (HanaType(T.DECIMAL, 5), "secret"),
        (HanaType(T.NCLOB), b"secret"),
        (HanaType(T.REAL_VECTOR, 3), "secret"),
    ],
)
def test_a_mistyped_value_names_the_column_and_not_the_value(type_: HanaType, value: Storage) -> None:
    encode = row_encoder([Column("OK", HanaType(T.INTEGER)), Column("BAD", type_)], LobStore())
    with pytest.raises(HanaError) as error:
        encode((1, value))
    assert error.value.code == 2048
    assert "BAD" in error.value.text
    assert type_.name in error.value.text
    assert "secret" not in error.value.text


BEFORE_FIXED: list[tuple[int, HanaType, Storage, str]] = [
    (7, HanaType(T.DECIMAL, 10, 2), "1.23", "7b" + "00" * 13 + "3c30"),
    (7, HanaType(T.DECIMAL, 10, 2), "-1.23", "7b" + "00" * 13 + "3cb0"),
    (7, HanaType(T.DECIMAL, 10, 0), "0", "00" * 14 + "4030"),
    (7, HanaType(T.DECIMAL, 10, 2), None, "00" * 15 + "70"),
    (7, HanaType(T.DECIMAL, 34), "9" * 34, "ffffffff638e8d37c087adbe09ed4130"),
    (7, HanaType(T.BOOLEAN), 1, "02"),
    (6, HanaType(T.BOOLEAN), 1, "01 01"),
    (6, HanaType(T.BOOLEAN), None, "00"),
    (3, HanaType(T.DATE), "2000-01-01", "0a240b00"),
    (1, HanaType(T.DATE), "2000-02-29", "d087 01 1d"),
    (1, HanaType(T.DATE), None, "00000000"),
    (1, HanaType(T.TIME), "23:59:58", "97 3b 90e2"),
    (1, HanaType(T.TIME), None, "00000000"),
    (1, HanaType(T.TIMESTAMP), "2000-01-01 23:59:58.1230000", "d087 00 01 97 3b 0be3"),
    (1, HanaType(T.SECONDDATE), "2000-01-01 23:59:58", "d087 00 01 97 3b 90e2"),
    (1, HanaType(T.TIMESTAMP), None, "0000000000000000"),
]


@pytest.mark.parametrize(("data_format", "type_", "value", "expected"), BEFORE_FIXED)
def test_a_client_gets_the_types_of_its_data_format(
    data_format: int, type_: HanaType, value: Storage, expected: str
) -> None:
    assert field_encoder(type_, LobStore(), data_format)(value) == bytes.fromhex(expected)


@pytest.mark.parametrize(
    ("data_format", "codes"), [(1, [16, 16, 14, 15, 1, 5]), (4, [61, 62, 63, 64, 1, 5]), (8, [61, 62, 63, 64, 28, 81])]
)
def test_metadata_announces_the_types_of_the_data_format(data_format: int, codes: list[int]) -> None:
    names = (T.TIMESTAMP, T.SECONDDATE, T.DATE, T.TIME, T.BOOLEAN)
    types = [*map(HanaType, names), HanaType(T.DECIMAL, 15, 5)]
    columns = metadata.result_metadata([Column("", one) for one in types], data_format).data
    parameters = metadata.parameter_metadata([Parameter(one) for one in types], data_format).data
    assert [columns[24 * n + 1] for n in range(6)] == codes
    assert [parameters[16 * n + 1] for n in range(6)] == codes


def test_a_row_of_wrong_width_is_an_error() -> None:
    with pytest.raises(HanaError, match="2 values for 1 columns"):
        row_encoder([Column("A", HanaType(T.INTEGER))], LobStore())((1, 2))


def test_result_metadata_bytes() -> None:
    columns = [
        Column("ID", HanaType(T.BIGINT, 19), nullable=False, table="T", schema="S"),
        Column("X", HanaType(T.NVARCHAR, 40000), table="T", schema="S"),
        Column("Ä", HanaType(T.DECIMAL, 10, 2)),
    ]
    part = metadata.result_metadata(columns)
    assert part.count == 3
    assert part.data == bytes.fromhex(
        "01 04 0000 1300 0000 00000000 02000000 04000000 04000000"
        "02 0b 0000 ff7f 0000 00000000 02000000 07000000 07000000"
        "02 51 0200 0a00 0000 ffffffff ffffffff 09000000 09000000"
        "01 54  01 53  02 4944  01 58  02 c384"
    )


def test_parameter_metadata_bytes() -> None:
    parameters = [
        Parameter(HanaType(T.REAL_VECTOR, 384), nullable=False),
        Parameter(HanaType(T.NCLOB), name="P"),
        Parameter(HanaType(T.DECIMAL, 38, 3)),
        Parameter(HanaType(T.DECIMAL)),
    ]
    assert metadata.parameter_metadata(parameters).data == bytes.fromhex(
        "01 60 01 00 ffffffff 8001 0000 00000000"
        "02 1a 01 00 00000000 0000 0000 00000000"
        "02 4c 01 00 ffffffff 2600 0300 00000000"
        "02 05 01 00 ffffffff 0000 ff7f 00000000"
        "01 50"
    )


def _numbers(count: int) -> Iterator[tuple[int]]:
    return iter([(n,) for n in range(count)])


INTEGERS = [Column("N", HanaType(T.INTEGER))]


def test_pages_end_at_the_wanted_number_of_rows() -> None:
    results = ResultSet(_numbers(5), INTEGERS, LobStore())
    pages = []
    while not results.exhausted:
        data, count = results.page(2)
        pages.append([value for (value,) in struct.iter_unpack("<xi", data)])
        assert len(pages[-1]) == count
    assert pages == [[0, 1], [2, 3], [4]]


def test_a_page_ending_with_the_last_row_is_the_last_page() -> None:
    results = ResultSet(_numbers(4), INTEGERS, LobStore())
    assert [results.page(2)[1], results.exhausted] == [2, False]
    assert [results.page(2)[1], results.exhausted] == [2, True]


def test_an_empty_result_is_exhausted_at_once() -> None:
    results = ResultSet(iter(()), INTEGERS, LobStore())
    assert results.page(10) == (b"", 0)
    assert results.exhausted


def test_pages_are_cut_near_their_size_limit() -> None:
    rows = iter([("x" * 200,)] * 5000)
    results = ResultSet(rows, [Column("S", HanaType(T.NVARCHAR, 200))], LobStore())
    data, count = results.page(32767)
    assert output.PAGE_BYTES <= len(data) < output.PAGE_BYTES + 201
    total = count
    while not results.exhausted:
        total += results.page(32767)[1]
    assert total == 5000


def test_pages_are_cut_by_the_lobs_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PAGE_LOB_BYTES", 20_000)
    results = ResultSet(iter([(b"x" * 9_000,)] * 10), [Column("B", HanaType(T.BLOB))], LobStore())
    assert results.page(100)[1] == 3


def test_rows_are_read_lazily() -> None:
    read = []

    def rows() -> Iterator[tuple[int]]:
        for n in range(1000):
            read.append(n)
            yield (n,)

    ResultSet(rows(), INTEGERS, LobStore()).page(10)
    assert len(read) == 11
