"""Dates and times: the protocol's numbers from and to the text forms of `types.py`.

Day 1 is 0001-01-01 of the Julian calendar, hence the 2 days between it and Python's (proleptic Gregorian) ordinal.
Right for dates from 1582-10-15 on.
"""

from __future__ import annotations

from datetime import date
from functools import lru_cache

NULL_DATE = 3_652_062
NULL_TIME = 86_402
NULL_SECONDDATE = 315_538_070_401
NULL_TIMESTAMP = 3_155_380_704_000_000_001

_DAY_SHIFT = 2
_DAY = 86_400
_TICKS = 10_000_000
"""100 ns steps per second."""


@lru_cache(maxsize=65_536)
def date_number(text: str) -> int:
    """'YYYY-MM-DD' -> DAYDATE."""
    return date.fromisoformat(text).toordinal() + _DAY_SHIFT


@lru_cache(maxsize=65_536)
def date_text(number: int) -> str:
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


def timestamp_text(number: int) -> str:
    seconds, ticks = divmod(number - 1, _TICKS)
    return f"{seconddate_text(seconds + 1)}.{ticks:07}"
