"""HANA's data types: wire codes, catalogue names, and how each value is kept in SQLite.

Storage values are the objects that SQLite holds. The wire layer decodes parameters to storage values and encodes
result rows from them, without an intermediate form.

| HANA type | storage value |
|---|---|
| TINYINT SMALLINT INTEGER BIGINT | int |
| BOOLEAN | int 0 or 1 |
| REAL DOUBLE | float |
| DECIMAL SMALLDECIMAL | str: optional '-', digits, exactly `scale` fraction digits when the type has a scale |
| NVARCHAR VARCHAR NCHAR CHAR ALPHANUM SHORTTEXT NCLOB CLOB TEXT | str without lone surrogates |
| VARBINARY BINARY BLOB | bytes |
| REAL_VECTOR HALF_VECTOR | bytes, fvecs: little-endian u32 dimension, then that many float32 (float16) |
| DATE | str 'YYYY-MM-DD' |
| TIME | str 'HH:MM:SS' |
| SECONDDATE | str 'YYYY-MM-DD HH:MM:SS' |
| TIMESTAMP | str 'YYYY-MM-DD HH:MM:SS.fffffff' (always 7 digits, so text order is time order) |

NULL is None everywhere. SQLite cannot store unpaired surrogates, unlike HANA (CESU-8): in a parameter or a statement
the emulator rejects them with code 2; in the result of a function they become U+FFFD.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum


class TypeCode(IntEnum):
    """Type codes of SAP's SQL command network protocol (result and parameter metadata)."""

    TINYINT = 1
    SMALLINT = 2
    INTEGER = 3
    BIGINT = 4
    DECIMAL = 5
    REAL = 6
    DOUBLE = 7
    CHAR = 8
    VARCHAR = 9
    NCHAR = 10
    NVARCHAR = 11
    BINARY = 12
    VARBINARY = 13
    CLOB = 25
    NCLOB = 26
    BLOB = 27
    BOOLEAN = 28
    STRING = 29
    NSTRING = 30
    BSTRING = 33
    TEXT = 51
    SHORTTEXT = 52
    ALPHANUM = 55
    TIMESTAMP = 61
    SECONDDATE = 62
    DATE = 63
    TIME = 64
    FIXED16 = 76
    FIXED8 = 81
    FIXED12 = 82
    REAL_VECTOR = 96
    HALF_VECTOR = 97


INTEGERS = frozenset({TypeCode.TINYINT, TypeCode.SMALLINT, TypeCode.INTEGER, TypeCode.BIGINT})
FLOATS = frozenset({TypeCode.REAL, TypeCode.DOUBLE})
NUMBERS = INTEGERS | FLOATS | {TypeCode.DECIMAL}
STRINGS = frozenset(
    {TypeCode.CHAR, TypeCode.VARCHAR, TypeCode.NCHAR, TypeCode.NVARCHAR, TypeCode.ALPHANUM, TypeCode.SHORTTEXT}
)
BINARIES = frozenset({TypeCode.BINARY, TypeCode.VARBINARY})
CHARACTER_LOBS = frozenset({TypeCode.CLOB, TypeCode.NCLOB, TypeCode.TEXT})
LOBS = CHARACTER_LOBS | {TypeCode.BLOB}
VECTORS = frozenset({TypeCode.REAL_VECTOR, TypeCode.HALF_VECTOR})
DATETIMES = frozenset({TypeCode.DATE, TypeCode.TIME, TypeCode.SECONDDATE, TypeCode.TIMESTAMP})

# The wire protocol's length field is a signed 16-bit number; longer declared lengths are clamped to this in metadata
MAX_LENGTH = 32_767


@dataclass(frozen=True, slots=True)
class HanaType:
    """A type with length (characters, bytes, decimal precision or vector dimension, 0 = any) and scale."""

    code: TypeCode
    length: int = 0
    scale: int = 0

    @property
    def name(self) -> str:
        """The name in SYS.TABLE_COLUMNS.DATA_TYPE_NAME."""
        return self.code.name

    def sized(self, length: int, scale: int = 0) -> HanaType:
        return replace(self, length=length, scale=scale)


INTEGER = HanaType(TypeCode.INTEGER, 10)
BIGINT = HanaType(TypeCode.BIGINT, 19)
DOUBLE = HanaType(TypeCode.DOUBLE, 15)
BOOLEAN = HanaType(TypeCode.BOOLEAN, 1)
NCLOB = HanaType(TypeCode.NCLOB, 0)
TIMESTAMP = HanaType(TypeCode.TIMESTAMP, 27, 7)
DATE = HanaType(TypeCode.DATE, 10)
# The declared type of a `?` whose context implies none (protocol reference: NVARCHAR(5000))
DEFAULT_PARAMETER = HanaType(TypeCode.NVARCHAR, 5000)


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: HanaType
    nullable: bool = True
    table: str = ""
    schema: str = ""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A statement parameter, in the order of `?` in the text."""

    type: HanaType
    name: str = ""
    nullable: bool = True
