"""Text tables: find the table with the texts of another, and write the SQL of a view that joins both: one row per key,
with the texts in the best language. A user reviews and runs the SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connector.discovery.roles import TEXTS, Role, guess
from connector.discovery.sap_tables import text_table_names
from connector.errors import ConfigurationError
from connector.hana.catalog import LOB_TYPES, NOT_COMPARABLE
from connector.hana.connection import quote
from connector.model import Column, Table, TableRef

LANGUAGES = ("E", "D")  # English, then German, in SAP's one-letter form
_ISO = {
    "E": "en", "D": "de", "F": "fr", "I": "it", "S": "es", "N": "nl", "P": "pt", "L": "pl", "J": "ja", "1": "zh",
    "A": "ar", "B": "he", "C": "cs", "G": "el", "H": "hu", "K": "da", "O": "no", "Q": "sk", "R": "ru", "T": "tr",
    "U": "fi", "V": "sv", "W": "bg", "2": "th", "3": "ko", "4": "ro", "5": "sl", "6": "hr", "8": "uk", "9": "et",
}  # fmt: skip
_SAP = {iso: letter for letter, iso in _ISO.items()}
_ACTIVE = "OBJVERS"  # BW keeps a second version of master data during a change
_RANK = "OWL_RANK"
_LONGEST_NAME = 127
_MOST_ITEM_TEXTS = 2


def nameable(column: Column) -> bool:
    """Return whether SQL can quote the column's name."""
    try:
        quote(column.name)
    except ConfigurationError:
        return False
    return True


def place(ref: TableRef) -> str:
    return f"{quote(ref.schema)}.{quote(ref.name)}"


def language_of(table: Table) -> Column | None:
    """Return the language column in the table's key; for a view, any language column."""
    columns = [column for column in table.columns if not table.primary_key or column.name in table.primary_key]
    return next((column for column in columns if guess(column).role is Role.LANGUAGE), None)


def shared_key(texts: Table, table: Table) -> tuple[str, ...]:
    """Return the columns that join `table` with its texts: the key of `texts` without the language. Empty if the tables
    do not match or `texts` has no text."""
    language = language_of(texts)
    if language is None or not any(_text_columns(texts)):
        return ()
    key = texts.primary_key or tuple(
        column.name for column in texts.columns if guess(column).role not in TEXTS and _comparable(column)
    )
    names = tuple(name for name in key if name != language.name)
    return names if names and all(table.column(name) is not None for name in names) else ()


def is_text_table(texts: Table, table: Table) -> bool:
    """Return whether the key of `texts` is that of `table` plus a language."""
    both = bool(table.primary_key) and bool(texts.primary_key)
    return both and set(shared_key(texts, table)) == set(table.primary_key)


def nearest_first(table: str, others: Sequence[str]) -> list[str]:
    """Return the names: likely text tables first, then the others sorted."""
    likely = list(text_table_names(table))
    return sorted(others, key=lambda name: (likely.index(name) if name in likely else len(likely), name))


def items_key(items: Table, table: Table) -> tuple[str, ...]:
    """Return the key of `table` if `items` has the same key plus one column that is not a language; else ()."""
    rest = [name for name in items.primary_key if name not in table.primary_key]
    if not table.primary_key or len(rest) != 1 or len(items.primary_key) != len(table.primary_key) + 1:
        return ()
    return table.primary_key if language_of(items) is None else ()


@dataclass(frozen=True, slots=True)
class TextSources:
    """The tables to join: `texts`, one row per language, and `items`, several rows without languages.

    `languages`: preferred languages, best first, in SAP's or ISO's form; any other language is the fallback.
    """

    texts: Sequence[Table] = ()
    items: Sequence[Table] = ()
    languages: Sequence[str] = ()

    def chain(self, column: Column) -> tuple[str, ...]:
        """Return the languages in the form of the column: "E" for SPRAS, "en" for a locale."""
        wanted = (*self.languages, *LANGUAGES)
        letters = column.length == 1
        forms = [_SAP.get(each.lower(), each) if letters else _locale(each) for each in wanted]
        return tuple(dict.fromkeys(forms))


def create_view(table: Table, sources: TextSources) -> str | None:
    """Return the SQL of a view with the rows and columns of `table` (without persons) and their texts; None if there is
    nothing to join.

    Each text table gives the first preferred language that has a text, else any. A text in the table's own default
    language (CAP) is replaced only by the first preferred language, as CAP does. Item texts are concatenated in order.
    """
    parts = _Parts(table, sources)
    for texts in sources.texts:
        parts.add_texts(texts)
    for items in sources.items:
        parts.add_items(items)
    return parts.sql()


class _Parts:
    """Columns and joins, built up one text source at a time."""

    def __init__(self, table: Table, sources: TextSources) -> None:
        self._table = table
        self._sources = sources
        persons = {column.name for column in table.columns if guess(column).role is Role.PERSON}
        left_out = persons - set(table.primary_key)
        own = [column for column in table.columns if column.name not in left_out and nameable(column)]
        self._items = {column.name: f"m.{quote(column.name)}" for column in own}
        self._joins: list[str] = []
        self._joined: set[str] = set()
        """Columns that a text table provides; the next one may have a column of the same name."""

    def add_texts(self, texts: Table) -> None:
        table, language, key = self._table, language_of(texts), shared_key(texts, self._table)
        names = [name for name in _text_columns(texts) if name not in self._joined]
        replaced = [name for name in names if name in self._items]
        new = [name for name in names if name not in self._items]
        if language is None or not key or not (new or replaced):
            return
        alias = f"t{len(self._joins) + 1}"
        self._joined.update(names)
        condition = " OR ".join(_has_text(texts, name) for name in names)
        chain = self._sources.chain(language)
        if replaced:  # the table itself holds the default language
            condition = f"{quote(language.name)} = {_literal(chain[0])} AND ({condition})"
        columns = ", ".join(map(quote, (*key, language.name, *names)))
        order = " ".join(f"WHEN {_literal(each)} THEN {number}" for number, each in enumerate(chain, 1))
        # Only a view can have two texts for one key and language: choose the same one every time.
        ties = [] if texts.primary_key else [name for name in names if not _is_lob(texts, name)]
        last = ", ".join(map(quote, (language.name, *ties)))
        rank = (
            f"ROW_NUMBER() OVER (PARTITION BY {', '.join(map(quote, key))} ORDER BY "
            f"CASE {quote(language.name)} {order} ELSE {len(chain) + 1} END, {last}) AS {quote(_RANK)}"
        )
        # Names and literals are quoted, so S608 does not apply here and below.
        select = f"SELECT {columns}, {rank} FROM {place(texts.ref)} WHERE {condition}"  # noqa: S608
        self._join(alias, select, key, ranked=True)
        if language.name not in self._items and table.column(language.name) is None:
            self._items = _behind_key(self._items, table, language.name, f"{alias}.{quote(language.name)}")
        for name in new:
            self._items[name] = f"{alias}.{quote(name)}"
        for name in replaced:
            self._items[name] = f"COALESCE({alias}.{quote(name)}, m.{quote(name)}) AS {quote(name)}"

    def add_items(self, items: Table) -> None:
        key = items_key(items, self._table)
        names = [name for name in _text_columns(items) if not _is_lob(items, name) and name not in self._items]
        if not key or not names:
            return
        alias = f"t{len(self._joins) + 1}"
        (number,) = (name for name in items.primary_key if name not in key)
        names = names[:_MOST_ITEM_TEXTS]
        strung = ", ".join(
            f"STRING_AGG(NULLIF(TRIM({quote(name)}), ''), '. ' ORDER BY {quote(number)}) AS {quote(name)}"
            for name in names
        )
        grouped = ", ".join(map(quote, key))
        select = f"SELECT {grouped}, {strung} FROM {place(items.ref)} GROUP BY {grouped}"  # noqa: S608
        self._join(alias, select, key)
        for name in names:
            self._items[name] = f"{alias}.{quote(name)}"

    def _join(self, alias: str, select: str, key: Sequence[str], *, ranked: bool = False) -> None:
        conditions = [f"{alias}.{quote(name)} = m.{quote(name)}" for name in key]
        if ranked:
            conditions.append(f"{alias}.{quote(_RANK)} = 1")
        self._joins.append(f"  LEFT OUTER JOIN ({select}) {alias}\n    ON {' AND '.join(conditions)}")

    def sql(self) -> str | None:
        if not self._joins:
            return None
        ref = self._table.ref
        view = TableRef(ref.schema, f"V_{ref.name.strip('/').replace('/', '_')}"[:_LONGEST_NAME])
        lines = [
            f"CREATE VIEW {place(view)} AS SELECT {', '.join(self._items.values())}",
            f"  FROM {place(ref)} m",
            *self._joins,
        ]
        if (active := self._table.column(_ACTIVE)) is not None and active.length == 1:
            lines.append(f"  WHERE m.{quote(_ACTIVE)} = 'A'")
        return "\n".join(lines)


def _behind_key(items: dict[str, str], table: Table, name: str, value: str) -> dict[str, str]:
    """Put the language directly after the key columns."""
    made: dict[str, str] = {each: text for each, text in items.items() if each in table.primary_key}
    made[name] = value
    return made | {each: text for each, text in items.items() if each not in made}


def _text_columns(table: Table) -> list[str]:
    return [column.name for column in table.columns if _is_text(table, column)]


def _is_text(table: Table, column: Column) -> bool:
    return guess(column).role in TEXTS and nameable(column) and column.name not in table.primary_key


def _is_lob(table: Table, name: str) -> bool:
    column = table.column(name)
    return column is not None and column.type_name in LOB_TYPES


def _comparable(column: Column) -> bool:
    return column.type_name not in NOT_COMPARABLE and nameable(column)


def _has_text(table: Table, name: str) -> str:
    """Return SQL that is false for NULL and, except for LOBs, for blanks. HANA cannot compare LOBs."""
    value = quote(name) if _is_lob(table, name) else f"TRIM({quote(name)})"
    return f"LENGTH({value}) > 0"


def _locale(language: str) -> str:
    """Return the language as CAP writes it: en, en_GB."""
    return _ISO.get(language, language.lower() if len(language) == 2 else language)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
