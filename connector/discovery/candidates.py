"""Find the tables of a schema that suit a collection: those with texts, well-known and large ones first. Reads only the
catalogue, and in a very large schema only the largest tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from connector.discovery.roles import TEXTS, guess
from connector.discovery.sap_tables import KNOWN, known, unreadable
from connector.hana import catalog
from connector.hana.connection import HanaPool
from connector.model import Column, TableRef

_SMALL = 300  # up to this many tables, a schema is read completely
_OURS = "OWL_"


@dataclass(frozen=True, slots=True)
class Candidate:
    """`rows`: HANA's own count; None for a view or if the user may not see it. `texts`: text columns."""

    ref: TableRef
    is_view: bool
    rows: int | None
    about: str
    texts: tuple[str, ...]


def candidates(pool: HanaPool, schema: str, most: int = 30) -> list[Candidate]:
    """Return candidates, best first and empty tables last. Raises UnknownTable for an unknown schema."""
    listed = catalog.tables(pool, schema, limit=_SMALL + 1)
    if len(listed) > _SMALL:
        largest = catalog.largest_tables(pool, schema, _SMALL)
        there = catalog.tables_named(pool, schema, KNOWN)
        rows = largest | catalog.record_counts(pool, schema, there)
        names = dict.fromkeys([*there, *(name for _, name in largest)])
        entries = [(name, False, rows.get((schema, name)), known(name).about) for name in names]
    else:
        about = {each.ref.name: each.comment or known(each.ref.name).about for each in listed}
        entries = [(each.ref.name, each.is_view, each.rows, about[each.ref.name]) for each in listed]
    usable = [entry for entry in entries if not entry[0].startswith(_OURS) and not unreadable(entry[0])]
    columns = catalog.columns_of(pool, schema, [name for name, is_view, *_ in usable if not is_view], views=False)
    columns |= catalog.columns_of(pool, schema, [name for name, is_view, *_ in usable if is_view], views=True)
    found = [
        Candidate(TableRef(schema, name), is_view, rows, about, texts)
        for name, is_view, rows, about in usable
        if (texts := _texts(columns.get(name, ())))
    ]
    found.sort(key=lambda each: (each.rows == 0, each.ref.name not in KNOWN, -(each.rows or 0), each.ref.name))
    return found[:most]


def _texts(columns: Iterable[Column]) -> tuple[str, ...]:
    return tuple(column.name for column in columns if guess(column).role in TEXTS)
