"""Select the parser of a data definition statement. The catalogue is checked only when the statement runs."""

from __future__ import annotations

from collections.abc import Iterable

from hana_emulator.sql.catalog.catalog import Catalog
from hana_emulator.sql.catalog.rights import PUBLIC, Touch
from hana_emulator.sql.definition import (
    accounts,
    alterations,
    function_definitions,
    objects,
    sequence_definitions,
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
        **function_definitions.PARSERS,
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
        # A definition may change whether views and triggers are valid. Triggers are removed while it runs, so that
        # none fires.
        triggers.lift(bench)
        definition(bench)
        views.note_validity(bench)
        triggers.install(bench)

    return run


def require_change(user: str, before: Catalog, after: Catalog) -> None:
    """Check the privileges for a definition's changes. Raises HanaError 258; the caller undoes the changes."""
    before.rights.require(user, [*_needed_for_relations(before, after), *_needed_for_objects(before, after)])


def _needed_for_relations(before: Catalog, after: Catalog) -> Iterable[Touch]:
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
            yield was[number].touch("ALTER")
    dropped = [relation for number, relation in was.items() if number not in now]
    tables = [relation for relation in dropped if not relation.is_view]
    # Views dropped with a table (CASCADE) require no privilege.
    yield from (relation.touch("DROP") for relation in tables or dropped)
    for index in set(before.indexes.values()) ^ set(after.indexes.values()):
        if index.relation in was and index.relation in now:
            yield was[index.relation].touch("INDEX")


def _needed_for_objects(before: Catalog, after: Catalog) -> Iterable[Touch]:
    """List privileges for sequences, synonyms and triggers. Any user may create a public synonym: it grants no
    privilege on its target. Triggers dropped with their table need none; CREATE TRIGGER itself checks TRIGGER on
    the table."""
    owners, tables = before.rights.sequence_owners, {relation.id for relation in after.relations.values()}
    was, now = (
        {one.id: one for one in catalog.objects.sequences.values() if not one.is_of_identity}
        for catalog in (before, after)
    )
    yield from (Touch("CREATE ANY", now[number].schema) for number in now.keys() - was.keys())
    for number, one in was.items():
        if now.get(number) != one:
            yield Touch("ALTER" if number in now else "DROP", one.schema, one.name, owner=owners.get(number, ""))
    places, left = before.objects.synonyms.keys(), after.objects.synonyms.keys()
    yield from (Touch("CREATE ANY", schema) for schema, _ in left - places if schema != PUBLIC)
    for place in places - left:
        yield Touch("DROP", *place, owner=before.rights.synonym_owners.get(place, ""))
    old, new = ({one.id: one for one in catalog.objects.triggers.values()} for catalog in (before, after))
    yield from (Touch("CREATE ANY", new[number].schema) for number in new.keys() - old.keys())
    for trigger in (old[number] for number in old.keys() - new.keys()):
        if trigger.relation in tables:
            yield Touch("DROP", trigger.schema, trigger.name, owner=trigger.owner)
