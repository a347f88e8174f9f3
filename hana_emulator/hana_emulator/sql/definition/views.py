"""Parse CREATE and DROP VIEW, and find the views of a table; the definitions run on a `Workbench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlglot import exp

from hana_emulator.errors import HanaError, duplicate_table
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog.catalog import Relation, TableColumn
from hana_emulator.sql.definition.workbench import Definition, Workbench
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.names import encode, hana_identifier
from hana_emulator.sql.language.reader import Name, Parsers, TokenReader
from hana_emulator.sql.query import queries
from hana_emulator.sql.query.expressions import identifier


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
    encode(view)
    known = bench.catalog.find(schema, view)
    if known is not None and not (replacing and known.is_view):
        raise duplicate_table(hana_identifier(view))
    tree = dialect.parse(draft.text)
    for table in tree.find_all(exp.Table):
        if table.name.startswith("#"):
            raise HanaError(7, f"feature not supported: Cannot use local temporary table: {table.name} in a view")
    query = queries.bind_query(bench.binding(), tree, None)
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
        drop(bench, known)
    relation = Relation(0, schema, view, columns, draft.text, bench.schema, store="ROW")
    catalogue.add_relation(bench.connection, relation, draft.comment)


PARSERS: Parsers[Definition] = Parsers()


@PARSERS("DROP", "VIEW")
def _drop_view(reader: TokenReader) -> Definition:
    if_there = reader.take("IF", "EXISTS")
    name = reader.name()
    option = "CASCADE" if reader.take("CASCADE") else "RESTRICT" if reader.take("RESTRICT") else ""

    def run(bench: Workbench) -> None:
        schema, view = bench.place(name)
        if if_there and bench.catalog.find(schema, view) is None:
            return
        relation = bench.catalog.relation(schema, view)
        if not relation.is_view:
            raise HanaError(321, f"invalid view name: {hana_identifier(view)} is a table")
        others = dependent(bench, relation)
        if others and option == "RESTRICT":
            raise HanaError(419, f"can't drop with RESTRICT specification: {others[0].name} depends on it")
        for other in others if option == "CASCADE" else []:
            drop(bench, other)
        drop(bench, relation)

    return run


def drop(bench: Workbench, view: Relation) -> None:
    bench.connection.execute("DELETE FROM owl_relations WHERE id = ?", (view.id,))


def dependent(bench: Workbench, relation: Relation) -> list[Relation]:
    """The views that read `relation`, directly or through other views."""
    found: dict[int, Relation] = {}
    pending = [relation]
    while pending:
        searched = pending.pop()
        for view in bench.catalog.relations.values():
            if view.is_view and view.id not in found and _reads(bench, view, searched):
                found[view.id] = view
                pending.append(view)
    return list(found.values())


def _reads(bench: Workbench, view: Relation, searched: Relation) -> bool:
    for table in dialect.parse(view.definition or "").find_all(exp.Table):
        name, schema = identifier(table.this), identifier(table.args.get("db"))
        meant = bench.catalog.meant(schema, view.definition_schema, name)
        if meant is not None and meant.id == searched.id:
            return True
    return False


def note_validity(bench: Workbench) -> None:
    """Record which views are invalid after a change of structure. HANA also checks at this point."""
    bench.connection.execute("DELETE FROM owl_invalid_views")
    if bench.connection.execute("SELECT 1 FROM owl_relations WHERE kind = 'VIEW' LIMIT 1").fetchone() is None:
        return
    bench.refresh()
    broken = [view.id for view in bench.catalog.relations.values() if view.is_view and not _readable(bench, view)]
    bench.connection.executemany("INSERT INTO owl_invalid_views VALUES (?)", [(number,) for number in broken])


def _readable(bench: Workbench, view: Relation) -> bool:
    try:
        queries.bind_view(bench.binding(), view)
    except HanaError:
        return False
    return True


PARSERS |= {
    ("CREATE", "VIEW"): _create_view(False),
    ("CREATE", "OR", "REPLACE", "VIEW"): _create_view(True),
}
