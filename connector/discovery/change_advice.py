"""Choose the change method of a proposal from a table's columns and a look at its rows. Pure. Cautious, because changes
that do not set a watermark are missed until the next full comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from connector.discovery.roles import tells_changes
from connector.document.values import is_tims
from connector.hana.watermarks import tells_time
from connector.model import Column, Table

FULL: Mapping[str, str] = {"method": "full"}
DELAY = "30s"
_LARGE = 500_000  # rows; comparing more in every run takes noticeable time


@dataclass(frozen=True, slots=True)
class Stamps:
    """Values of the possible watermark column: of `rows` rows, `filled` have a non-initial value; `distinct` counts
    different values."""

    rows: int
    filled: int
    distinct: int


@dataclass(frozen=True, slots=True)
class Advice:
    """`changes`: as in the settings. `guess`: based on a name."""

    changes: Mapping[str, str]
    why: str
    guess: bool = False


def stamp_column(table: Table) -> Column | None:
    """Return the possible watermark column: the time of the last change, precise to the second."""
    found = [column for column in table.columns if tells_changes(column) and tells_time(column)]
    return min(found, key=lambda column: not column.name.upper().startswith("LAST"), default=None)


def advise(table: Table, stamps: Stamps | None, rows: int | None = None) -> Advice:
    """Return advice. `stamps`: of `stamp_column`; None if not read. `rows`: of the table, if known."""
    column = stamp_column(table)
    if column is None:
        return Advice(FULL, f"every row is compared: {_no_column(table)}{_large(table, rows)}")
    doubt = _doubt(stamps)
    if doubt:
        told = f"every row is compared: {column.name} could tell what is new, but {doubt}{_large(table, rows)}"
        return Advice(FULL, told)
    assert stamps is not None
    why = (
        f"{column.name} is set in all {stamps.rows:,} rows and differs between them, so a run need read only what is "
        "new. Right only if every change sets it, in UTC: what does not, and deletions, show at the daily comparison "
        '(reconcile). In doubt: changes = { method = "full" }'
    )
    return Advice({"method": "watermark", "column": column.name, "delay": DELAY}, why, guess=True)


def _doubt(stamps: Stamps | None) -> str:
    if stamps is None:
        return "the rows were not looked at"
    if not stamps.rows:
        return "the table is empty, so nobody knows whether it is kept up"
    if stamps.filled < stamps.rows:
        return f"{stamps.rows - stamps.filled:,} of {stamps.rows:,} rows have no value in it, so it is not kept up"
    if stamps.rows == 1:
        return "there is one row only, which does not show whether it is kept up"
    if stamps.distinct < 2:
        return "all rows have the same value: a load wrote it, no change"
    return ""


def _no_column(table: Table) -> str:
    days = [column.name for column in table.columns if tells_changes(column)]
    times = [column.name for column in table.columns if _changed_at(column)]
    if days and times:
        return (
            f"{days[0]} and {times[0]} tell day and time in two columns, in the local time of the application server, "
            "and no watermark can be made of that"
        )
    if days:
        return (
            f"{days[0]} tells the day only, is often left empty, and is not set by every program that changes a row, "
            "so it is no watermark to rely on"
        )
    return "no column tells when a row changed"


def _changed_at(column: Column) -> bool:
    known = column.name in ("AEZEIT", "AEZET", "CHTIM", "UTIME", "AETIM")
    return known or (is_tims(column) and "chang" in f"{column.name} {column.comment}".lower())


def _large(table: Table, rows: int | None) -> str:
    if rows is None or rows < _LARGE:
        return ""
    ids = "" if table.is_view else ', method = "rowid" reads ids alone (a column that SAP does not document)'
    logged = "" if table.is_view else ', and method = "log" needs triggers (owl-sap changes install)'
    return f'. It is large: hash = "server" leaves unchanged rows in HANA{ids}{logged}'
