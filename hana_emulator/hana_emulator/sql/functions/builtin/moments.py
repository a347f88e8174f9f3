"""Date and time functions over the storage texts of DATE, TIME, SECONDDATE and TIMESTAMP (100 ns, years 1 to 9999)."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from hana_emulator.errors import HanaError

from . import numbers
from .texts import plain

TICKS = 10_000_000  # Ticks of 100 ns in a second, the resolution of HANA's TIMESTAMP
_EPOCH = datetime(1, 1, 1)
_MOMENT = re.compile(
    r"(?P<y>\d{4})-?(?P<m>\d{2})-?(?P<d>\d{2})"
    r"(?:[ T]?(?P<H>\d{1,2}):?(?P<M>\d{2})(?::?(?P<S>\d{2})(?:[.,](?P<f>\d{1,9}))?)?(?:Z|\+00:?00)?)?"
)
_TIME = re.compile(r"(?P<H>\d{1,2}):?(?P<M>\d{2})(?::?(?P<S>\d{2}))?")


def bad_moment() -> HanaError:
    return HanaError(303, "invalid DATE, TIME or TIMESTAMP value")


@dataclass(frozen=True, slots=True)
class Moment:
    """A point on the calendar: ticks of 100 ns since 0001-01-01."""

    ticks: int

    @classmethod
    def of(cls, whole: datetime, fraction: int = 0) -> Moment:
        span = whole - _EPOCH
        return cls((span.days * 86_400 + span.seconds) * TICKS + fraction)

    @property
    def whole(self) -> datetime:
        try:
            return _EPOCH + timedelta(seconds=self.ticks // TICKS)
        except OverflowError:
            raise bad_moment() from None

    @property
    def fraction(self) -> int:
        return self.ticks % TICKS

    def date(self) -> str:
        return self.whole.date().isoformat()

    def time(self) -> str:
        return self.whole.time().isoformat()

    def seconddate(self) -> str:
        return self.whole.isoformat(" ")

    def timestamp(self) -> str:
        return f"{self.seconddate()}.{self.fraction:07d}"


def moment(value: Any) -> Moment:
    """Parse any date HANA can read, with or without time: '20240131', '2024-01-31 12:00:00.5'."""
    text = plain(value).strip()
    match = _MOMENT.fullmatch(text)
    if match is None:
        clock = _TIME.fullmatch(text)
        if clock is None:
            raise bad_moment()
        return checked(1, 1, 1, (int(clock["H"]), int(clock["M"]), int(clock["S"] or 0), 0))
    hour, minute, second = (int(match[part] or 0) for part in "HMS")
    fraction = int((match["f"] or "0").ljust(7, "0")[:7])
    return checked(int(match["y"]), int(match["m"]), int(match["d"]), (hour, minute, second, fraction))


def checked(year: int, month: int, day: int, clock: tuple[int, int, int, int]) -> Moment:
    """Return the moment. Raises HanaError 303 if the date or time does not exist."""
    hour, minute, second, fraction = clock
    try:
        return Moment.of(datetime(year, month, day, hour, minute, second), fraction)
    except ValueError:
        raise bad_moment() from None


def now(clock: Callable[[], datetime]) -> Moment:
    aware = clock().astimezone(UTC).replace(tzinfo=None)
    return Moment.of(aware.replace(microsecond=0), aware.microsecond * 10)


def like_argument(value: str, result: Moment) -> str:
    """Return `result` in the storage form of `value`; an unknown form gives a timestamp."""
    by_length = {10: result.date, 8: result.time, 19: result.seconddate}
    return by_length.get(len(value), result.timestamp)()


def to_date(value: Any) -> str:
    return moment(value).date()


def to_time(value: Any) -> str:
    return moment(value).time()


def to_seconddate(value: Any) -> str:
    return moment(value).seconddate()


def to_timestamp(value: Any) -> str:
    return moment(value).timestamp()


def to_dats(value: Any) -> str:
    """Convert to ABAP's date form, YYYYMMDD."""
    return moment(value).date().replace("-", "")


def add_seconds(value: Any, count: Any) -> str:
    ticks = moment(value).ticks + int(Decimal(str(numbers.number(count))) * TICKS)
    return like_argument(value, Moment(ticks % (86_400 * TICKS) if len(value) == len("HH:MM:SS") else ticks))


def add_days(value: Any, count: Any) -> str:
    return like_argument(value, Moment(moment(value).ticks + int(numbers.number(count)) * 86_400 * TICKS))


def add_months(value: Any, count: Any) -> str:
    """Keep the day of the month, or use the last day of a shorter month."""
    start = moment(value)
    whole = start.whole
    year, month = divmod(whole.year * 12 + whole.month - 1 + int(numbers.number(count)), 12)
    if not 1 <= year <= 9999:
        raise bad_moment()
    day = min(whole.day, calendar.monthrange(year, month + 1)[1])
    return like_argument(value, Moment.of(whole.replace(year=year, month=month + 1, day=day), start.fraction))


def add_years(value: Any, count: Any) -> str:
    return add_months(value, 12 * int(numbers.number(count)))


def days_between(start: Any, end: Any) -> int:
    """Full days between times, calendar days between dates; negative if `end` is first."""
    return _between(start, end, 86_400 * TICKS)


def seconds_between(start: Any, end: Any) -> int:
    return _between(start, end, TICKS)


def nano100_between(start: Any, end: Any) -> int:
    return _between(start, end, 1)


def _between(start: Any, end: Any, unit: int) -> int:
    ticks = moment(end).ticks - moment(start).ticks
    return ticks // unit if ticks >= 0 else -(-ticks // unit)


def months_between(start: Any, end: Any) -> int:
    first, second = moment(start), moment(end)
    if second.ticks < first.ticks:
        return -months_between(end, start)
    a, b = first.whole, second.whole
    months = (b.year - a.year) * 12 + b.month - a.month
    behind = (b.day, b.time(), second.fraction) < (a.day, a.time(), first.fraction)
    return months - behind


def years_between(start: Any, end: Any) -> int:
    months = months_between(start, end)
    return months // 12 if months >= 0 else -(-months // 12)


def part(read: Callable[[datetime], int | str]) -> Callable[[Any], int | str]:
    return lambda value: read(moment(value).whole)


def second(value: Any) -> str:
    """Return the seconds as a decimal, with the fraction unless it is zero (HANA: DECIMAL(9,7))."""
    found = moment(value)
    return str(found.whole.second) if not found.fraction else f"{found.whole.second}.{found.fraction:07d}"


def iso_week(day: date) -> str:
    year, week, _ = day.isocalendar()
    return f"{year}-W{week:02d}"


def week(day: date) -> int:
    """The week number. Weeks start on Monday; week 1 contains 1 January."""
    first = date(day.year, 1, 1).weekday()
    return (day.timetuple().tm_yday + first - 1) // 7 + 1


def quarter(day: date) -> str:
    return f"{day.year}-Q{(day.month + 2) // 3}"


def last_day(value: Any) -> str:
    whole = moment(value).whole
    return whole.date().replace(day=calendar.monthrange(whole.year, whole.month)[1]).isoformat()


def next_day(value: Any) -> str:
    return Moment(moment(value).ticks + 86_400 * TICKS).date()
