"""CREATE, ALTER, DROP, RENAME and TRUNCATE TABLE. Parsed here, run on a `Workbench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.sql import catalog as catalogue
from hana_emulator.sql import dialect, expressions, queries
from hana_emulator.sql.catalog import Constraint, Relation, TableColumn
from hana_emulator.sql.datatypes import is_text
from hana_emulator.sql.names import encode, quoted, quoted_table
from hana_emulator.sql.reader import Name, TokenReader
from hana_emulator.sql.scope import Bound, Scope
from hana_emulator.sql.workbench import Definition, Workbench, drop_table, refuse_taken
from hana_emulator.sql.writes import stored
from hana_emulator.types import INTEGERS, LOBS, VECTORS, TypeCode

_COLUMN_OPTIONS = frozenset({"NOT", "NULL", "DEFAULT", "PRIMARY", "UNIQUE", "GENERATED", "COMMENT"})


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
    refuse_taken(bench, schema, table)
    relation = draft.finished(schema, table)
    for column in relation.columns:
        if column.default is not None:
            _default_sql(bench, column)
    bench.connection.execute(_sqlite_table(relation))
    catalogue.add_relation(bench.connection, relation, store, comment)


def _default_sql(bench: Workbench, column: TableColumn) -> str:
    scope = Scope()
    bound = expressions.bind(bench.binding(), scope, dialect.parse_condition(column.default or "NULL"), column.type)
    if scope.aggregates:
        raise HanaError(275, "aggregate function not allowed in a default")
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
        refuse_taken(bench, relation.schema, new.name)
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
        if any(column.name == new for column in relation.columns):
            raise HanaError(263, f"invalid alias: column {new} exists already")
        bench.connection.execute(f"ALTER TABLE {relation.sqlite_name} RENAME COLUMN {quoted(old)} TO {quoted(new)}")
        values = (new, relation.id, old)
        bench.connection.execute("UPDATE owl_columns SET name = ? WHERE relation = ? AND name = ?", values)
        for table in ("owl_constraints", "owl_indexes"):
            bench.connection.execute(
                f"UPDATE {table} SET column_name = ? WHERE relation = ? AND column_name = ?", values
            )

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
    known = {column.name for column in relation.columns}
    for position, column in enumerate(draft.columns, len(relation.columns) + 1):
        if column.name in known:
            raise HanaError(263, f"invalid alias: column {column.name} exists already")
        known.add(column.name)
        if column.identity:
            raise not_supported("ALTER TABLE ADD of an identity column")
        text = f"ALTER TABLE {relation.sqlite_name} ADD COLUMN {_sqlite_column(column)}"
        bench.connection.execute(f"{text}{_constant_default(bench, column)}")
        catalogue.add_column(bench.connection, relation.id, position, column)


def _constant_default(bench: Workbench, column: TableColumn) -> str:
    """Existing rows get the default's value of now."""
    if column.default is None:
        if not column.nullable:
            raise HanaError(
                287, f"cannot insert NULL or update to NULL: {column.name} (ADD ... NOT NULL needs a DEFAULT)"
            )
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


PARSERS: dict[tuple[str, ...], Callable[[TokenReader], Definition]] = {
    ("CREATE", "TABLE"): _create_table("COLUMN"),
    ("CREATE", "COLUMN", "TABLE"): _create_table("COLUMN"),
    ("CREATE", "ROW", "TABLE"): _create_table("ROW"),
    ("DROP", "TABLE"): _drop_table,
    ("TRUNCATE", "TABLE"): _truncate,
    ("RENAME", "TABLE"): _rename_table,
    ("RENAME", "COLUMN"): _rename_column,
    ("ALTER", "TABLE"): _alter_table,
}
