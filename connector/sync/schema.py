"""Has the source changed under a collection? Is it still a table, and has it the columns that the last sync used?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from connector.errors import WrongOrigin
from connector.model import Checkpoint, Table, TableRef

WRITTEN: Mapping[str, Any] = {"method": "documents"}
"""The mark of a collection that clients write."""


def check_origin(collection: str, checkpoint: Checkpoint) -> None:
    """Raises WrongOrigin for one that clients have written: no table has its documents, so all would be deleted."""
    if checkpoint.mark == WRITTEN:
        raise WrongOrigin(
            f'"{collection}" holds documents that clients wrote (documents = true), which no table has: give the '
            "collection of the table another name"
        )


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


def other_key(now: Sequence[str], checkpoint: Checkpoint) -> str:
    """A clause about a key that is another one than that by which rows were stored; "" where it is the same."""
    if not checkpoint.key or tuple(checkpoint.key) == tuple(now):
        return ""
    return f"the key was {', '.join(checkpoint.key)} at the last sync and is {', '.join(now)} now"
