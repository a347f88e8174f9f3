"""CREATE and DROP FUNCTION for table functions of one query, which MAP_MERGE calls (`blocks.py`)."""

from __future__ import annotations

from hana_emulator.errors import HanaError, not_supported
from hana_emulator.sql.catalog import schema_objects
from hana_emulator.sql.catalog.rights import Touch
from hana_emulator.sql.catalog.schema_objects import TableFunction
from hana_emulator.sql.definition.workbench import Definition, Workbench
from hana_emulator.sql.language.names import encode, hana_identifier
from hana_emulator.sql.language.reader import Parsers, TokenReader

PARSERS: Parsers[Definition] = Parsers()
_OPTIONS = (
    ("LANGUAGE", "SQLSCRIPT"),
    ("SQL", "SECURITY", "DEFINER"),
    ("SQL", "SECURITY", "INVOKER"),
    ("READS", "SQL", "DATA"),
    ("DETERMINISTIC",),
)


def _typed_name(reader: TokenReader) -> str:
    reader.take("IN")
    name = reader.identifier()
    reader.type()
    return name


def _typed_names(reader: TokenReader) -> list[str]:
    reader.expect("(")
    names = [] if reader.peek(")") else reader.several(lambda: _typed_name(reader))
    reader.expect(")")
    return names


@PARSERS("CREATE", "FUNCTION")
def _create(reader: TokenReader) -> Definition:
    """CREATE FUNCTION name (parameters) RETURNS TABLE (columns) ... AS BEGIN RETURN query; END"""
    name, parameters = reader.name(), _typed_names(reader)
    if not reader.take("RETURNS", "TABLE"):
        raise not_supported("a function that returns no table")
    _typed_names(reader)
    while any(reader.take(*words) for words in _OPTIONS):
        pass
    reader.expect("AS", "BEGIN")
    if not reader.take("RETURN"):
        raise not_supported("a function that does more than RETURN a query")
    first = reader.current
    while not reader.peek("END"):
        if reader.at_end:
            raise reader.error("END")
        reader.index += 1
    last = reader.tokens[reader.index - 1]
    reader.expect("END")
    query = reader.sql[first.start : last.end + 1] if first is not None else ""

    def run(bench: Workbench) -> None:
        place = bench.place(name)
        encode(place[1])
        bench.touches.add(Touch("CREATE ANY", place[0]))
        if place in bench.catalog.objects.functions:
            raise HanaError(330, f"cannot use duplicate function name: {hana_identifier(place[1])}")
        schema_objects.add_function(bench.connection, place, TableFunction(tuple(parameters), query))

    return run


@PARSERS("DROP", "FUNCTION")
def _drop(reader: TokenReader) -> Definition:
    name = reader.name()
    _ = reader.take("CASCADE") or reader.take("RESTRICT")

    def run(bench: Workbench) -> None:
        schema, label = bench.place(name)
        bench.touches.add(Touch("DROP", schema))
        text = "DELETE FROM owl_functions WHERE schema = ? AND name = ?"
        if not bench.connection.execute(text, (schema, label)).rowcount:
            raise HanaError(328, f"invalid name of function or procedure: {hana_identifier(label)}")

    return run
