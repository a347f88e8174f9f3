"""Parse CREATE and DROP VIEW, and find the views of a table; the definitions run on a `Workbench`."""

from __future__ import annotations

from functools import partial

from sqlglot import exp

from hana_emulator.errors import HanaError, duplicate_table
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog.catalog import Relation, TableColumn
from hana_emulator.sql.definition.workbench import Definition, Workbench
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.names import encode, hana_identifier
from hana_emulator.sql.language.reader import Parsers, TokenReader
from hana_emulator.sql.query import queries
from hana_emulator.sql.query.expressions import identifier


def _create_view(replacing: bool, reader: TokenReader) -> Definition:
    name = reader.name()
    listed = []
    if reader.take("("):
        listed = reader.several(lambda: (reader.identifier(), reader.string() if reader.take("COMMENT") else None))
        reader.expect(")")
    comment = reader.string() if reader.take("COMMENT") else None
    reader.expect("AS")
    text = reader.rest()

    def run(bench: Workbench) -> None:
        schema, view = bench.place(name)
        encode(view)
        known = bench.catalog.find(schema, view)
        if known is not None and not (replacing and known.is_view):
            raise duplicate_table(hana_identifier(view))
        tree = dialect.parse(text)
        for table in tree.find_all(exp.Table):
            if table.name.startswith("#"):
                raise HanaError(7, f"feature not supported: Cannot use local temporary table: {table.name} in a view")
        query = queries.bind_query(bench.binding(), tree, None)
        named = listed or [(column.name, None) for column in query.columns]
        if len(named) != len(query.columns):
            raise HanaError(269, "the column list of a view must name every column of its query")
        if len({column for column, _ in named}) != len(named):
            raise HanaError(268, "column ambiguously defined: two columns of the view have one name")
        columns = tuple(
            TableColumn(column, result.type, result.nullable, comment=noted)
            for (column, noted), result in zip(named, query.columns, strict=True)
        )
        if known is not None:
            drop(bench, known)
        relation = Relation(0, schema, view, columns, text, bench.schema, store="ROW")
        catalogue.add_relation(bench.connection, relation, comment)

    return run


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
    read: dict[int, set[int]] = {}
    views = [view for view in bench.catalog.relations.values() if view.is_view]
    for view in views:
        for table in dialect.parse(view.definition or "").find_all(exp.Table):
            schema = identifier(table.args.get("db"))
            meant = bench.catalog.meant(schema, view.definition_schema, identifier(table.this))
            if meant is not None:
                read.setdefault(view.id, set()).add(meant.id)
    reached, before = {relation.id}, 0
    while len(reached) > before:
        before = len(reached)
        reached |= {number for number, sources in read.items() if sources & reached}
    return [view for view in views if view.id in reached and view.id != relation.id]


def note_validity(bench: Workbench) -> None:
    """Record which views are invalid after a change of structure. HANA also checks at this point."""
    bench.connection.execute("DELETE FROM owl_invalid_views")
    if bench.connection.execute("SELECT 1 FROM owl_relations WHERE kind = 'VIEW' LIMIT 1").fetchone() is None:
        return
    bench.refresh()
    for view in bench.catalog.relations.values():
        try:
            if view.is_view:
                queries.bind_view(bench.binding(), view)
        except HanaError:
            bench.connection.execute("INSERT INTO owl_invalid_views VALUES (?)", (view.id,))


PARSERS |= {
    ("CREATE", "VIEW"): partial(_create_view, False),
    ("CREATE", "OR", "REPLACE", "VIEW"): partial(_create_view, True),
}
