"""The environment of a data definition: a connection inside a write transaction, and the catalogue."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hana_emulator.errors import HanaError, duplicate_table
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog.catalog import Catalog, Relation, TableColumn
from hana_emulator.sql.catalog.rights import Touch
from hana_emulator.sql.language.names import encode, hana_identifier
from hana_emulator.sql.language.reader import Name
from hana_emulator.sql.query import queries
from hana_emulator.sql.query.scope import Binding


@dataclass(slots=True)
class Workbench:
    """The environment of a definition, inside a write transaction that holds the only write lock."""

    connection: sqlite3.Connection
    catalog: Catalog
    schema: str
    user: str
    touches: set[Touch] = field(default_factory=set)  # Privileges for objects that the definition uses
    # Ids of tables whose `"$rowid$"` values restart once the definition is committed
    truncated: list[int] = field(default_factory=list)

    def refresh(self) -> None:
        """Read the catalogue again, including the changes of this definition."""
        before = self.catalog
        self.catalog = catalogue.load(self.connection, before.version, before.lacking).seen_by(before.session)

    def place(self, name: Name) -> tuple[str, str]:
        """Schema (by default the current one) and name of an object. Raises HanaError for an unknown schema."""
        schema = name.schema or self.schema
        if schema in catalogue.SYSTEM_SCHEMAS:
            raise HanaError(258, f"insufficient privilege: nothing can be changed in {schema}")
        return self.catalog.require_schema(schema), name.name

    def table(self, name: Name) -> Relation:
        return self.catalog.table(*self.place(name))

    def binding(self) -> Binding:
        return Binding(self.catalog, self.schema, queries.bind_query, touches=self.touches)


Definition = Callable[[Workbench], None]


def refuse_taken(bench: Workbench, schema: str, name: str) -> None:
    """Raise HanaError if the name exists: tables, views and synonyms share one name space."""
    encode(name)
    if bench.catalog.find(schema, name) is not None or (schema, name) in bench.catalog.objects.synonyms:
        raise duplicate_table(hana_identifier(name))


def refuse_used_by_sessions(bench: Workbench, relation: Relation) -> None:
    """Raise HanaError 510 for a global temporary table that contains rows of any session."""
    if not relation.is_shared_by_sessions:
        return
    if bench.connection.execute(f"SELECT 1 FROM {relation.sqlite_name} LIMIT 1").fetchone() is not None:
        raise HanaError(
            510,
            "cannot alter global temporary table in use or create/alter/drop index on the table:"
            f" {hana_identifier(relation.name)}",
        )


def drop_identities(bench: Workbench, columns: Iterable[TableColumn]) -> None:
    """Drop the sequences of those columns that are identities with one."""
    defaults = {column.default for column in columns if column.identity}
    for sequence in bench.catalog.objects.sequences.values():
        if sequence.is_of_identity and sequence.next_value in defaults:
            bench.connection.execute("DELETE FROM owl_sequences WHERE id = ?", (sequence.id,))


def drop_table(bench: Workbench, relation: Relation) -> None:
    drop_identities(bench, relation.columns)
    bench.connection.execute(f"DROP TABLE {relation.sqlite_name}")
    bench.connection.execute("DELETE FROM owl_relations WHERE id = ?", (relation.id,))
