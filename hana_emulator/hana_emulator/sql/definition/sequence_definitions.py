"""CREATE, ALTER and DROP SEQUENCE."""

from __future__ import annotations

from hana_emulator.errors import HanaError, syntax_error
from hana_emulator.sql.catalog import schema_objects
from hana_emulator.sql.catalog.schema_objects import Sequence
from hana_emulator.sql.definition.sequence_options import Change, altered, created, options
from hana_emulator.sql.definition.workbench import Definition, Workbench
from hana_emulator.sql.language.names import encode, hana_identifier
from hana_emulator.sql.language.reader import Name, Parsers, TokenReader

PARSERS: Parsers[Definition] = Parsers()


@PARSERS("CREATE", "SEQUENCE")
def _create(reader: TokenReader) -> Definition:
    name = reader.name()
    chosen = options(reader)
    if "restart" in chosen:
        raise syntax_error("RESTART WITH belongs to ALTER SEQUENCE")

    def run(bench: Workbench) -> None:
        schema, label = bench.place(name)
        encode(label)
        if (schema, label) in bench.catalog.objects.sequences:
            raise HanaError(324, f"cannot use duplicate sequence name: {hana_identifier(label)}")
        sequence = created(Sequence(0, schema, label), chosen)
        schema_objects.put_sequence(bench.connection, sequence)

    return run


@PARSERS("ALTER", "SEQUENCE")
def _alter(reader: TokenReader) -> Definition:
    name = reader.name()
    chosen = options(reader)
    if "start" in chosen:
        raise syntax_error("START WITH belongs to CREATE SEQUENCE; ALTER SEQUENCE takes RESTART WITH")

    def run(bench: Workbench) -> None:
        sequence = _find(bench, name)
        changes: Change = dict(chosen)
        if "restart" in changes:
            changes |= {"start": changes.pop("restart"), "version": sequence.version + 1}
        schema_objects.put_sequence(bench.connection, altered(sequence, changes))

    return run


def _find(bench: Workbench, name: Name) -> Sequence:
    place = bench.place(name)
    found = bench.catalog.objects.sequences.get(place)
    if found is None:
        raise HanaError(313, f"invalid sequence: {hana_identifier(place[1])}")
    return found


@PARSERS("DROP", "SEQUENCE")
def _drop(reader: TokenReader) -> Definition:
    name = reader.name()
    _ = reader.take("CASCADE") or reader.take("RESTRICT")

    def run(bench: Workbench) -> None:
        bench.connection.execute("DELETE FROM owl_sequences WHERE id = ?", (_find(bench, name).id,))

    return run
