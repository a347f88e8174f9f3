"""Data definition statements: which parser reads which. Nothing is checked against the catalogue before one runs."""

from __future__ import annotations

from hana_emulator.sql import (
    accounts,
    alterations,
    objects,
    sequence_definitions,
    synonyms,
    tables,
    triggers,
    views,
)
from hana_emulator.sql.reader import TokenReader
from hana_emulator.sql.workbench import Definition, Workbench

_PARSERS = {
    **tables.PARSERS,
    **alterations.PARSERS,
    **views.PARSERS,
    **sequence_definitions.PARSERS,
    **synonyms.PARSERS,
    **objects.PARSERS,
    **accounts.PARSERS,
    **triggers.PARSERS,
}


def parse(reader: TokenReader) -> Definition | None:
    """The definition that the statement asks for; None when it is no definition."""
    for words, parser in _PARSERS.items():
        if reader.take(*words):
            definition = parser(reader)
            reader.end()
            return _and_dependents(definition)
    return None


def _and_dependents(definition: Definition) -> Definition:
    """Any change of structure may break a view or a trigger, or mend one. No trigger is there while it is made."""

    def run(bench: Workbench) -> None:
        triggers.lift(bench)
        definition(bench)
        views.note_validity(bench)
        triggers.install(bench)

    return run
