"""SAP-like sample tables of a soft drink producer: materials, notifications, customers, suppliers, plants.

`load` writes them through the interface in `seam.py`, as the wire side does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hana_emulator.sample import awkward
from hana_emulator.sample.rows import Rows, generate
from hana_emulator.sample.tables import TABLES, VIEW, VIEW_STATEMENTS
from hana_emulator.seam import SqlConnection, SqlDatabase, StorageRow

__all__ = ["all_rows", "load"]

DEFAULT_USER = "OWL"
DEFAULT_SCHEMA = "SAPDEMO"


def all_rows() -> Rows:
    rows = generate()
    awkward.add(rows)
    return rows


def load(database: SqlDatabase, user: str = DEFAULT_USER, schema: str = DEFAULT_SCHEMA) -> None:
    """Create and fill the tables in `schema`, unless they exist. Replaces the tables of an interrupted load, which
    lacks the view that is created last."""
    connection = database.connect(user)
    try:
        if not _count(connection, "SYS.SCHEMAS WHERE SCHEMA_NAME = ?", schema):
            _run(connection, f'CREATE SCHEMA "{schema}"')
        _run(connection, f'SET SCHEMA "{schema}"')
        if not _count(connection, "SYS.VIEWS WHERE SCHEMA_NAME = ? AND VIEW_NAME = ?", schema, VIEW):
            _fill(connection, schema)
    finally:
        connection.close()


def _fill(connection: SqlConnection, schema: str) -> None:
    rows = all_rows()
    for table in TABLES:
        if _count(connection, "SYS.TABLES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?", schema, table.name):
            _run(connection, f'DROP TABLE "{table.name}"')
        for statement in table.statements():
            _run(connection, statement)
        insert = connection.prepare(table.insert())
        connection.execute(insert, rows.tables[table.name], autocommit=False)
    connection.commit()
    for statement in VIEW_STATEMENTS:
        _run(connection, statement)


def _count(connection: SqlConnection, what: str, *values: str) -> int:
    outcome = connection.execute(connection.prepare(f"SELECT COUNT(*) FROM {what}"), [values], autocommit=True)
    assert outcome.rows is not None
    return cast(int, next(iter(outcome.rows))[0])


def _run(connection: SqlConnection, sql: str, rows: Sequence[StorageRow] = ((),)) -> None:
    connection.execute(connection.prepare(sql), rows, autocommit=True)
