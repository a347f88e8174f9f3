"""Parameter rows as hdbcli sends them, against bytes written by hand from the protocol's description."""

from __future__ import annotations

import struct
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hana_emulator.errors import HanaError
from hana_emulator.protocol import temporal
from hana_emulator.protocol.codes import ProtocolError
from hana_emulator.protocol.input import ParameterDecoder, looks_like_vector
from hana_emulator.protocol.lobs import LobInput
from hana_emulator.seam import Storage
from hana_emulator.types import HanaType, Parameter, TypeCode

T = TypeCode


def decode(type_: HanaType, data: str, count: int = 1) -> list[list[Storage]]:
    return ParameterDecoder([Parameter(type_)]).rows(bytes.fromhex(data), count)


def _i64(number: int) -> str:
    return number.to_bytes(8, "little", signed=True).hex()


FVECS = "02000000 0000803f 00000040"
GOLDEN: list[tuple[HanaType, str, Storage]] = [
    (HanaType(T.TINYINT), "01 ff", 255),
    (HanaType(T.SMALLINT), "02 feff", -2),
    (HanaType(T.INTEGER), "03 feffffff", -2),
    (HanaType(T.BIGINT), "04 0000000000000080", -(2**63)),
    (HanaType(T.BIGINT), "03 05000000", 5),
    (HanaType(T.INTEGER), "1d 02 3432", 42),
    (HanaType(T.DOUBLE), "07 000000000000f03f", 1.0),
    (HanaType(T.REAL), "06 0000c03f", 1.5),
    (HanaType(T.DOUBLE), "04 0300000000000000", 3.0),
    (HanaType(T.BOOLEAN), "1c 00", 0),
    (HanaType(T.BOOLEAN), "1c 01", None),
    (HanaType(T.BOOLEAN), "1c 02", 1),
    (HanaType(T.BOOLEAN), "9c", None),
    (HanaType(T.BOOLEAN), "01 01", 1),
    (HanaType(T.BOOLEAN), "1d 05 46616c7365", 0),
    (HanaType(T.DECIMAL, 10, 2), "1d 05 3132332e34", "123.40"),
    (HanaType(T.DECIMAL, 10, 2), "1d 06 2d302e303039", "0.00"),
    (HanaType(T.DECIMAL), "1d 06 312e35452d37", "0.00000015"),
    (HanaType(T.DECIMAL), "1d 04 31452b33", "1000"),
    (HanaType(T.DECIMAL, 10, 2), "51" + _i64(-12345), "-123.45"),
    (HanaType(T.DECIMAL, 38, 2), "4c" + "9c" + "ff" * 15, "-1.00"),
    (HanaType(T.DECIMAL, 10, 3), "05 7b" + "00" * 13 + "3c30", "1.230"),
    (HanaType(T.DECIMAL, 10, 0), "04 0700000000000000", "7"),
    (HanaType(T.NVARCHAR, 5), "1d 00", ""),
    (HanaType(T.NVARCHAR, 5), "1d 09 41 c3a4 eda0bd edb880", "Aä😀"),
    (HanaType(T.NVARCHAR, 5), "0b 01 41", "A"),
    (HanaType(T.NVARCHAR, 5), "1d ff", None),
    (HanaType(T.NVARCHAR, 5), "03 07000000", "7"),
    (HanaType(T.VARBINARY, 5), "0d 02 00ff", b"\x00\xff"),
    (HanaType(T.REAL_VECTOR, 2), "0d 0c" + FVECS, bytes.fromhex(FVECS)),
    (HanaType(T.REAL_VECTOR), "0d 0c" + FVECS, bytes.fromhex(FVECS)),
    (HanaType(T.HALF_VECTOR, 2), "0d 08 02000000 003c 0040", bytes.fromhex("02000000003c0040")),
    (HanaType(T.DATE), "3f 0a240b00", "2000-01-01"),
    (HanaType(T.DATE), "3f deb93700", None),
    (HanaType(T.DATE), "1d 0a 323030302d30312d3031", "2000-01-01"),
    (HanaType(T.DATE), "3d" + _i64(630_824_544_000_000_001), "2000-01-01"),
    (HanaType(T.TIME), "40 80510100", "23:59:59"),
    (HanaType(T.DATE), "0e d087 01 1d", "2000-02-29"),
    (HanaType(T.DATE), "0e 00000000", None),
    (HanaType(T.DATE), "10 d087 01 1d 97 3b 90e2", "2000-02-29"),
    (HanaType(T.TIME), "0f 97 3b 0be3", "23:59:58"),
    (HanaType(T.TIME), "10 d087 01 1d 97 3b 90e2", "23:59:58"),
    (HanaType(T.TIMESTAMP), "10 d087 01 1d 97 3b 0be3", "2000-02-29 23:59:58.1230000"),
    (HanaType(T.TIMESTAMP), "10 0000000000000000", None),
    (HanaType(T.SECONDDATE), "10 d087 01 1d 97 3b 90e2", "2000-02-29 23:59:58"),
    (HanaType(T.SECONDDATE), "3e" + _i64(63_082_454_402), "2000-01-01 00:00:01"),
    (HanaType(T.SECONDDATE), "3f 0a240b00", "2000-01-01 00:00:00"),
    (HanaType(T.TIMESTAMP), "3d" + _i64(630_824_544_000_000_013), "2000-01-01 00:00:00.0000012"),
    (HanaType(T.TIMESTAMP), "3e" + _i64(63_082_454_402), "2000-01-01 00:00:01.0000000"),
    (HanaType(T.TIMESTAMP), "3f 0a240b00", "2000-01-01 00:00:00.0000000"),
    (HanaType(T.NCLOB), "1a 06 03000000 00000000 616263", "abc"),
    (HanaType(T.NCLOB), "1a 06 00000000 00000000", ""),
    (HanaType(T.CLOB), "19 06 02000000 09000000 c3a4", "ä"),
    (HanaType(T.BLOB), "1b 06 02000000 00000000 ff00", b"\xff\x00"),
    (HanaType(T.NCLOB), "1d 03 616263", "abc"),
    (HanaType(T.NCLOB), "1a 06 0c000000 00000000" + FVECS, bytes.fromhex(FVECS)),
]


@pytest.mark.parametrize(("type_", "data", "expected"), GOLDEN)
def test_value_bytes(type_: HanaType, data: str, expected: Storage) -> None:
    assert decode(type_, data) == [[expected]]


@pytest.mark.parametrize("code", ["8e", "90", "8f", "8b", "e0", "e1", "83", "9a"])
def test_bit_seven_alone_means_null(code: str) -> None:
    for type_ in (HanaType(T.DATE), HanaType(T.NVARCHAR, 5), HanaType(T.REAL_VECTOR, 2), HanaType(T.NCLOB)):
        assert decode(type_, code) == [[None]]


@pytest.mark.parametrize(
    ("size", "prefix"), [(245, "f5"), (246, "f6 f600"), (32767, "f6 ff7f"), (32768, "f7 00800000")]
)
def test_length_prefix_boundaries(size: int, prefix: str) -> None:
    assert decode(HanaType(T.NVARCHAR, 5000), "1d" + prefix + "78" * size) == [["x" * size]]
    assert decode(HanaType(T.VARBINARY, 5000), "0d" + prefix + "01" * size) == [[b"\x01" * size]]


def test_rows_follow_each_other() -> None:
    decoder = ParameterDecoder([Parameter(HanaType(T.INTEGER)), Parameter(HanaType(T.NVARCHAR, 5))])
    data = bytes.fromhex("03 01000000 1d 01 41  83 8b  03 03000000 1d 00")
    assert decoder.rows(data, 3) == [[1, "A"], [None, None], [3, ""]]


def test_lob_data_follows_its_row_whatever_the_positions_say() -> None:
    kinds = [Parameter(HanaType(T.NCLOB)), Parameter(HanaType(T.INTEGER)), Parameter(HanaType(T.BLOB))]
    row = "1a 06 02000000 63000000  03 0{0}000000  1b 06 01000000 0f000000  6{0}6{0} f{0}"
    data = bytes.fromhex(row.format(1) + row.format(2))
    assert ParameterDecoder(kinds).rows(data, 2) == [["aa", 1, b"\xf1"], ["bb", 2, b"\xf2"]]


def test_an_unfinished_lob_stays_open() -> None:
    decoder = ParameterDecoder([Parameter(HanaType(T.NCLOB))])
    [[lob]] = decoder.rows(bytes.fromhex("1a 02 03000000 00000000 6162 c3"), 1)
    assert isinstance(lob, LobInput)
    lob.data += b"\xa4"
    assert decoder.lob_value(0, lob) == "abä"


def test_only_fvecs_look_like_a_vector() -> None:
    assert looks_like_vector(struct.pack("<I2f", 2, 1, 2))
    assert looks_like_vector(struct.pack("<I2e", 2, 1, 2))
    for data in (b"", b"[1, 2]", b"\0\0\0\0", struct.pack("<I3f", 2, 1, 2, 3), b"abcdefghijkl"):
        assert not looks_like_vector(data)


@given(st.text(max_size=40))
def test_texts_with_a_printable_start_are_never_taken_for_vectors(text: str) -> None:
    assert not looks_like_vector(("T" + text).encode("utf-8", "surrogatepass")) or "\0\0" in text


@pytest.mark.parametrize(
    ("type_", "data", "code"),
    [
        (HanaType(T.INTEGER), "1d 01 78", 339),
        (HanaType(T.DOUBLE), "1d 01 78", 339),
        (HanaType(T.DECIMAL, 5, 2), "1d 01 78", 339),
        (HanaType(T.DECIMAL, 5, 2), "1d 08 496e66696e697479", 339),
        (HanaType(T.BOOLEAN), "1d 01 78", 339),
        (HanaType(T.DATE), "03 01000000", 303),
        (HanaType(T.DATE), "3f ffffff7f", 303),
        (HanaType(T.TIME), "40 ffffff7f", 303),
        (HanaType(T.REAL_VECTOR, 3), "0d 0c" + FVECS, 2048),
        (HanaType(T.REAL_VECTOR), "0d 08 02000000 003c 0040", 2048),
        (HanaType(T.REAL_VECTOR), "1d 03 5b315d", 2048),
    ],
)
def test_values_that_do_not_fit_are_hana_errors(type_: HanaType, data: str, code: int) -> None:
    with pytest.raises(HanaError) as error:
        decode(type_, data)
    assert error.value.code == code


@pytest.mark.parametrize(
    ("type_", "data"),
    [
        (HanaType(T.INTEGER), ""),
        (HanaType(T.INTEGER), "03 0100"),
        (HanaType(T.INTEGER), "03 01000000 00"),
        (HanaType(T.NVARCHAR, 5), "1d 05 41"),
        (HanaType(T.NVARCHAR, 5), "1d f7 ffffffff 41"),
        (HanaType(T.NVARCHAR, 5), "1d fa 41"),
        (HanaType(T.NVARCHAR, 5), "1d 01 ff"),
        (HanaType(T.INTEGER), "63 00"),
        (HanaType(T.NCLOB), "1a 06 05000000 00000000 61"),
        (HanaType(T.NCLOB), "1a 06 ffffffff 00000000 61"),
    ],
)
def test_broken_parts_are_protocol_errors(type_: HanaType, data: str) -> None:
    with pytest.raises(ProtocolError):
        decode(type_, data)


@given(st.binary(max_size=60))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    kinds = [Parameter(HanaType(code, 4)) for code in (T.NCLOB, T.DECIMAL, T.DATE, T.REAL_VECTOR)]
    for kind in kinds:
        try:
            ParameterDecoder([kind]).rows(data, 2)
        except (ProtocolError, HanaError):
            continue


@given(st.datetimes(min_value=datetime(1583, 1, 1)))
def test_timestamps_round_trip(moment: datetime) -> None:
    text = f"{moment.isoformat(' ', 'microseconds')}0"
    assert temporal.timestamp_text(temporal.timestamp_number(text)) == text
    assert temporal.seconddate_text(temporal.seconddate_number(text[:19])) == text[:19]
