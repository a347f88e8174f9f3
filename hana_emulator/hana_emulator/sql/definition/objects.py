"""Parse definitions of indexes, comments, schemas and synonyms; they run on a `Workbench`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection
from functools import partial

from hana_emulator.errors import HanaError, not_supported
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog import schema_objects
from hana_emulator.sql.catalog.catalog import Catalog, Index
from hana_emulator.sql.catalog.rights import PUBLIC
from hana_emulator.sql.definition import constraints
from hana_emulator.sql.definition.workbench import (
    Definition,
    Workbench,
    drop_table,
    refuse_taken,
    refuse_used_by_sessions,
)
from hana_emulator.sql.language.names import encode, hana_identifier, quoted, quoted_index
from hana_emulator.sql.language.reader import Name, Parsers, TokenReader
from hana_emulator.types import LOBS, VECTORS

# --- indexes ----------------------------------------------------------------------------------------------------------


def _create_index(unique: bool, reader: TokenReader) -> Definition:
    name = reader.name()
    reader.expect("ON")
    table = reader.name()
    reader.expect("(")
    columns = reader.several(
        lambda: (reader.identifier(), reader.take("DESC") or (reader.take("ASC") and False))  # name, descending
    )
    reader.expect(")")

    def run(bench: Workbench) -> None:
        relation = bench.table(table)
        schema = bench.catalog.require_schema(name.schema or relation.schema)
        refuse_taken_index(bench, schema, name.name)
        refuse_used_by_sessions(bench, relation)
        if unique and relation.temporary is not None:
            raise HanaError(368, "unique constraint not allowed on temporary table")
        for column, _ in columns:
            if relation.column(column).type.code in LOBS | VECTORS:
                raise HanaError(264, f"invalid datatype: {column} cannot be indexed")
        keys = ", ".join(f"{quoted(column)}{' DESC' if descending else ''}" for column, descending in columns)
        word = "UNIQUE INDEX" if unique else "INDEX"
        bench.connection.execute(f"CREATE {word} {quoted_index(schema, name.name)} ON {relation.sqlite_name} ({keys})")
        kind = "INVERTED VALUE" + (" UNIQUE" if unique else "")
        falling = frozenset(column for column, descending in columns if descending)
        index = Index(schema, name.name, relation.id, kind, tuple(column for column, _ in columns), unique, falling)
        catalogue.add_index(bench.connection, index, None)

    return run


def refuse_taken_index(bench: Workbench, schema: str, name: str) -> None:
    encode(name)
    if (schema, name) in bench.catalog.indexes:
        raise HanaError(289, f"cannot use duplicate index name: {hana_identifier(name)}")


_SIMILARITY_FUNCTIONS = ("COSINE_SIMILARITY", "L2DISTANCE")
_BUILD = {"M": (4, 1_000), "efConstruction": (1, 100_000)}
_SEARCH = {"efSearch": (1, 100_000)}
PARSERS: Parsers[Definition] = Parsers()


@PARSERS("CREATE", "HNSW", "VECTOR", "INDEX")
def _create_hnsw(reader: TokenReader) -> Definition:
    # Options and ranges follow langchain-hana. The index is only recorded.
    name = reader.name()
    reader.expect("ON")
    table = reader.name()
    columns = reader.identifiers()
    if len(columns) != 1:
        raise reader.error("one column")
    reader.expect("SIMILARITY", "FUNCTION")
    function = reader.identifier()
    if function not in _SIMILARITY_FUNCTIONS:
        raise HanaError(
            7, f"feature not supported: similarity function {function}; {' or '.join(_SIMILARITY_FUNCTIONS)} are known"
        )
    build = _configuration(reader.string(), _BUILD) if reader.take("BUILD", "CONFIGURATION") else {}
    search = _configuration(reader.string(), _SEARCH) if reader.take("SEARCH", "CONFIGURATION") else {}
    online = reader.take("ONLINE")
    options = {"function": function, "build": build, "search": search, "online": online}

    def run(bench: Workbench) -> None:
        relation = bench.table(table)
        schema = bench.catalog.require_schema(name.schema or relation.schema)
        refuse_taken_index(bench, schema, name.name)
        kind = relation.column(columns[0]).type
        if kind.code not in VECTORS:
            raise HanaError(264, f"invalid datatype: {columns[0]} is {kind.name}, an HNSW index needs a vector column")
        known = bench.catalog.indexes_of(relation)
        if any(other.kind.startswith("HNSW") and other.columns == (columns[0],) for other in known):
            raise HanaError(289, f"cannot use duplicate index: {columns[0]} has a vector index already")
        found = Index(schema, name.name, relation.id, "HNSW VECTOR", (columns[0],))
        catalogue.add_index(bench.connection, found, json.dumps(options))

    return run


def _configuration(text: str, ranges: dict[str, tuple[int, int]]) -> dict[str, int]:
    try:
        found = json.loads(text)
    except ValueError:
        raise HanaError(2, "general error: the index configuration is not JSON") from None
    if not isinstance(found, dict):
        raise HanaError(2, "general error: the index configuration is not a JSON object")
    for key, value in found.items():
        if key not in ranges:
            raise HanaError(2, f"general error: unknown index option {key}; known: {', '.join(ranges)}")
        low, high = ranges[key]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise HanaError(2, f"general error: index option {key} must be a whole number from {low} to {high}")
    return found


@PARSERS("DROP", "INDEX")
def _drop_index(reader: TokenReader) -> Definition:
    name = reader.name()
    reader.take("ONLINE")

    def run(bench: Workbench) -> None:
        schema, index_name = bench.place(name)
        index = bench.catalog.indexes.get((schema, index_name))
        if index is None:
            raise HanaError(261, f"invalid index name: {hana_identifier(index_name)}")
        if not index.kind.startswith("HNSW"):
            bench.connection.execute(f"DROP INDEX {quoted_index(schema, index_name)}")
        bench.connection.execute("DELETE FROM owl_indexes WHERE schema = ? AND name = ?", (schema, index_name))

    return run


# --- comments, schemas ------------------------------------------------------------------------------------------


@PARSERS("COMMENT", "ON")
def _comment_on(reader: TokenReader) -> Definition:
    kind = reader.identifier()
    parts = reader.dotted()
    reader.expect("IS")
    text = None if reader.take("NULL") else reader.string()
    named = parts[:-1] if kind == "COLUMN" else parts
    if kind not in ("TABLE", "VIEW", "COLUMN") or not 1 <= len(named) <= 2:
        raise not_supported(f"COMMENT ON {kind}")

    def run(bench: Workbench) -> None:
        place = bench.place(Name(named[0] if len(named) == 2 else "", named[-1]))
        relation = bench.catalog.relation(*place)
        bench.touches.add(relation.touch("ALTER"))
        if kind == "COLUMN":
            values = (text, relation.id, relation.column(parts[-1]).name)
            bench.connection.execute("UPDATE owl_columns SET comment = ? WHERE relation = ? AND name = ?", values)
        else:
            bench.connection.execute("UPDATE owl_relations SET comment = ? WHERE id = ?", (text, relation.id))

    return run


@PARSERS("CREATE", "SCHEMA")
def _create_schema(reader: TokenReader) -> Definition:
    name = reader.identifier()
    owner = reader.identifier() if reader.take("OWNED", "BY") else ""

    def run(bench: Workbench) -> None:
        encode(name)
        if name in bench.catalog.schemas or name in catalogue.SYSTEM_SCHEMAS:
            raise HanaError(386, f"cannot use duplicate schema name: {hana_identifier(name)}")
        add_schema(bench.connection, name, owner or bench.user)

    return run


def add_schema(connection: sqlite3.Connection, name: str, owner: str) -> None:
    connection.execute(
        "INSERT INTO owl_schemas(name, owner, created) VALUES (?,?, strftime('%Y-%m-%d %H:%M:%f0000', 'now'))",
        (name, owner),
    )


@PARSERS("DROP", "SCHEMA")
def _drop_schema(reader: TokenReader) -> Definition:
    name = reader.identifier()
    cascade = reader.take("CASCADE")
    reader.take("RESTRICT")

    def run(bench: Workbench) -> None:
        schema, _ = bench.place(Name(name, ""))
        if not cascade and holds_objects(bench.catalog, schema):
            raise HanaError(419, f"cannot drop: schema {hana_identifier(schema)} is not empty (use CASCADE)")
        drop_schemas(bench, {schema})

    return run


def holds_objects(catalog: Catalog, schema: str) -> bool:
    objects = catalog.objects
    named = (*objects.sequences, *objects.synonyms, *objects.triggers, *objects.functions)
    return any(one.schema == schema for one in catalog.relations.values()) or any(at == schema for at, _ in named)


_NAMED_BY_SCHEMA = ("owl_sequences", "owl_synonyms", "owl_triggers", "owl_functions")


def drop_schemas(bench: Workbench, schemas: Collection[str]) -> None:
    """Drop the schemas, all objects in them, and foreign keys that refer to these objects."""
    inside = [relation for relation in bench.catalog.relations.values() if relation.schema in schemas]
    with constraints.lifted(bench, *inside):
        for relation in inside:
            if relation.is_view:
                bench.connection.execute("DELETE FROM owl_relations WHERE id = ?", (relation.id,))
            else:
                drop_table(bench, relation)
        for schema in schemas:
            for table in _NAMED_BY_SCHEMA:
                bench.connection.execute(f"DELETE FROM {table} WHERE schema = ?", (schema,))
            bench.connection.execute("DELETE FROM owl_schemas WHERE name = ?", (schema,))


# --- synonyms: other names of tables and views, whose target need not exist yet ---------------------------------------


def _create_synonym(public: bool, reader: TokenReader) -> Definition:
    name = reader.name()
    reader.expect("FOR")
    target = reader.name()

    def run(bench: Workbench) -> None:
        place = (PUBLIC, name.name) if public else bench.place(name)
        encode(name.name)
        if place in bench.catalog.objects.synonyms:
            raise HanaError(330, f"cannot use duplicate synonym name: {hana_identifier(name.name)}")
        if not public:
            refuse_taken(bench, *place)
        found = (target.schema or bench.schema, target.name)
        schema_objects.add_synonym(bench.connection, place, found, bench.user)

    return run


def _drop_synonym(public: bool, reader: TokenReader) -> Definition:
    name = reader.name()
    _ = reader.take("CASCADE") or reader.take("RESTRICT")

    def run(bench: Workbench) -> None:
        place = (PUBLIC, name.name) if public else bench.place(name)
        target = bench.catalog.objects.synonyms.get(place)
        if target is None or target[0] == "SYS":
            raise HanaError(315, f"invalid synonym: {hana_identifier(name.name)}")
        bench.connection.execute("DELETE FROM owl_synonyms WHERE schema = ? AND name = ?", place)

    return run


PARSERS |= {
    ("CREATE", "INDEX"): partial(_create_index, False),
    ("CREATE", "UNIQUE", "INDEX"): partial(_create_index, True),
    ("CREATE", "SYNONYM"): partial(_create_synonym, False),
    ("CREATE", "PUBLIC", "SYNONYM"): partial(_create_synonym, True),
    ("DROP", "SYNONYM"): partial(_drop_synonym, False),
    ("DROP", "PUBLIC", "SYNONYM"): partial(_drop_synonym, True),
}
