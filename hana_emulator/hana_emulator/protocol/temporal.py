"""Convert dates and times between the protocol's numbers and the text forms of `types.py`.

Day 1 is 0001-01-01 of the Julian calendar, which hdbcli uses until 1582-10-04; the next day is 1582-10-15. From then
on, day numbers differ by 2 from Python's (proleptic Gregorian) ordinals.
"""

from __future__ import annotations

import struct
from datetime import date, time
from functools import lru_cache

NULL_DATE = 3_652_062
NULL_TIME = 86_402
NULL_SECONDDATE = 315_538_070_401
NULL_TIMESTAMP = 3_155_380_704_000_000_001

_DAY_SHIFT = 2
_GREGORIAN_FROM = "1582-10-15"
_GREGORIAN_NUMBER = date(1582, 10, 15).toordinal() + _DAY_SHIFT
_BEFORE_MARCH = 306  # Days from 1 March to 31 December: years are counted from March here
_DAY = 86_400
_TICKS = 10_000_000  # 100 ns steps per second
FIRST_FORMAT_SIZE = 4  # Bytes of a DATE or a TIME in the first data format; a TIMESTAMP consists of both
_FIRST_FORMAT_DATE = struct.Struct("<HBB")
_FIRST_FORMAT_TIME = struct.Struct("<BBH")
_YEAR_SET, _HOUR_SET = 0x8000, 0x80  # Flags of a value that is not NULL


@lru_cache(maxsize=65_536)
def date_number(text: str) -> int:
    """'YYYY-MM-DD' -> DAYDATE."""
    if text < _GREGORIAN_FROM:
        # Years begin in March here, so that the leap day is the last day.
        year = int(text[:4])
        month = int(text[5:7])
        day = int(text[8:10])
        years, months = year - (month < 3), (month + 9) % 12
        return years * 365 + years // 4 + (153 * months + 2) // 5 + day - _BEFORE_MARCH
    return date.fromisoformat(text).toordinal() + _DAY_SHIFT


@lru_cache(maxsize=65_536)
def date_text(number: int) -> str:
    if 1 <= number < _GREGORIAN_NUMBER:
        days = number + _BEFORE_MARCH - 1
        years = (4 * days + 3) // 1461
        rest = days - (years * 365 + years // 4)
        months = (5 * rest + 2) // 153
        month = (months + 2) % 12 + 1
        return f"{years + (month < 3):04}-{month:02}-{rest - (153 * months + 2) // 5 + 1:02}"
    return date.fromordinal(number - _DAY_SHIFT).isoformat()


def _seconds(text: str) -> int:
    return int(text[0:2]) * 3600 + int(text[3:5]) * 60 + int(text[6:8])


def _clock(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}"


def time_number(text: str) -> int:
    """'HH:MM:SS' -> SECONDTIME."""
    return _seconds(text) + 1


def time_text(number: int) -> str:
    if not 1 <= number <= _DAY:
        raise ValueError("time out of range")
    return _clock(number - 1)


def seconddate_number(text: str) -> int:
    """'YYYY-MM-DD HH:MM:SS' -> SECONDDATE."""
    return (date_number(text[:10]) - 1) * _DAY + _seconds(text[11:19]) + 1


def seconddate_text(number: int) -> str:
    days, seconds = divmod(number - 1, _DAY)
    return f"{date_text(days + 1)} {_clock(seconds)}"


def timestamp_number(text: str) -> int:
    """'YYYY-MM-DD HH:MM:SS[.fffffff]' -> LONGDATE."""
    fraction = int(text[20:27].ljust(7, "0")) if len(text) > 20 else 0
    return (seconddate_number(text[:19]) - 1) * _TICKS + fraction + 1


def first_format_date(text: str) -> bytes:
    """'YYYY-MM-DD' -> DATE of the first data format: year with a flag, month from 0, day."""
    return _FIRST_FORMAT_DATE.pack(int(text[:4]) | _YEAR_SET, int(text[5:7]) - 1, int(text[8:10]))


def first_format_time(text: str) -> bytes:
    """'HH:MM:SS[.fffffff]' -> TIME of the first data format: hour with a flag, minute, milliseconds."""
    milliseconds = int(text[6:8]) * 1000 + (int(text[9:12]) if len(text) > 8 else 0)
    return _FIRST_FORMAT_TIME.pack(int(text[:2]) | _HOUR_SET, int(text[3:5]), milliseconds)


def first_format_timestamp(text: str) -> bytes:
    return first_format_date(text[:10]) + first_format_time(text[11:])


def first_format_date_text(data: bytes, position: int) -> str | None:
    """The date of the first data format; None for NULL, whose year lacks the flag."""
    year, month, day = _FIRST_FORMAT_DATE.unpack_from(data, position)
    return date(year & ~_YEAR_SET, month + 1, day).isoformat() if year & _YEAR_SET else None


def first_format_time_text(data: bytes, position: int) -> str | None:
    hour, minute, milliseconds = _FIRST_FORMAT_TIME.unpack_from(data, position)
    if not hour & _HOUR_SET:
        return None
    clock = time(hour & ~_HOUR_SET, minute, milliseconds // 1000, milliseconds % 1000 * 1000)
    return clock.isoformat("milliseconds" if clock.microsecond else "seconds")


def first_format_timestamp_text(data: bytes, position: int) -> str | None:
    day, clock = first_format_date_text(data, position), first_format_time_text(data, position + FIRST_FORMAT_SIZE)
    return f"{day} {clock or '00:00:00'}" if day else None


def timestamp_text(number: int) -> str:
    seconds, ticks = divmod(number - 1, _TICKS)
    return f"{seconddate_text(seconds + 1)}.{ticks:07}"
