"""Describe a table and propose a collection: read keys, clients and text tables from catalogue and rows, and pass them
to `proposal`. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from connector.discovery.change_advice import Stamps, stamp_column
from connector.discovery.proposal import VIEW_TOLD, Facts, Proposal, client_column, key_candidates, propose
from connector.discovery.sap_tables import known, outside_names, unreadable
from connector.discovery.text_views import TextSources, create_view, is_text_table, items_key, nearest_first, shared_key
from connector.errors import NoProposal, UnknownTable
from connector.hana import catalog
from connector.hana.connection import HanaPool, quote
from connector.model import Column, Table, TableRef

_NEVER_INITIAL = frozenset({"TIMESTAMP", "SECONDDATE", "DATE"})
_MOST_CLIENTS = 20
_MOST_TEXT_TABLES = 3
_LOOKED_AT = 20  # tables with the same key to check for being text tables


@dataclass(frozen=True, slots=True)
class Introspection:
    """`proposal`: None if none is possible; `reason` says why. `rows`: HANA's own count, if known."""

    table: Table
    rows: int | None
    proposal: Proposal | None
    reason: str = ""


def introspect(
    pool: HanaPool, ref: TableRef, *, look_at_rows: bool = True, languages: Sequence[str] = ()
) -> Introspection:
    """Describe a table or view and propose a collection over it.

    A table without text of its own but with a text table (MARA and MAKT) gets a proposal for the text table, and the
    SQL of a view over both. `look_at_rows`: count clients, try keys of views, and examine a possible watermark; each is
    one scan of the table in HANA. `languages`: of the view's texts, best first. Raises UnknownTable; PermissionRefused
    if the rows may not be read.
    """
    table = catalog.describe(pool, ref)
    counts = {} if table.is_view else catalog.record_counts(pool, ref.schema, [ref.name])
    rows = counts.get((ref.schema, ref.name))
    sources = TextSources() if unreadable(ref.name) else _text_sources(pool, table, languages)
    try:
        proposal = propose(table, replace(_facts(pool, table, look_at_rows), rows=rows, texts=sources))
    except NoProposal as error:
        if not (sources.texts or sources.items):
            return Introspection(table, rows, None, str(error))
        proposal = _of_text_table(pool, table, sources, look_at_rows)
    return Introspection(table, rows, proposal)


def _of_text_table(pool: HanaPool, table: Table, sources: TextSources, look_at_rows: bool) -> Proposal:
    texts = [*sources.texts, *sources.items]
    proposal = propose(texts[0], _facts(pool, texts[0], look_at_rows))
    told = f"{table.ref} has no text of its own; its texts stand here, in {texts[0].ref}"
    others = ", ".join(str(other.ref) for other in texts[1:])
    note = (
        f"To filter by columns of {table.ref} too, make the view below and introspect that"
        + (f"; it also holds the texts of {others}" if others else "")
        + f". {VIEW_TOLD}."
    )
    return replace(
        proposal,
        reasons={"source": told, **proposal.reasons},
        notes=(note, *proposal.notes),
        create_view=create_view(table, sources),
    )


def _facts(pool: HanaPool, table: Table, look_at_rows: bool) -> Facts:
    unique = [] if table.primary_key or table.is_view else catalog.unique_keys(pool, table)
    client, stamp = client_column(table), stamp_column(table)
    clients = _clients(pool, table, client) if client is not None and look_at_rows else None
    shared = _tried(pool, table) if look_at_rows and not (table.primary_key or unique) else {}
    stamps = _stamps(pool, table, stamp) if stamp is not None and look_at_rows else None
    return Facts(unique, clients, shared, stamps)


def _tried(pool: HanaPool, table: Table) -> dict[tuple[str, ...], int]:
    shared: dict[tuple[str, ...], int] = {}
    for key in key_candidates(table):
        twice = _shared(pool, table, key)
        if twice is not None:
            shared[key] = twice
        if not twice:
            break
    return shared


def _clients(pool: HanaPool, table: Table, column: Column) -> list[tuple[str, int]]:
    name = quote(column.name)
    # S608, here and below: all names are quoted.
    sql = f"SELECT {name}, COUNT(*) FROM {_place(table)} GROUP BY {name} ORDER BY COUNT(*) DESC, {name} LIMIT ?"  # noqa: S608
    found = pool.read(sql, (_MOST_CLIENTS,), doing=f"counting the clients in {table.ref}")
    return [(str(client), int(rows)) for client, rows in found if client is not None]


def _shared(pool: HanaPool, table: Table, key: tuple[str, ...]) -> int | None:
    """Return how many values of these columns occur in several rows; None for an empty table."""
    names = ", ".join(map(quote, key))
    sql = (
        'SELECT COUNT(*), SUM(CASE WHEN "N" > 1 THEN 1 ELSE 0 END) '  # noqa: S608
        f'FROM (SELECT COUNT(*) AS "N" FROM {_place(table)} GROUP BY {names}) AS K'
    )
    values, shared = pool.read(sql, doing=f"looking for a key of {table.ref}")[0]
    return int(shared) if values else None


def _stamps(pool: HanaPool, table: Table, column: Column) -> Stamps:
    """Return the stamps. Initial values count as missing: ABAP writes zeros or blanks for unset values."""
    name = quote(column.name)
    value = name if column.type_name in _NEVER_INITIAL else f"NULLIF(LTRIM(TO_NVARCHAR({name}), '0. '), '')"
    sql = f"SELECT COUNT(*), COUNT({value}), COUNT(DISTINCT {name}) FROM {_place(table)}"  # noqa: S608
    rows, filled, distinct = pool.read(sql, doing=f"looking at {column.name} of {table.ref}")[0]
    return Stamps(int(rows), int(filled), int(distinct))


def _text_sources(pool: HanaPool, table: Table, languages: Sequence[str]) -> TextSources:
    """Find the text tables of the same schema: tables with this primary key and a language, likeliest first; tables
    named by SAP's conventions; and item tables, with several rows per row of this table."""
    schema, name = table.ref.schema, table.ref.name
    keys = catalog.tables_with_key(pool, schema, table.primary_key[-1]) if table.primary_key else {}
    key = set(table.primary_key)
    alike = [each for each, other in keys.items() if len(other) == len(key) + 1 and key < set(other)]
    described = [catalog.describe(pool, TableRef(schema, each)) for each in nearest_first(name, alike)[:_LOOKED_AT]]
    texts = [other for other in described if is_text_table(other, table)]
    for each in outside_names(name):
        if each not in keys and (other := _found(pool, TableRef(schema, each))) is not None:
            texts += [other] if shared_key(other, table) else []
    wanted = known(name).items
    items = [catalog.describe(pool, TableRef(schema, each)) for each in wanted if each in keys]
    items = [other for other in items if items_key(other, table)]
    return TextSources(texts[:_MOST_TEXT_TABLES], items, languages)


def _found(pool: HanaPool, ref: TableRef) -> Table | None:
    try:
        return catalog.describe(pool, ref)
    except UnknownTable:
        return None


def _place(table: Table) -> str:
    return f"{quote(table.ref.schema)}.{quote(table.ref.name)}"
