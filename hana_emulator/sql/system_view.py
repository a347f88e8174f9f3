"""What a SYS view is: typed columns and a SQLite query over the tables of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass

from hana_emulator.types import Column, HanaType


@dataclass(frozen=True, slots=True)
class SystemView:
    columns: tuple[Column, ...]
    sql: str


def view(sql_from: str, **columns: tuple[HanaType, str]) -> SystemView:
    """A view of `columns` (name = type, SQLite expression) over what follows SELECT's list."""
    items = ", ".join(f'{text} AS "{name}"' for name, (_, text) in columns.items())
    described = tuple(Column(name, kind, True, "", "SYS") for name, (kind, _) in columns.items())
    return SystemView(described, f"SELECT {items} {sql_from}")
