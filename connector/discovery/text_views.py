"""Find the table with another table's texts, and write the SQL of a view that joins both: one row per key, with the
texts in the best language. A user reviews and runs the SQL.
"""

from __future__ import annotations

from collections.abc import Sequence

from connector.discovery.roles import TEXTS, Role, guess
from connector.discovery.sap_tables import ISO
from connector.hana.catalog import LOB_TYPES, NOT_COMPARABLE
from connector.hana.connection import quote
from connector.hana.statement import place
from connector.model import Column, Table, TableRef

LANGUAGES = ("E", "D")  # English, then German, in SAP's one-letter form
_SAP = {iso: letter for letter, iso in reversed(ISO.items())}
_ACTIVE = "OBJVERS"  # BW keeps a second version of master data during a change
_RANK = '"OWL_RANK"'
_LONGEST_NAME = 127
_MOST_ITEM_TEXTS = 2


def language_of(table: Table) -> Column | None:
    """Return the language column in the table's key; for a view, any language column."""
    columns = [column for column in table.columns if not table.primary_key or column.name in table.primary_key]
    return next((column for column in columns if guess(column).role is Role.LANGUAGE), None)


def shared_key(texts: Table, table: Table) -> tuple[str, ...]:
    """Return the columns that join `table` with its texts: the key of `texts` without the language. Empty if the tables
    do not match or `texts` has no text."""
    language = language_of(texts)
    if language is None or not _text_columns(texts):
        return ()
    key = texts.primary_key or tuple(
        column.name
        for column in texts.columns
        if guess(column).role not in TEXTS and column.type_name not in NOT_COMPARABLE
    )
    names = tuple(name for name in key if name != language.name)
    return names if names and all(table.column(name) is not None for name in names) else ()


def items_key(items: Table, table: Table) -> tuple[str, ...]:
    """Return the key of `table` if `items` has the same key plus one column that is not a language; else ()."""
    key = set(table.primary_key)
    more = key and key < set(items.primary_key) and len(items.primary_key) == len(key) + 1
    return table.primary_key if more and language_of(items) is None else ()


def languages_for(column: Column, wanted: Sequence[str]) -> list[str]:
    """Return the preferred languages (in SAP or ISO form), then English and German, in the form of the column: "E" for
    SPRAS, "en" or "en_GB" for a locale, as CAP writes it."""
    forms = []
    for each in (*wanted, *LANGUAGES):
        if column.length == 1:
            forms.append(_SAP.get(each.lower(), each))
        else:
            forms.append(ISO.get(each, each.lower() if len(each) == 2 else each))
    return list(dict.fromkeys(forms))


def create_view(
    table: Table, texts: Sequence[Table], items: Sequence[Table] = (), languages: Sequence[str] = ()
) -> str | None:
    """Return the SQL of a view with the rows and columns of `table` (without persons) and their texts; None if there is
    nothing to join. `texts`: tables with one row per language. `items`: with several rows per key, without languages.

    Each text table gives the first preferred language that has a text, else any. A text in the table's own default
    language (CAP) is replaced only by the first preferred language, as CAP does. Item texts are concatenated in order.
    """
    columns = {
        column.name: f"m.{quote(column.name)}"
        for column in table.columns
        if guess(column).role is not Role.PERSON or column.name in table.primary_key
    }
    joins: list[str] = []
    joined: set[str] = set()  # columns from a text table; the next table may have a column of the same name
    for other in texts:
        key, names = shared_key(other, table), [name for name in _text_columns(other) if name not in joined]
        language = language_of(other)
        if language is None or not key or not names:
            continue
        alias = f"t{len(joins) + 1}"
        joined.update(names)
        replaced = [name for name in names if name in columns]
        ranked = _ranked(other, key, names, languages_for(language, languages), replaces=bool(replaced))
        joins.append(f"{_join(alias, ranked, key)} AND {alias}.{_RANK} = 1")
        if table.column(language.name) is None:
            columns.setdefault(language.name, f"{alias}.{quote(language.name)}")
        for name in names:
            own = f"{alias}.{quote(name)}"
            columns[name] = f"COALESCE({own}, m.{quote(name)}) AS {quote(name)}" if name in replaced else own
    for other in items:
        key = items_key(other, table)
        names = [name for name in _text_columns(other) if name not in columns and not _is_lob(other, name)]
        names = names[:_MOST_ITEM_TEXTS]
        if not key or not names:
            continue
        alias = f"t{len(joins) + 1}"
        joins.append(_join(alias, _concatenated(other, key, names), key))
        columns |= {name: f"{alias}.{quote(name)}" for name in names}
    if not joins:
        return None
    view = TableRef(table.ref.schema, f"V_{table.ref.name.strip('/').replace('/', '_')}"[:_LONGEST_NAME])
    select = f"SELECT {', '.join(columns.values())}\n  FROM {place(table.ref)} m"  # noqa: S608
    lines = [f"CREATE VIEW {place(view)} AS {select}", *joins]
    if (active := table.column(_ACTIVE)) is not None and active.length == 1:
        lines.append(f"  WHERE m.{quote(_ACTIVE)} = 'A'")
    return "\n".join(lines)


def _ranked(texts: Table, key: Sequence[str], names: Sequence[str], chain: Sequence[str], *, replaces: bool) -> str:
    """Return a SELECT of the texts with their rank by language, 1 the best. `replaces`: the table itself holds the
    default language, so that only the first language of `chain` counts."""
    column = language_of(texts)
    assert column is not None
    language, literals = quote(column.name), ["'" + each.replace("'", "''") + "'" for each in chain]
    # Blanks do not count as text. HANA cannot compare or trim LOBs.
    values = [quote(name) if _is_lob(texts, name) else f"TRIM({quote(name)})" for name in names]
    condition = " OR ".join(f"LENGTH({value}) > 0" for value in values)
    if replaces:
        condition = f"{language} = {literals[0]} AND ({condition})"
    order = " ".join(f"WHEN {each} THEN {number}" for number, each in enumerate(literals, 1))
    # Only a view can have two texts for one key and language: choose the same one every time.
    ties = [] if texts.primary_key else [quote(name) for name in names if not _is_lob(texts, name)]
    last = ", ".join([f"CASE {language} {order} ELSE {len(chain) + 1} END", language, *ties])
    parts = ", ".join(map(quote, key))
    # Names and literals are quoted, so S608 does not apply here and below.
    return (
        f"SELECT {', '.join(map(quote, (*key, column.name, *names)))}, "  # noqa: S608
        f"ROW_NUMBER() OVER (PARTITION BY {parts} ORDER BY {last}) AS {_RANK} FROM {place(texts.ref)} WHERE {condition}"
    )


def _concatenated(items: Table, key: Sequence[str], names: Sequence[str]) -> str:
    """Return a SELECT with one row per key: the texts of its items, in the order of their number."""
    (number,) = (name for name in items.primary_key if name not in key)
    texts = ", ".join(
        f"STRING_AGG(NULLIF(TRIM({quote(name)}), ''), '. ' ORDER BY {quote(number)}) AS {quote(name)}" for name in names
    )
    grouped = ", ".join(map(quote, key))
    return f"SELECT {grouped}, {texts} FROM {place(items.ref)} GROUP BY {grouped}"  # noqa: S608


def _join(alias: str, select: str, key: Sequence[str]) -> str:
    conditions = " AND ".join(f"{alias}.{quote(name)} = m.{quote(name)}" for name in key)
    return f"  LEFT OUTER JOIN ({select}) {alias}\n    ON {conditions}"


def _text_columns(table: Table) -> list[str]:
    return [each.name for each in table.columns if guess(each).role in TEXTS and each.name not in table.primary_key]


def _is_lob(table: Table, name: str) -> bool:
    column = table.column(name)
    return column is not None and column.type_name in LOB_TYPES
