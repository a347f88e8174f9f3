"""Looks at a table and proposes a collection: describes it, asks the catalogue and its rows for what the description
does not say (keys, clients, text tables), and hands that to `proposal`. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from connector import catalog
from connector.errors import NoProposal
from connector.hana import HanaPool, quote
from connector.model import Column, Table, TableRef
from connector.proposal import (
    Facts,
    Proposal,
    client_column,
    create_view,
    is_text_table,
    key_candidates,
    nearest_first,
    propose,
)

_MOST_CLIENTS = 20
_MOST_TEXT_TABLES = 3
_LOOKED_AT = 20
"""Tables of the same key that are described to see whether they are text tables."""


@dataclass(frozen=True, slots=True)
class Introspection:
    """`proposal` is None where none can be made; `reason` then says why. `rows`: as HANA keeps count, if known."""

    table: Table
    rows: int | None
    proposal: Proposal | None
    reason: str = ""


def introspect(pool: HanaPool, ref: TableRef, *, look_at_rows: bool = True) -> Introspection:
    """Describe a table or view and propose a collection over it.

    A table without text of its own, but with a text table (MARA and MAKT), gets a proposal for that one, and the SQL of
    a view over both. With `look_at_rows` clients are counted, and for views the key is tried: each is one pass of HANA
    over the table. Raises UnknownTable; PermissionRefused when the rows may not be read.
    """
    table = catalog.describe(pool, ref)
    counts = {} if table.is_view else catalog.record_counts(pool, ref.schema, [ref.name])
    rows = counts.get((ref.schema, ref.name))
    texts = _text_tables(pool, table)
    try:
        proposal = propose(table, _facts(pool, table, texts, look_at_rows))
    except NoProposal as error:
        if not texts:
            return Introspection(table, rows, None, str(error))
        proposal = _of_text_table(pool, table, texts, look_at_rows)
    return Introspection(table, rows, proposal)


def _of_text_table(pool: HanaPool, table: Table, texts: list[Table], look_at_rows: bool) -> Proposal:
    proposal = propose(texts[0], _facts(pool, texts[0], [], look_at_rows))
    told = f"{table.ref} has no text of its own; its texts stand here, in {texts[0].ref}"
    others = ", ".join(str(other.ref) for other in texts[1:])
    note = (
        f"To filter by columns of {table.ref} too, make the view below and introspect that"
        + (f"; it also holds the texts of {others}" if others else "")
        + "."
    )
    return replace(
        proposal,
        reasons={**proposal.reasons, "source": told},
        notes=(note, *proposal.notes),
        create_view=create_view(table, texts),
    )


def _facts(pool: HanaPool, table: Table, texts: list[Table], look_at_rows: bool) -> Facts:
    unique = [] if table.primary_key or table.is_view else catalog.unique_keys(pool, table)
    client = client_column(table)
    clients = _clients(pool, table, client) if client is not None and look_at_rows else None
    shared = _tried(pool, table) if look_at_rows and not (table.primary_key or unique) else {}
    return Facts(unique, clients, shared, texts)


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
    # Names are quoted, so S608 has nothing to find here and below.
    sql = f"SELECT {name}, COUNT(*) FROM {_place(table)} GROUP BY {name} ORDER BY COUNT(*) DESC, {name} LIMIT ?"  # noqa: S608
    found = pool.read(sql, (_MOST_CLIENTS,), doing=f"counting the clients in {table.ref}")
    return [(str(client), int(rows)) for client, rows in found if client is not None]


def _shared(pool: HanaPool, table: Table, key: tuple[str, ...]) -> int | None:
    """Values of these columns that more than one row has; None when there is no row, which proves nothing."""
    names = ", ".join(map(quote, key))
    sql = (
        'SELECT COUNT(*), SUM(CASE WHEN "N" > 1 THEN 1 ELSE 0 END) '  # noqa: S608
        f'FROM (SELECT COUNT(*) AS "N" FROM {_place(table)} GROUP BY {names}) AS K'
    )
    values, shared = pool.read(sql, doing=f"looking for a key of {table.ref}")[0]
    return int(shared) if values else None


def _text_tables(pool: HanaPool, table: Table) -> list[Table]:
    """Tables of the same schema with this primary key and a language, the likeliest first."""
    if not table.primary_key:
        return []
    schema, key = table.ref.schema, set(table.primary_key)
    keys = catalog.tables_with_key(pool, schema, table.primary_key[-1])
    names = [name for name, other in keys.items() if len(other) == len(key) + 1 and key < set(other)]
    found = []
    for name in nearest_first(table.ref.name, names)[:_LOOKED_AT]:
        other = catalog.describe(pool, TableRef(schema, name))
        if is_text_table(other, table.primary_key):
            found.append(other)
    return found[:_MOST_TEXT_TABLES]


def _place(table: Table) -> str:
    return f"{quote(table.ref.schema)}.{quote(table.ref.name)}"
