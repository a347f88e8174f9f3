"""List the tables that suit a collection, or describe a table and propose a collection over it: read keys, clients and
text tables from the catalogue and the rows, and pass them to `proposal`. Changes nothing in HANA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from connector.discovery import languages as spoken
from connector.discovery.proposal import (
    VIEW_NOTE,
    Facts,
    Proposal,
    client_column,
    key_candidates,
    propose,
    stamp_column,
)
from connector.discovery.roles import TEXTS, guess
from connector.discovery.sap_tables import LONG_TEXTS, TABLES, text_table_names
from connector.discovery.text_views import create_view, items_key, language_of, shared_key
from connector.document.template import Template
from connector.errors import ConfigurationError, NoProposal, PermissionRefused, StatementFailed, UnknownTable
from connector.hana import catalog
from connector.hana.connection import HanaPool, quote
from connector.hana.delta_table import known_columns
from connector.hana.source import HanaSource
from connector.hana.statement import place
from connector.model import Query, Table, TableRef, delta_beside

_SMALL = 300  # up to this many tables, a schema is read completely
_NEVER_INITIAL = frozenset({"TIMESTAMP", "SECONDDATE", "DATE"})
_MOST_CLIENTS = 20
_MOST_TEXT_TABLES = 3
_PARTS = 8  # ranges of keys that a sample is read from
_LOOKED_AT = 20  # maximum number of tables to describe when looking for text tables


def candidates(pool: HanaPool, schema: str, most: int = 30) -> list[tuple[TableRef, int | None, list[str]]]:
    """Return each table or view with text columns, HANA's row count (None: unknown) and its text columns, without the
    delta tables of others. Well-known and large tables come first, empty ones last. Reads only the catalogue, and in a
    very large schema only the largest and the well-known tables. Raises UnknownTable for an unknown schema."""
    listed = catalog.tables(pool, schema, limit=_SMALL + 1)
    views = [each["name"] for each in listed if each["kind"] == "view"]
    rows: dict[str, int | None] = {each["name"]: each["rows"] for each in listed}
    if len(listed) > _SMALL:
        views = []
        rows = {name: None for name in catalog.tables_named(pool, schema, TABLES)}
        rows |= catalog.record_counts(pool, schema, list(rows)) | catalog.largest_tables(pool, schema, _SMALL)
    names = [name for name in rows if not name.startswith("OWL_") and name not in LONG_TEXTS]
    columns = catalog.columns_of(pool, schema, [name for name in names if name not in views], views=False)
    columns |= catalog.columns_of(pool, schema, [name for name in names if name in views], views=True)
    beside = {delta_beside(TableRef(schema, name)).name for name in rows}
    found = [
        (TableRef(schema, name), rows[name], texts)
        for name in names
        if name not in beside or not known_columns(Table(TableRef(schema, name), columns.get(name, ())))
        if (texts := [column.name for column in columns.get(name, ()) if guess(column).role in TEXTS])
    ]
    found.sort(key=lambda each: (each[1] == 0, each[0].name not in TABLES, -(each[1] or 0), each[0].name))
    return found[:most]


@dataclass(frozen=True, slots=True)
class Introspection:
    """`proposal`: None if no collection can be proposed; `reason` says why. `rows`: HANA's own count, if known.
    `languages`: how many of the `sampled` rows of the proposal's source are in which language (`languages.of_rows`)."""

    table: Table
    rows: int | None
    proposal: Proposal | None
    reason: str = ""
    languages: Mapping[str, int] = field(default_factory=dict)
    sampled: int = 0


def introspect(
    pool: HanaPool, ref: TableRef, *, look_at_rows: bool = True, languages: Sequence[str] = ()
) -> Introspection:
    """Describe a table or view and propose a collection over it.

    A table without text of its own but with a text table (MARA and MAKT) gets a proposal for the text table, and the
    SQL of a view over both. `look_at_rows`: count clients, try keys of views, and examine a possible watermark, each
    one scan of the table in HANA; and judge the languages of some rows. `languages`: those of the view's texts,
    preferred first. Raises UnknownTable, and PermissionRefused if the rows to be counted may not be read.
    """
    table = catalog.describe(pool, ref)
    rows = None if table.is_view else catalog.record_counts(pool, ref.schema, [ref.name]).get(ref.name)
    texts, items = ([], []) if ref.name in LONG_TEXTS else _text_tables(pool, table)
    facts = _facts(pool, table, look_at_rows)._replace(rows=rows, texts=texts, items=items, languages=languages)
    try:
        proposal = propose(table, facts)
        return Introspection(table, rows, proposal, "", *_languages(pool, table, proposal, look_at_rows))
    except NoProposal as error:
        if not (texts or items):
            return Introspection(table, rows, None, str(error))
    source, *others = *texts, *items
    proposal = propose(source, _facts(pool, source, look_at_rows))
    also = f"; it also holds the texts of {', '.join(str(other.ref) for other in others)}" if others else ""
    proposal = replace(
        proposal,
        reasons={"source": f"{ref} has no text of its own; its texts are here, in {source.ref}", **proposal.reasons},
        notes=(
            f"To filter by columns of {ref} too, create and introspect the view below{also}. {VIEW_NOTE}.",
            *proposal.notes,
        ),
        create_view=create_view(table, texts, items, languages),
    )
    return Introspection(table, rows, proposal, "", *_languages(pool, source, proposal, look_at_rows))


def _languages(pool: HanaPool, table: Table, proposal: Proposal, look_at_rows: bool) -> tuple[Mapping[str, int], int]:
    """Return the languages of the proposal's texts in rows spread over the table, and how many rows were read; ({}, 0)
    if they cannot be read. A proposal needs no rows."""
    if not look_at_rows:
        return {}, 0
    texts, language = Template.parse(proposal.template).columns, language_of(table)
    more = () if language is None else (language.name,)
    query = Query(table.ref, proposal.key, tuple(dict.fromkeys((*texts, *more))), proposal.where)
    source = HanaSource(pool)
    try:
        count = source.count(query)
        ranges = source.ranges(query, _PARTS, count) if count > spoken.SAMPLE else [None]
        size = -(-spoken.SAMPLE // len(ranges))
        read = [row.values for part in ranges for row in next(source.pages(query, size, part), [])]
    except (PermissionRefused, StatementFailed, ConfigurationError):
        return {}, 0
    written = [". ".join(str(values[name]) for name in texts if values[name]) for values in read]
    keys = [values[language.name] for values in read] if language is not None else []
    return spoken.of_rows(written, keys), len(read)


def _delta(pool: HanaPool, table: Table) -> Table | None:
    """Return the delta table of `table`, which may be the table itself."""
    known = known_columns(table)
    # A history has them in its key, and a row of it is a version.
    if table.primary_key and known and not set(known) & set(table.primary_key):
        return table
    ref = delta_beside(table.ref)
    try:
        found = catalog.describe(pool, ref) if catalog.tables_named(pool, ref.schema, [ref.name]) else None
    except UnknownTable:  # dropped since
        return None
    if found is None or not known_columns(found):
        return None
    return found if all(map(found.column, table.primary_key)) and all(map(table.column, found.primary_key)) else None


def _facts(pool: HanaPool, table: Table, look_at_rows: bool) -> Facts:
    """Return the unique keys, the delta table and, from the rows, clients, keys and time stamps. SQL contains only
    quoted names."""
    unique = [] if table.primary_key or table.is_view else catalog.unique_keys(pool, table)
    delta = _delta(pool, table)
    if not look_at_rows:
        return Facts(unique, delta=delta)
    source = place(table.ref)
    clients = stamps = None
    if client := client_column(table):
        name = quote(client.name)
        sql = f"SELECT {name}, COUNT(*) FROM {source} GROUP BY {name} ORDER BY COUNT(*) DESC, {name} LIMIT ?"  # noqa: S608
        found = pool.read(sql, (_MOST_CLIENTS,), doing=f"counting the clients in {table.ref}")
        clients = [(str(value), int(rows)) for value, rows in found if value is not None]
    shared: dict[tuple[str, ...], int] = {}
    of_delta = table.is_view and delta is not None and delta.primary_key
    for key in () if table.primary_key or unique or of_delta else key_candidates(table):
        sql = (
            'SELECT COUNT(*), SUM(CASE WHEN "N" > 1 THEN 1 ELSE 0 END) '  # noqa: S608
            f'FROM (SELECT COUNT(*) AS "N" FROM {source} GROUP BY {", ".join(map(quote, key))}) AS K'
        )
        ((values, twice),) = pool.read(sql, doing=f"looking for a key of {table.ref}")
        if values:  # an empty table proves nothing
            shared[key] = int(twice)
        if not values or not twice:
            break
    if stamp := stamp_column(table):
        name = quote(stamp.name)
        # ABAP writes zeros or blanks for unset values.
        value = name if stamp.type_name in _NEVER_INITIAL else f"NULLIF(LTRIM(TO_NVARCHAR({name}), '0. '), '')"
        sql = f"SELECT COUNT(*), COUNT({value}), COUNT(DISTINCT {name}) FROM {source}"  # noqa: S608
        ((total, filled, distinct),) = pool.read(sql, doing=f"looking at {stamp.name} of {table.ref}")
        stamps = (int(total), int(filled), int(distinct))
    return Facts(unique, clients, shared, stamps, delta=delta)


def _text_tables(pool: HanaPool, table: Table) -> tuple[list[Table], list[Table]]:
    """Return the text tables and the item tables of `table` in its schema. A text table has its primary key and a
    language (likeliest first), or a name by SAP's conventions; an item table has several rows per row of `table`."""
    schema, name, key = table.ref.schema, table.ref.name, set(table.primary_key)
    keys = catalog.tables_with_key(pool, schema, table.primary_key[-1]) if key else {}
    outside, alike = text_table_names(name)
    likely = [*outside, *alike]
    longer = [each for each, other in keys.items() if len(other) == len(key) + 1 and key < set(other)]
    longer.sort(key=lambda each: (likely.index(each) if each in likely else len(likely), each))
    described = [catalog.describe(pool, TableRef(schema, each)) for each in longer[:_LOOKED_AT]]
    texts = [other for other in described if set(shared_key(other, table)) == key]
    for each in outside:
        if each not in keys:
            try:
                other = catalog.describe(pool, TableRef(schema, each))
            except UnknownTable:
                continue
            texts += [other] if shared_key(other, table) else []
    wanted = [each for each in TABLES.get(name, {}).get("items", ()) if each in keys]
    items = [catalog.describe(pool, TableRef(schema, each)) for each in wanted]
    return texts[:_MOST_TEXT_TABLES], [other for other in items if items_key(other, table)]
