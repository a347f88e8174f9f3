"""Has the source's table changed under a collection? Compares the columns in use with those of the last sync."""

from __future__ import annotations

from collections.abc import Iterable

from connector.model import Checkpoint, Table, TableRef


def used(table: Table, columns: Iterable[str]) -> dict[str, str]:
    """Type by name of the columns in use that the table has."""
    return {name: column.type_name for name in columns if (column := table.column(name)) is not None}


def was_synced(checkpoint: Checkpoint, source: TableRef) -> bool:
    """Has this very table been read to its end? If not, a table that is not there is a slip in the settings."""
    return checkpoint.last_sync is not None and checkpoint.source == str(source)


def missing(table: Table, checkpoint: Checkpoint) -> list[str]:
    """Columns that the last sync used and that the table no longer has."""
    return [name for name in checkpoint.columns if table.column(name) is None]


def retyped(now: dict[str, str], checkpoint: Checkpoint) -> list[str]:
    """Sentences about columns whose type is another one now."""
    return [
        f"{name} was {checkpoint.columns[name]} and is {kind}"
        for name, kind in now.items()
        if checkpoint.columns.get(name, kind) != kind
    ]
