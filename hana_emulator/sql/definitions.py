"""Data definition: CREATE, ALTER, DROP, TRUNCATE, RENAME, COMMENT ON, schemas, users. Parsed here, run in one transaction.

`parse` gives a function to run against a `Workbench`; nothing is checked against the catalogue before that.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hana_emulator.errors import HanaError, duplicate_table, not_supported, syntax_error
from hana_emulator.sql import catalog as catalogue
from hana_emulator.sql import dialect, expressions, queries
from hana_emulator.sql.catalog import Catalog, Constraint, Index, Relation, TableColumn
from hana_emulator.sql.datatypes import is_text
from hana_emulator.sql.hnsw import parse_hnsw
from hana_emulator.sql.names import encode, hana_identifier, quoted, quoted_table
from hana_emulator.sql.reader import Name, TokenReader
from hana_emulator.sql.scope import Binding, Bound, Scope
from hana_emulator.sql.writes import stored
from hana_emulator.types import INTEGERS, LOBS, VECTORS, TypeCode

_COLUMN_OPTIONS = frozenset({"NOT", "NULL", "DEFAULT", "PRIMARY", "UNIQUE", "GENERATED", "COMMENT"})


@dataclass(slots=True)
class Workbench:
    """Where a definition runs: inside a write transaction that holds the only write lock."""

    connection: sqlite3.Connection
    catalog: Catalog
    schema: str
    user: str

    def place(self, name: Name) -> tuple[str, str]:
        """Schema and name of an object, in the current schema unless told otherwise; the schema must exist."""
        schema = name.schema or self.schema
        if schema in catalogue.SYSTEM_SCHEMAS:
            raise HanaError(258, f"insufficient privilege: nothing can be changed in {schema}")
        return self.catalog.require_schema(schema), name.name

    def table(self, name: Name) -> Relation:
        return self.catalog.table(*self.place(name))

    def binding(self) -> Binding:
        return Binding(self.catalog, self.schema, queries.bind_query)


Definition = Callable[[Workbench], None]


@dataclass(slots=True)
class _TableDraft:
    columns: list[TableColumn] = field(default_factory=list)
    constraints: list[Constraint] = field(default_factory=list)

    def constrain(self, columns: Sequence[str], *, primary: bool, name: str = "") -> None:
        if primary and any(constraint.primary_key for constraint in self.constraints):
            raise HanaError(325, "multiple primary keys are not allowed")
        label = name or ("_SYS_TREE_PRIMARY_KEY" if primary else f"_SYS_TREE_UNIQUE_{len(self.constraints)}")
        self.constraints.append(Constraint(label, tuple(columns), primary))

    def finished(self, schema: str, name: str) -> Relation:
        names = [column.name for column in self.columns]
        for column in names:
            if names.count(column) > 1:
                raise HanaError(263, f"invalid alias: column {column} is defined twice")
        for constraint in self.constraints:
            self._check(constraint)
        key = next((c.columns for c in self.constraints if c.primary_key), ())
        columns = tuple(replace(c, nullable=False) if c.name in key else c for c in self.columns)
        return Relation(0, schema, name, columns, constraints=tuple(self.constraints))

    def _check(self, constraint: Constraint) -> None:
        by_name = {column.name: column for column in self.columns}
        for name in constraint.columns:
            if name not in by_name:
                raise HanaError(260, f"invalid column name: {name}")
            if by_name[name].type.code in LOBS | VECTORS:
                raise HanaError(264, f"invalid datatype: {name} cannot be part of a key")


def parse(reader: TokenReader) -> Definition | None:
    """The definition that the statement asks for; None when it is no definition."""
    for words, parser in _PARSERS.items():
        if reader.take(*words):
            definition = parser(reader)
            reader.end()
            return definition
    return None


# --- tables -----------------------------------------------------------------------------------------------------------


def _create_table(store: str) -> Callable[[TokenReader], Definition]:
    def parser(reader: TokenReader) -> Definition:
        name = reader.name()
        if reader.take("LIKE"):
            return _like_definition(name, reader.name(), store)
        if reader.take("AS"):
            return _as_definition(name, _query_text(reader), store)
        draft = _table_body(reader)
        comment = reader.string() if reader.take("COMMENT") else None
        return lambda bench: create_table(bench, name, draft, store, comment)

    return parser


def _table_body(reader: TokenReader) -> _TableDraft:
    draft = _TableDraft()
    reader.expect("(")
    while True:
        if not _table_constraint(reader, draft):
            draft.columns.append(_column(reader, draft))
        if not reader.take(","):
            break
    reader.expect(")")
    return draft


def _table_constraint(reader: TokenReader, draft: _TableDraft) -> bool:
    name = reader.identifier() if reader.take("CONSTRAINT") else ""
    if reader.take("PRIMARY", "KEY"):
        draft.constrain(reader.identifiers(), primary=True, name=name)
    elif reader.peek("UNIQUE", "(") and reader.take("UNIQUE"):
        draft.constrain(reader.identifiers(), primary=False, name=name)
    elif reader.peek("FOREIGN", "KEY") or reader.peek("CHECK", "("):
        raise not_supported("FOREIGN KEY and CHECK constraints")
    elif name:
        raise reader.error("PRIMARY KEY or UNIQUE")
    else:
        return False
    return True


def _column(reader: TokenReader, draft: _TableDraft) -> TableColumn:
    column = TableColumn(reader.identifier(), reader.type())
    encode(column.name)
    while (changed := _column_option(reader, column, draft)) is not None:
        column = changed
    return column


def _column_option(reader: TokenReader, column: TableColumn, draft: _TableDraft) -> TableColumn | None:
    if reader.take("NOT", "NULL"):
        return replace(column, nullable=False)
    if reader.take("NULL"):
        return column
    if reader.take("DEFAULT"):
        return replace(column, default=reader.expression_text(_COLUMN_OPTIONS))
    if reader.take("PRIMARY", "KEY"):
        draft.constrain([column.name], primary=True)
        return replace(column, nullable=False)
    if reader.take("UNIQUE"):
        draft.constrain([column.name], primary=False)
        return column
    if reader.take("COMMENT"):
        return replace(column, comment=reader.string())
    if reader.take("GENERATED"):
        return _identity(reader, column)
    return None


def _identity(reader: TokenReader, column: TableColumn) -> TableColumn:
    kind = "ALWAYS" if reader.take("ALWAYS") else "BY DEFAULT"
    if kind == "BY DEFAULT":
        reader.expect("BY", "DEFAULT")
    reader.expect("AS", "IDENTITY")
    if reader.take("("):
        reader.take("START", "WITH")
        if reader.number() != 1 or (reader.take("INCREMENT", "BY") and reader.number() != 1):
            raise not_supported("an identity that does not start with 1 in steps of 1")
        reader.expect(")")
    if column.type.code not in INTEGERS:
        raise HanaError(264, f"invalid datatype: an identity column must be of an integer type, {column.name} is not")
    return replace(column, identity=kind)


def create_table(bench: Workbench, name: Name, draft: _TableDraft, store: str, comment: str | None) -> None:
    schema, table = bench.place(name)
    _refuse_taken(bench, schema, table)
    relation = draft.finished(schema, table)
    for column in relation.columns:
        if column.default is not None:
            _default_sql(bench, column)
    bench.connection.execute(_sqlite_table(relation))
    catalogue.add_relation(bench.connection, relation, store, comment)


def _refuse_taken(bench: Workbench, schema: str, name: str) -> None:
    encode(name)
    if bench.catalog.find(schema, name) is not None:
        raise duplicate_table(hana_identifier(name))


def _default_sql(bench: Workbench, column: TableColumn) -> str:
    bound = expressions.bind(bench.binding(), Scope(), dialect.parse_condition(column.default or "NULL"), column.type)
    if bound.parameter is not None:
        raise syntax_error("a default cannot be a parameter")
    return stored(bound, column)


def _sqlite_table(relation: Relation) -> str:
    """Columns have no SQLite type, so that values stay as they are; an identity is SQLite's own rowid."""
    identity = next((column.name for column in relation.columns if column.identity), None)
    if len([column for column in relation.columns if column.identity]) > 1:
        raise syntax_error("a table has at most one identity column")
    pieces = [_sqlite_column(column) for column in relation.columns]
    for constraint in relation.constraints:
        columns = ", ".join(quoted(name) for name in constraint.columns)
        if constraint.columns != (identity,):
            pieces.append(f"{'PRIMARY KEY' if constraint.primary_key and identity is None else 'UNIQUE'} ({columns})")
    return f"CREATE TABLE {relation.sqlite_name} ({', '.join(pieces)})"


def _sqlite_column(column: TableColumn) -> str:
    if column.identity:
        return f"{quoted(column.name)} INTEGER PRIMARY KEY AUTOINCREMENT"
    collation = " COLLATE hana_decimal" if column.type.code is TypeCode.DECIMAL else ""
    return f"{quoted(column.name)}{'' if column.nullable else ' NOT NULL'}{collation}"


def _like_definition(name: Name, model: Name, store: str) -> Definition:
    def run(bench: Workbench) -> None:
        source = bench.table(model)
        draft = _TableDraft(list(source.columns), list(source.constraints))
        create_table(bench, name, draft, store, None)

    return run


def _query_text(reader: TokenReader) -> str:
    reader.expect("(")
    start, depth = reader.index, 1
    while depth and not reader.at_end:
        depth += reader.peek("(") - reader.peek(")")
        reader.index += 1
    if depth:
        raise reader.error(")")
    first, last = reader.tokens[start], reader.tokens[reader.index - 2]
    if reader.take("WITH", "NO", "DATA"):
        raise not_supported("CREATE TABLE ... WITH NO DATA")
    reader.take("WITH", "DATA")
    return reader.sql[first.start : last.end + 1]


def _as_definition(name: Name, text: str, store: str) -> Definition:
    def run(bench: Workbench) -> None:
        query = queries.bind_query(bench.binding(), dialect.parse(text), None)
        columns = [TableColumn(column.name, column.type, column.nullable) for column in query.columns]
        create_table(bench, name, _TableDraft(columns), store, None)
        bench.connection.execute(f"INSERT INTO {quoted_table(*bench.place(name))} {query.sql}")

    return run


def _drop_table(reader: TokenReader) -> Definition:
    name = reader.name()
    _ = reader.take("CASCADE") or reader.take("RESTRICT")
    return lambda bench: drop_table(bench, bench.table(name))


def drop_table(bench: Workbench, relation: Relation) -> None:
    bench.connection.execute(f"DROP TABLE {relation.sqlite_name}")
    bench.connection.execute("DELETE FROM owl_relations WHERE id = ?", (relation.id,))


def _truncate(reader: TokenReader) -> Definition:
    name = reader.name()

    def run(bench: Workbench) -> None:
        bench.connection.execute(f"DELETE FROM {bench.table(name).sqlite_name}")

    return run


def _rename_table(reader: TokenReader) -> Definition:
    old = reader.name()
    reader.expect("TO")
    new = reader.name()

    def run(bench: Workbench) -> None:
        relation = bench.table(old)
        _refuse_taken(bench, relation.schema, new.name)
        target = quoted_table(relation.schema, new.name)
        bench.connection.execute(f"ALTER TABLE {relation.sqlite_name} RENAME TO {target}")
        bench.connection.execute("UPDATE owl_relations SET name = ? WHERE id = ?", (new.name, relation.id))

    return run


def _rename_column(reader: TokenReader) -> Definition:
    parts = [reader.identifier()]
    while reader.take("."):
        parts.append(reader.identifier())
    if len(parts) not in (2, 3):
        raise reader.error("table.column")
    reader.expect("TO")
    new = reader.identifier()

    def run(bench: Workbench) -> None:
        relation = bench.table(Name(parts[0] if len(parts) == 3 else "", parts[-2]))
        old = relation.column(parts[-1]).name
        bench.connection.execute(f"ALTER TABLE {relation.sqlite_name} RENAME COLUMN {quoted(old)} TO {quoted(new)}")
        values = (new, relation.id, old)
        bench.connection.execute("UPDATE owl_columns SET name = ? WHERE relation = ? AND name = ?", values)
        for table in ("owl_constraints", "owl_indexes"):
            bench.connection.execute(f"UPDATE {table} SET column_name = ? WHERE relation = ? AND column_name = ?", values)

    return run


# --- ALTER TABLE ------------------------------------------------------------------------------------------------------


def _alter_table(reader: TokenReader) -> Definition:
    name = reader.name()
    if reader.take("ADD"):
        draft = _table_body(reader)
        return lambda bench: _add_columns(bench, bench.table(name), draft)
    if reader.take("DROP"):
        columns = reader.identifiers()
        return lambda bench: _drop_columns(bench, bench.table(name), columns)
    if reader.take("ALTER"):
        draft = _table_body(reader)
        return lambda bench: _alter_columns(bench, bench.table(name), draft)
    raise not_supported("ALTER TABLE other than ADD, DROP and ALTER of columns")


def _add_columns(bench: Workbench, relation: Relation, draft: _TableDraft) -> None:
    if draft.constraints:
        raise not_supported("ALTER TABLE ADD of constraints")
    for position, column in enumerate(draft.columns, len(relation.columns) + 1):
        if any(known.name == column.name for known in relation.columns):
            raise HanaError(263, f"invalid alias: column {column.name} exists already")
        if column.identity:
            raise not_supported("ALTER TABLE ADD of an identity column")
        text = f"ALTER TABLE {relation.sqlite_name} ADD COLUMN {_sqlite_column(column)}"
        bench.connection.execute(f"{text}{_constant_default(bench, column)}")
        catalogue.add_column(bench.connection, relation.id, position, column)


def _constant_default(bench: Workbench, column: TableColumn) -> str:
    """Existing rows get the default's value of now."""
    if column.default is None:
        if not column.nullable:
            raise HanaError(287, f"cannot insert NULL or update to NULL: {column.name} (ADD ... NOT NULL needs a DEFAULT)")
        return ""
    (text,) = bench.connection.execute(f"SELECT quote({_default_sql(bench, column)})").fetchone()
    return f" DEFAULT {text}"


def _drop_columns(bench: Workbench, relation: Relation, columns: Sequence[str]) -> None:
    for name in columns:
        relation.column(name)
        used = [c.columns for c in relation.constraints] + [i.columns for i in bench.catalog.indexes_of(relation)]
        if any(name in names for names in used):
            raise HanaError(7, f"feature not supported: dropping {name}, which a key or an index uses")
        bench.connection.execute(f"ALTER TABLE {relation.sqlite_name} DROP COLUMN {quoted(name)}")
        bench.connection.execute("DELETE FROM owl_columns WHERE relation = ? AND name = ?", (relation.id, name))
    _renumber(bench, relation)


def _renumber(bench: Workbench, relation: Relation) -> None:
    rows = bench.connection.execute(
        "SELECT position FROM owl_columns WHERE relation = ? ORDER BY position", (relation.id,)
    ).fetchall()
    for new, (old,) in enumerate(rows, 1):
        values = (new, relation.id, old)
        bench.connection.execute("UPDATE owl_columns SET position = ? WHERE relation = ? AND position = ?", values)


def _alter_columns(bench: Workbench, relation: Relation, draft: _TableDraft) -> None:
    for column in draft.columns:
        old = relation.column(column.name)
        if column.nullable is not old.nullable or column.identity != old.identity:
            raise not_supported("changing NOT NULL or IDENTITY of a column")
        if is_text(old.type) is not is_text(column.type) and relation.key:
            raise not_supported("changing the kind of a column of a table with a key")
        value = stored(Bound(quoted(column.name), old.type), column)
        bench.connection.execute(f"UPDATE {relation.sqlite_name} SET {quoted(column.name)} = {value}")
        bench.connection.execute(
            "UPDATE owl_columns SET type = ?, length = ?, scale = ?, defaults = ? WHERE relation = ? AND name = ?",
            (
                int(column.type.code),
                column.type.length,
                column.type.scale,
                column.default or old.default,
                relation.id,
                column.name,
            ),
        )


# --- indexes ----------------------------------------------------------------------------------------------------------


def _create_index(unique: bool) -> Callable[[TokenReader], Definition]:
    def parser(reader: TokenReader) -> Definition:
        name = reader.name()
        reader.expect("ON")
        table = reader.name()
        columns = _index_columns(reader)
        return lambda bench: _add_index(bench, name, table, columns, unique)

    return parser


def _index_columns(reader: TokenReader) -> list[tuple[str, bool]]:
    reader.expect("(")
    columns = []
    while True:
        name = reader.identifier()
        descending = reader.take("DESC")
        columns.append((name, descending or (reader.take("ASC") and False)))
        if not reader.take(","):
            break
    reader.expect(")")
    return columns


def _add_index(bench: Workbench, name: Name, table: Name, columns: list[tuple[str, bool]], unique: bool) -> None:
    relation = bench.table(table)
    schema = bench.catalog.require_schema(name.schema or relation.schema)
    refuse_taken_index(bench, schema, name.name)
    for column, _ in columns:
        if relation.column(column).type.code in LOBS | VECTORS:
            raise HanaError(264, f"invalid datatype: {column} cannot be indexed")
    keys = ", ".join(f"{quoted(column)}{' DESC' if descending else ''}" for column, descending in columns)
    word = "UNIQUE INDEX" if unique else "INDEX"
    bench.connection.execute(f"CREATE {word} {quoted_table(schema, name.name)} ON {relation.sqlite_name} ({keys})")
    kind = "INVERTED VALUE" + (" UNIQUE" if unique else "")
    index = Index(schema, name.name, relation.id, kind, tuple(column for column, _ in columns), unique)
    catalogue.add_index(bench.connection, index, None)


def refuse_taken_index(bench: Workbench, schema: str, name: str) -> None:
    encode(name)
    if (schema, name) in bench.catalog.indexes:
        raise HanaError(289, f"cannot use duplicate index name: {hana_identifier(name)}")


def _create_hnsw(reader: TokenReader) -> Definition:
    index = parse_hnsw(reader)

    def run(bench: Workbench) -> None:
        relation = bench.table(index.table)
        schema = bench.catalog.require_schema(index.name.schema or relation.schema)
        refuse_taken_index(bench, schema, index.name.name)
        kind = relation.column(index.column).type
        if kind.code not in VECTORS:
            raise HanaError(264, f"invalid datatype: {index.column} is {kind.name}, an HNSW index needs a vector column")
        known = bench.catalog.indexes_of(relation)
        if any(other.kind.startswith("HNSW") and other.columns == (index.column,) for other in known):
            raise HanaError(289, f"cannot use duplicate index: {index.column} has a vector index already")
        found = Index(schema, index.name.name, relation.id, "HNSW VECTOR", (index.column,))
        catalogue.add_index(bench.connection, found, index.options)

    return run


def _drop_index(reader: TokenReader) -> Definition:
    name = reader.name()
    reader.take("ONLINE")

    def run(bench: Workbench) -> None:
        schema, index_name = bench.place(name)
        index = bench.catalog.indexes.get((schema, index_name))
        if index is None:
            raise HanaError(261, f"invalid index name: {hana_identifier(index_name)}")
        if not index.kind.startswith("HNSW"):
            bench.connection.execute(f"DROP INDEX {quoted_table(schema, index_name)}")
        bench.connection.execute("DELETE FROM owl_indexes WHERE schema = ? AND name = ?", (schema, index_name))

    return run


# --- views ------------------------------------------------------------------------------------------------------------


def _create_view(replacing: bool) -> Callable[[TokenReader], Definition]:
    def parser(reader: TokenReader) -> Definition:
        name = reader.name()
        columns = _view_columns(reader) if reader.peek("(") else []
        comment = reader.string() if reader.take("COMMENT") else None
        reader.expect("AS")
        text = reader.rest()
        return lambda bench: _add_view(bench, name, replacing, _ViewDraft(text, columns, comment))

    return parser


@dataclass(frozen=True, slots=True)
class _ViewDraft:
    text: str
    columns: list[tuple[str, str | None]]
    comment: str | None


def _view_columns(reader: TokenReader) -> list[tuple[str, str | None]]:
    reader.expect("(")
    columns = []
    while True:
        name = reader.identifier()
        columns.append((name, reader.string() if reader.take("COMMENT") else None))
        if not reader.take(","):
            break
    reader.expect(")")
    return columns


def _add_view(bench: Workbench, name: Name, replacing: bool, draft: _ViewDraft) -> None:
    schema, view = bench.place(name)
    known = bench.catalog.find(schema, view)
    if known is not None and not (replacing and known.is_view):
        raise duplicate_table(hana_identifier(view))
    query = queries.bind_query(bench.binding(), dialect.parse(draft.text), None)
    named = draft.columns or [(column.name, None) for column in query.columns]
    if len(named) != len(query.columns):
        raise HanaError(269, "the column list of a view must name every column of its query")
    if len({column for column, _ in named}) != len(named):
        raise HanaError(268, "column ambiguously defined: two columns of the view have one name")
    columns = tuple(
        TableColumn(column, result.type, result.nullable, comment=comment)
        for (column, comment), result in zip(named, query.columns, strict=True)
    )
    if known is not None:
        bench.connection.execute("DELETE FROM owl_relations WHERE id = ?", (known.id,))
    relation = Relation(0, schema, view, columns, draft.text, bench.schema)
    catalogue.add_relation(bench.connection, relation, "ROW", draft.comment)


def _drop_view(reader: TokenReader) -> Definition:
    name = reader.name()
    _ = reader.take("CASCADE") or reader.take("RESTRICT")

    def run(bench: Workbench) -> None:
        schema, view = bench.place(name)
        relation = bench.catalog.relation(schema, view)
        if not relation.is_view:
            raise HanaError(321, f"invalid view name: {hana_identifier(view)} is a table")
        bench.connection.execute("DELETE FROM owl_relations WHERE id = ?", (relation.id,))

    return run


# --- comments, schemas, users -----------------------------------------------------------------------------------------


def _comment_on(reader: TokenReader) -> Definition:
    kind = reader.identifier()
    parts = [reader.identifier()]
    while reader.take("."):
        parts.append(reader.identifier())
    reader.expect("IS")
    text = None if reader.take("NULL") else reader.string()
    if kind == "COLUMN" and len(parts) > 1:
        return lambda bench: _comment_column(bench, parts, text)
    if kind not in ("TABLE", "VIEW") or len(parts) > 2:
        raise not_supported(f"COMMENT ON {kind}")
    return lambda bench: _comment_relation(bench, parts, text)


def _named_relation(bench: Workbench, parts: Sequence[str]) -> Relation:
    return bench.catalog.relation(*bench.place(Name(parts[0] if len(parts) == 2 else "", parts[-1])))


def _comment_relation(bench: Workbench, parts: Sequence[str], text: str | None) -> None:
    relation = _named_relation(bench, parts)
    bench.connection.execute("UPDATE owl_relations SET comment = ? WHERE id = ?", (text, relation.id))


def _comment_column(bench: Workbench, parts: Sequence[str], text: str | None) -> None:
    relation = _named_relation(bench, parts[:-1])
    values = (text, relation.id, relation.column(parts[-1]).name)
    bench.connection.execute("UPDATE owl_columns SET comment = ? WHERE relation = ? AND name = ?", values)


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


def _drop_schema(reader: TokenReader) -> Definition:
    name = reader.identifier()
    cascade = reader.take("CASCADE")
    reader.take("RESTRICT")

    def run(bench: Workbench) -> None:
        schema, _ = bench.place(Name(name, ""))
        inside = [relation for relation in bench.catalog.relations.values() if relation.schema == schema]
        if inside and not cascade:
            raise HanaError(419, f"cannot drop: schema {hana_identifier(schema)} is not empty (use CASCADE)")
        for relation in inside:
            if relation.is_view:
                bench.connection.execute("DELETE FROM owl_relations WHERE id = ?", (relation.id,))
            else:
                drop_table(bench, relation)
        bench.connection.execute("DELETE FROM owl_schemas WHERE name = ?", (schema,))

    return run


def _create_user(reader: TokenReader) -> Definition:
    name = reader.identifier()
    reader.expect("PASSWORD")
    password = reader.password()
    reader.take("NO", "FORCE_FIRST_PASSWORD_CHANGE")

    def run(bench: Workbench) -> None:
        if name in bench.catalog.users:
            raise HanaError(331, f"user name already exists: {hana_identifier(name)}")
        add_user(bench.connection, name, password)
        if name not in bench.catalog.schemas:
            add_schema(bench.connection, name, name)

    return run


def add_user(connection: sqlite3.Connection, name: str, password: str) -> None:
    connection.execute(
        "INSERT INTO owl_users(name, password, created) VALUES (?,?, strftime('%Y-%m-%d %H:%M:%f0000', 'now'))",
        (name, password),
    )


def _drop_user(reader: TokenReader) -> Definition:
    name = reader.identifier()
    _ = reader.take("CASCADE") or reader.take("RESTRICT")

    def run(bench: Workbench) -> None:
        if name not in bench.catalog.users or name == bench.user:
            raise HanaError(332, f"invalid user name: {hana_identifier(name)}")
        bench.connection.execute("DELETE FROM owl_users WHERE name = ?", (name,))

    return run


_PARSERS: dict[tuple[str, ...], Callable[[TokenReader], Definition]] = {
    ("CREATE", "TABLE"): _create_table("COLUMN"),
    ("CREATE", "COLUMN", "TABLE"): _create_table("COLUMN"),
    ("CREATE", "ROW", "TABLE"): _create_table("ROW"),
    ("DROP", "TABLE"): _drop_table,
    ("TRUNCATE", "TABLE"): _truncate,
    ("RENAME", "TABLE"): _rename_table,
    ("RENAME", "COLUMN"): _rename_column,
    ("ALTER", "TABLE"): _alter_table,
    ("CREATE", "INDEX"): _create_index(False),
    ("CREATE", "UNIQUE", "INDEX"): _create_index(True),
    ("CREATE", "HNSW", "VECTOR", "INDEX"): _create_hnsw,
    ("DROP", "INDEX"): _drop_index,
    ("CREATE", "VIEW"): _create_view(False),
    ("CREATE", "OR", "REPLACE", "VIEW"): _create_view(True),
    ("DROP", "VIEW"): _drop_view,
    ("COMMENT", "ON"): _comment_on,
    ("CREATE", "SCHEMA"): _create_schema,
    ("DROP", "SCHEMA"): _drop_schema,
    ("CREATE", "USER"): _create_user,
    ("DROP", "USER"): _drop_user,
}
