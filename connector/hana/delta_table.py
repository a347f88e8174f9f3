"""Delta tables: SAP's tools keep them beside a source, and each record says when the row of its key changed, and how.

Sources: SAP Note 3427972 and SAP Datasphere, *Capturing Delta Changes in Your Local Table*; SAP HANA smart data
integration, *CREATE REMOTE SUBSCRIPTION*, TARGET TABLE of type UPSERT.
"""

from __future__ import annotations

from connector.errors import ConfigurationError, UnknownTable
from connector.hana.catalog import check_columns, resolve_key
from connector.hana.connection import quote
from connector.hana.watermarks import watermark
from connector.model import CollectionSpec, Column, Table, delta_of
from connector.protocols import Source

# The columns with type and time of a change: Datasphere's, then those of smart data integration.
_NAMES = (("Change_Type", "Change_Date"), ("SDI_CHANGE_TYPE", "SDI_CHANGE_TIME"))
# Insert, before and after an update, delete, delete with the key alone, upsert, initial load, replace.
OF_A_ROW = frozenset("IBUDXALR")
OF_A_DELETED_ROW = ("D", "X")
TRUNCATE = "T"


def known_columns(table: Table) -> tuple[str, str] | None:
    """Return the columns with type and time of a change if they have SAP's names."""
    return next((names for names in _NAMES if all(map(table.column, names))), None)


def not_deleted(name: str) -> str:
    """Return the condition for rows whose type, in the column with this SQL name, is not that of a deleted row. NULL is
    the type of the initial load."""
    deleted = ", ".join(f"'{kind}'" for kind in OF_A_DELETED_ROW)
    return f"({name} IS NULL OR {name} NOT IN ({deleted}))"


def delta_table(spec: CollectionSpec, table: Table, source: Source) -> tuple[Table, str, Column]:
    """Return the delta table of `table`, and its columns with type and time of a change. Raises ConfigurationError,
    UnknownTable or UnknownColumn if it does not have these, or not the key of `table`, or if it is `table` and
    `where` does not look at the type."""
    try:
        delta = source.describe(delta_of(spec))
    except UnknownTable as error:
        raise UnknownTable(f'`changes.table`: {error} Name the delta table: table = "SCHEMA.TABLE"') from None
    kind, at = known_columns(delta) or (None, None)
    kind, at = spec.changes.type or kind, spec.changes.at or at
    if kind is None or at is None:
        names = " or ".join(" and ".join(pair) for pair in _NAMES)
        raise ConfigurationError(
            f"`changes.table`: {delta.ref} does not have the columns {names}; name its columns with type and time of a "
            'change: type = "...", at = "..."'
        )
    check_columns(delta, [kind], "changes.type")
    check_columns(delta, [at], "changes.at")
    for name in resolve_key(spec, table):
        ours, its = table.column(name), delta.column(name)
        if ours is not None and (its is None or its.type_name != ours.type_name):
            found = f"its {name} is {its.type_name}" if its else f"it has no column {name}"
            raise ConfigurationError(
                f"`changes.table`: {delta.ref} must have the key columns of {table.ref} with their types, but {found} "
                f'instead of {ours.type_name}; name its delta table, or use method = "full"'
            )
    if delta.ref == table.ref and kind.lower() not in (spec.where or "").lower():
        raise ConfigurationError(
            f"`changes.table`: {delta.ref} is its own delta table, so `where` must leave out the rows that {kind} "
            f"marks as deleted: {not_deleted(quote(kind))}"
        )
    moment = delta.column(at)
    assert moment is not None  # check_columns raises otherwise
    watermark(moment, delta.ref, "changes.at")
    return delta, kind, moment
