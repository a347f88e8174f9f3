"""What a SYS view is: typed columns and the SQLite query behind them."""

from __future__ import annotations

from dataclasses import dataclass

from hana_emulator.sql.language.datatypes import nvarchar
from hana_emulator.types import Column, HanaType

FLAG = nvarchar(5)
NAME = nvarchar(256)
TEXT = nvarchar(5_000)


@dataclass(frozen=True, slots=True)
class SystemView:
    columns: tuple[Column, ...]
    sql: str


SEES_FUNCTION = "owl_sees"
"""SQLite function: may this session's user know of the table or view with this id?"""
_ALL_RELATIONS = "owl_visible r"
_SEEN_RELATIONS = f"(SELECT * FROM owl_visible WHERE {SEES_FUNCTION}(id)) r"


def view(sql_from: str, **columns: tuple[HanaType, str]) -> SystemView:
    """A view of `columns` (type and SQLite expression of each) over what follows FROM.

    `owl_visible r` there means the tables and views that the user has some privilege on: so HANA filters its system
    views, except for CATALOG READ (SAP HANA Security Guide, system privileges).
    """
    sql_from = sql_from.replace(_ALL_RELATIONS, _SEEN_RELATIONS)
    items = ", ".join(f'{text} AS "{name}"' for name, (_, text) in columns.items())
    described = tuple(Column(name, kind, True, "", "SYS") for name, (kind, _) in columns.items())
    return SystemView(described, f"SELECT {items} {sql_from}")


def flag(condition: str) -> tuple[HanaType, str]:
    return FLAG, f"CASE WHEN {condition} THEN 'TRUE' ELSE 'FALSE' END"
