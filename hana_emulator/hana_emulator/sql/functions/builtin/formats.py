"""Read and write dates by the format models of TO_NVARCHAR, TO_DATE, TO_TIME and TO_TIMESTAMP."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from hana_emulator.errors import HanaError

from . import fvecs, moments
from .moments import Moment
from .texts import left, plain

_ELEMENTS = re.compile(
    r'"[^"]*"|HH24|HH12|HH|SSSSS|FF[1-7]?|YYYY|YY|MONTH|MON|MM|MI|DDD|DAY|DD|DY|D|SS|AM|PM|WW|Q|[^A-Z"]', re.IGNORECASE
)


@lru_cache(maxsize=128)
def _elements(model: str) -> tuple[str, ...]:
    found, position = [], 0
    while position < len(model):
        match = _ELEMENTS.match(model, position)
        if match is None:
            raise HanaError(
                306, f"invalid format model: unknown element at character {position + 1} (to this emulator)"
            )
        found.append(match[0])
        position = match.end()
    return tuple(found)


_WRITE: dict[str, Callable[[Moment], str]] = {
    "YYYY": lambda m: f"{m.whole.year:04d}",
    "YY": lambda m: f"{m.whole.year % 100:02d}",
    "MONTH": lambda m: calendar.month_name[m.whole.month].upper(),
    "MON": lambda m: calendar.month_abbr[m.whole.month].upper(),
    "MM": lambda m: f"{m.whole.month:02d}",
    "DDD": lambda m: f"{m.whole.timetuple().tm_yday:03d}",
    "DAY": lambda m: calendar.day_name[m.whole.weekday()].upper(),
    "DY": lambda m: calendar.day_abbr[m.whole.weekday()].upper(),
    "DD": lambda m: f"{m.whole.day:02d}",
    "D": lambda m: str(m.whole.isoweekday()),
    "HH24": lambda m: f"{m.whole.hour:02d}",
    "HH12": lambda m: f"{(m.whole.hour + 11) % 12 + 1:02d}",
    "HH": lambda m: f"{(m.whole.hour + 11) % 12 + 1:02d}",
    "MI": lambda m: f"{m.whole.minute:02d}",
    "SSSSS": lambda m: f"{m.whole.hour * 3600 + m.whole.minute * 60 + m.whole.second:05d}",
    "SS": lambda m: f"{m.whole.second:02d}",
    "AM": lambda m: "AM" if m.whole.hour < 12 else "PM",
    "PM": lambda m: "AM" if m.whole.hour < 12 else "PM",
    "WW": lambda m: f"{moments.week(m.whole.date()):02d}",
    "Q": lambda m: str((m.whole.month + 2) // 3),
}


def write_moment(value: Any, model: Any) -> str:
    """Format a date or time by a model such as 'YYYY-MM-DD HH24:MI:SS.FF3'."""
    found = moments.moment(value)
    return "".join(_written(element, found) for element in _elements(plain(model)))


def _written(element: str, value: Moment) -> str:
    name = element.upper()
    if name.startswith("FF"):
        return f"{value.fraction:07d}"[: int(name[2:] or 7)]
    writer = _WRITE.get(name)
    return writer(value) if writer else element.strip('"')


_READ = {
    "YYYY": r"(?P<YYYY>\d{4})",
    "YY": r"(?P<YY>\d{2})",
    "MONTH": r"(?P<MONTH>[A-Za-z]+)",
    "MON": r"(?P<MONTH>[A-Za-z]{3})",
    "MM": r"(?P<MM>\d{1,2})",
    "DDD": r"(?P<DDD>\d{1,3})",
    "DD": r"(?P<DD>\d{1,2})",
    "HH24": r"(?P<HH24>\d{1,2})",
    "HH12": r"(?P<HH12>\d{1,2})",
    "HH": r"(?P<HH12>\d{1,2})",
    "MI": r"(?P<MI>\d{1,2})",
    "SS": r"(?P<SS>\d{1,2})",
    "AM": r"(?P<half>[AaPp][Mm])",
    "PM": r"(?P<half>[AaPp][Mm])",
}


@lru_cache(maxsize=128)
def _reader(model: str) -> re.Pattern[str]:
    pattern = ""
    for element in _elements(model):
        name = element.upper()
        if name.startswith("FF"):
            pattern += r"(?P<FF>\d{1,9})"
        elif name in _READ:
            pattern += _READ[name]
        elif name in _WRITE:
            raise HanaError(306, f"invalid format model: {name} cannot be read (by this emulator)")
        else:
            pattern += re.escape(element.strip('"'))
    try:
        return re.compile(pattern)
    except re.error:
        raise HanaError(306, "invalid format model: it names one part twice, or too many") from None


def read_moment(value: Any, model: Any) -> Moment:
    """Parse text by the format model. Raises HanaError 303 if it does not match."""
    match = _reader(plain(model)).fullmatch(plain(value).strip())
    if match is None:
        raise moments.bad_moment()
    found = {name: text for name, text in match.groupdict().items() if text is not None}
    hour = int(found.get("HH24", 0))
    if "HH12" in found:
        if not 1 <= int(found["HH12"]) <= 12:
            raise moments.bad_moment()
        hour = int(found["HH12"]) % 12 + (12 if found.get("half", "am").lower() == "pm" else 0)
    clock = (
        hour,
        int(found.get("MI", 0)),
        int(found.get("SS", 0)),
        int(found.get("FF", "0").ljust(7, "0")[:7]),
    )
    if "DDD" in found:
        first = moments.checked(_year(found), 1, 1, clock)
        day = Moment(first.ticks + (int(found["DDD"]) - 1) * 86_400 * moments.TICKS)
        if day.ticks < 0 or day.whole.year != first.whole.year:
            raise moments.bad_moment()
        return day
    month = int(found.get("MM", 1))
    if "MONTH" in found:
        names, wanted = [name[:3].upper() for name in calendar.month_name], found["MONTH"][:3].upper()
        if wanted not in names[1:]:
            raise moments.bad_moment()
        month = names.index(wanted)
    return moments.checked(_year(found), month, int(found.get("DD", 1)), clock)


def _year(found: dict[str, str]) -> int:
    return int(found["YYYY"]) if "YYYY" in found else 2000 + int(found["YY"]) if "YY" in found else 1


_MOMENT = re.compile(r"\d{4}-\d{2}-\d{2}([ T].*)?|\d{2}:\d{2}:\d{2}|\d{8}")


def to_nvarchar(value: Any, second: Any = None) -> str:
    """Convert any value to text. `second` is a format model of dates or a maximum length."""
    if isinstance(second, int):
        return left(value, second)
    if second is None:
        # Bytes that look like a vector are converted as a vector; values of known type use a typed function.
        if not isinstance(value, bytes):
            return plain(value)
        count = int.from_bytes(value[:4], "little")
        return fvecs.to_text(value) if count and len(value) in (4 + 4 * count, 4 + 2 * count) else plain(value)
    if isinstance(value, str) and _MOMENT.fullmatch(value):
        return write_moment(value, second)
    raise HanaError(7, "feature not supported: format models of numbers (by this emulator)")


def to_date(value: Any, model: Any = None) -> str:
    return moments.to_date(value) if model is None else read_moment(value, model).date()


def to_time(value: Any, model: Any = None) -> str:
    return moments.to_time(value) if model is None else read_moment(value, model).time()


def to_seconddate(value: Any, model: Any = None) -> str:
    return moments.to_seconddate(value) if model is None else read_moment(value, model).seconddate()


def to_timestamp(value: Any, model: Any = None) -> str:
    return moments.to_timestamp(value) if model is None else read_moment(value, model).timestamp()
