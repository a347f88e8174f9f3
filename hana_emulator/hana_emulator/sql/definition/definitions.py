"""Select the parser of a data definition statement. The catalogue is checked only when the statement runs."""

from __future__ import annotations

from collections.abc import Iterable

from hana_emulator.sql.catalog.catalog import Catalog
from hana_emulator.sql.catalog.rights import PUBLIC, Touch, touch
from hana_emulator.sql.definition import (
    accounts,
    alterations,
    objects,
    sequence_definitions,
    synonyms,
    tables,
    triggers,
    views,
)
from hana_emulator.sql.definition.workbench import Definition, Workbench
from hana_emulator.sql.language.reader import Parsers, TokenReader

_PARSERS: Parsers[Definition] = Parsers(
    {
        **tables.PARSERS,
        **alterations.PARSERS,
        **views.PARSERS,
        **sequence_definitions.PARSERS,
        **synonyms.PARSERS,
        **objects.PARSERS,
        **accounts.PARSERS,
        **triggers.PARSERS,
    }
)


def parse(reader: TokenReader) -> Definition | None:
    """Parse a definition; None if the statement is not one."""
    definition = _PARSERS.parse(reader)
    if definition is None:
        return None

    def run(bench: Workbench) -> None:
        # A definition may change whether views and triggers are valid. Triggers are lifted so that none fires during
        # it.
        triggers.lift(bench)
        definition(bench)
        views.note_validity(bench)
        triggers.install(bench)

    return run


def require_change(user: str, before: Catalog, after: Catalog) -> None:
    """Check the privileges for a definition's changes. Raises HanaError 258; the caller undoes the changes."""
    before.rights.require(user, _needed(before, after))


def _needed(before: Catalog, after: Catalog) -> Iterable[Touch]:
    yield from (Touch("CREATE SCHEMA") for _ in after.schemas - before.schemas)
    yield from (Touch("DROP", schema) for schema in before.schemas - after.schemas)
    was = {relation.id: relation for relation in before.relations.values()}
    now = {relation.id: relation for relation in after.relations.values()}
    for number, relation in now.items():
        if relation.temporary is not None and relation.temporary.scope == "LOCAL":
            continue
        if number not in was and (relation.schema, relation.name) not in before.relations:
            yield Touch("CREATE ANY", relation.schema)
        elif number in was and was[number] != relation:
            yield touch("ALTER", was[number])
    dropped = [relation for number, relation in was.items() if number not in now]
    tables = [relation for relation in dropped if not relation.is_view]
    # Views dropped with a table (CASCADE) require no privilege.
    yield from (touch("DROP", relation) for relation in tables or dropped)
    for index in set(before.indexes.values()) ^ set(after.indexes.values()):
        if index.relation in was and index.relation in now:
            yield touch("INDEX", was[index.relation])
    yield from _needed_for_sequences(before, after)
    yield from _needed_for_synonyms(before, after)
    yield from _needed_for_triggers(before, after)


def _needed_for_sequences(before: Catalog, after: Catalog) -> Iterable[Touch]:
    owners = before.rights.sequence_owners
    was, now = ({one.id: one for one in catalog.objects.sequences.values()} for catalog in (before, after))
    yield from (Touch("CREATE ANY", now[number].schema) for number in now.keys() - was.keys())
    for number, one in was.items():
        if now.get(number) != one:
            yield Touch("ALTER" if number in now else "DROP", one.schema, one.name, owner=owners.get(number, ""))


def _needed_for_triggers(before: Catalog, after: Catalog) -> Iterable[Touch]:
    """The definition itself checks TRIGGER on the table. Dropping the table drops its triggers."""
    was, now = ({one.id: one for one in catalog.objects.triggers.values()} for catalog in (before, after))
    tables = {relation.id for relation in after.relations.values()}
    yield from (Touch("CREATE ANY", now[number].schema) for number in now.keys() - was.keys())
    for number in was.keys() - now.keys():
        one = was[number]
        if one.relation in tables:
            yield Touch("DROP", one.schema, one.name, owner=one.owner)


def _needed_for_synonyms(before: Catalog, after: Catalog) -> Iterable[Touch]:
    """Any user may create a public synonym: it grants no privilege on its target."""
    was, now = before.objects.synonyms, after.objects.synonyms
    yield from (Touch("CREATE ANY", schema) for schema, _ in now.keys() - was.keys() if schema != PUBLIC)
    for place in was.keys() - now.keys():
        yield Touch("DROP", *place, owner=before.rights.synonym_owners.get(place, ""))
