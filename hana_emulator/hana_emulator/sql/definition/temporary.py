"""Clean up temporary tables at the end of a session, and after a killed emulator at the next start."""

from __future__ import annotations

import sqlite3

from hana_emulator.sql.catalog.catalog import Catalog
from hana_emulator.sql.catalog.schema_objects import LOCAL, SESSION_COLUMN
from hana_emulator.sql.definition.workbench import Workbench, drop_table


def belongs_to(catalog: Catalog, session: int) -> bool:
    """Whether the session has local temporary tables."""
    return any(entry.scope == LOCAL and entry.session == session for entry in catalog.objects.temporary.values())


def sweep(bench: Workbench) -> None:
    """Drop the session's local temporary tables and its rows in global ones, as a definition."""
    for relation in bench.catalog.relations.values():
        if relation.temporary is None:
            continue
        if relation.temporary.scope != LOCAL:
            text = f"DELETE FROM {relation.sqlite_name} WHERE {SESSION_COLUMN} = ?"
            bench.connection.execute(text, (bench.catalog.session,))
        elif relation.temporary.session == bench.catalog.session:
            drop_table(bench, relation)


def sweep_all(connection: sqlite3.Connection, catalog: Catalog) -> None:
    """Clean up after all earlier sessions, inside a transaction."""
    for relation in catalog.relations.values():
        if relation.temporary is not None and relation.temporary.scope == LOCAL:
            connection.execute(f"DROP TABLE {relation.sqlite_name}")
            connection.execute("DELETE FROM owl_relations WHERE id = ?", (relation.id,))
        elif relation.temporary is not None:
            connection.execute(f"DELETE FROM {relation.sqlite_name}")
