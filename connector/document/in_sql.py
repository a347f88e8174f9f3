"""Render the rows of a collection in SQL, exactly as `Renderer` does, so that rows need not leave the database.

Not compiled, with a reason: types whose texts SQL may show differently, amounts beside their currency, time stamps, and
templates with many columns that may be empty. Rows that SQL cannot finish (texts that may need several chunks, large
metadata) are marked. Unpaired surrogates are not looked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from connector.document import values
from connector.document.document import LONGEST_ID, Renderer
from connector.document.template import Template
from connector.hana.connection import quote
from connector.hana.statement import Statement
from connector.model import Column, Table

# This module formats quoted identifiers, constants, and the operator's own template into SQL, never a row's value.
# ruff: noqa: S608

MOST_EMPTY = 6  # columns of a template that may be empty: the text has a variant for each combination
LARGEST_META = 1500  # characters of metadata that SQL hashes: at most 4,500 bytes, and VARBINARY holds 5,000
_INTEGERS = frozenset({"TINYINT", "SMALLINT", "INTEGER", "BIGINT"})
_TEXTS = frozenset({"NVARCHAR", "VARCHAR", "SHORTTEXT"})
_FLOATING_LENGTH = 34  # the catalogue's length of DECIMAL without a scale
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"  # with U+FEFF, as in `values.clean`
# What `str.strip` removes, without the control characters, which are blanks by then.
_BLANKS = "\t\n\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))  # of a text after _CONTROL
_LEAP = "[0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00"
_DATE = (
    "^((?!0000)[0-9]{4}((0[1-9]|1[0-2])(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])(29|30)|(0[13578]|1[02])31)|"
    f"({_LEAP})0229)$"
)
_TIME = "^([01][0-9]|2[0-3])[0-5][0-9][0-5][0-9]$"


@dataclass(frozen=True, slots=True)
class SqlRows:
    """The rows of one collection in SQL. `id`: SQL for the document id. `odd`: a condition for rows whose id SQL
    cannot write; "" if there are none."""

    renderer: Renderer
    id: str
    odd: str
    _layers: tuple[tuple[str, ...], ...]

    def select(self, statement: Statement, condition: str = "") -> str:
        """Return a SELECT of the key columns as K0, K1 ..., and SRC_KEY, VEC_TEXT, VEC_META, HASH (hexadecimal, the
        first half of CONTENT_HASH) and LARGE (1: SQL cannot finish the row)."""
        keys = [f'{quote(name)} AS "K{place}"' for place, name in enumerate(self.renderer.key)]
        kept = [*(f'"K{place}"' for place in range(len(keys))), '"SRC_KEY"']
        first, *others = self._layers
        sql = statement.of_all(", ".join((*keys, f'{self.id} AS "SRC_KEY"', *first)), condition)
        for layer in others:
            sql = f"SELECT {', '.join((*kept, *layer))} FROM ({sql})"
        return sql

    def first(self) -> str:
        """Return a SELECT of the HASH of one row."""
        return f'SELECT TOP 1 "HASH" FROM ({self.select(Statement(self.renderer.query))})'


def compile_rows(renderer: Renderer, table: Table) -> SqlRows:
    """Return the rows in SQL. Raises ValueError with the reason if SQL cannot render them exactly."""
    columns = {column.name: column for column in table.columns}
    if renderer.amounts:
        raise ValueError("an amount is shown with the decimals of its currency")
    template, names = renderer.template, renderer.metadata_names
    for name in names:
        if columns[name].type_name == "DECIMAL" and columns[name].scale:
            raise ValueError(f"column {name!r} in the metadata is a DECIMAL with a scale")

    def may_be_empty(column: Column) -> bool:
        """NULL, also in a view, whose outer joins the catalogue may not know, or a blank text."""
        return column.nullable or table.is_view or column.type_name in _TEXTS

    read = [columns[name] for name in dict.fromkeys((*template.columns, *names))]
    place = {column.name: number for number, column in enumerate(read)}
    cells = [each for column in read for each in _cells(column, place[column.name])]
    shown = [each for column in read for each in _shown(column, place[column.name])]
    members = sorted((name, _json(columns[column], place[column])) for column, name in names.items())
    meta = "||','||".join(f"""'"{name}":'||{value}""" for name, value in members)
    text = _text(template, [name for name in template.columns if may_be_empty(columns[name])], place)
    prefix, long = renderer.chunker.digest.hex().upper(), f'LENGTH("VEC_TEXT") > {renderer.chunker.max_tokens:d}'
    fitting = f"""CASE WHEN {long} THEN '' ELSE "VEC_TEXT" END"""
    small = f"""CASE WHEN LENGTH("VEC_META") > {LARGEST_META} THEN '' ELSE "VEC_META" END"""
    layers = (
        cells,
        shown,
        (f'{text} AS "VEC_TEXT"', f"""'{{'||{meta}||'}}' AS "VEC_META\"""" if meta else """'{}' AS "VEC_META\""""),
        (
            '"VEC_TEXT"',
            '"VEC_META"',
            f"LEFT(BINTOHEX(HASH_SHA256(X'{prefix}', STRTOBIN({fitting}, 'UTF-8'))), 16)||"
            f"""LEFT(BINTOHEX(HASH_SHA256(STRTOBIN({small}, 'UTF-8'))), 16) AS "HASH\"""",
            f'CASE WHEN {long} OR LENGTH("VEC_META") > {LARGEST_META} THEN 1 ELSE 0 END AS "LARGE"',
        ),
    )
    keys = [columns[name] for name in renderer.key]
    id_ = "'['||" + "||','||".join(map(_key, keys)) + "||']'"
    odd = [f"{quote(key.name)} LIKE_REGEXPR '[\\x00-\\x1f]'" for key in keys if key.type_name in _TEXTS]
    long_ids = [f"LENGTH({id_}) > {LONGEST_ID}"] if odd else []
    return SqlRows(renderer, id_, " OR ".join([*odd, *long_ids]), tuple(map(tuple, layers)))


def _cells(column: Column, place: int) -> list[str]:
    """Return a column's V<n>, its text or NULL, and for a text T<n>, without outer blanks and NULL. Raises
    ValueError."""
    name, kind = quote(column.name), column.type_name
    if kind in _TEXTS:
        cleaned = f"REPLACE(REPLACE_REGEXPR('{_CONTROL}' IN {name} WITH ' ' OCCURRENCE ALL), NCHAR(65279), ' ')"
        blanks = _literal(_BLANKS)
        trimmed = f"LTRIM(RTRIM(COALESCE({cleaned}, ''), {blanks}), {blanks})"
        return [f'{cleaned} AS "V{place}"', f'{trimmed} AS "T{place}"']
    if kind in _INTEGERS or (kind == "DECIMAL" and column.length != _FLOATING_LENGTH and not values.is_stamp(column)):
        return [f'TO_NVARCHAR({name}) AS "V{place}"']
    if kind == "DATE":
        return [f"""TO_NVARCHAR({name}, 'YYYY-MM-DD') AS "V{place}\""""]
    raise ValueError(f"column {column.name!r} is a {kind}")


def _shown(column: Column, place: int) -> list[str]:
    """Return a column's S<n>, as a template shows it, and V<n>, as `_cells`."""
    value, text = f'"V{place}"', f'"T{place}"'
    if column.type_name not in _TEXTS:
        sql = f"COALESCE({value}, '')"
        if column.type_name == "DECIMAL" and column.scale:
            sql = f"CASE WHEN {value} LIKE '%.%' THEN RTRIM(RTRIM({value}, '0'), '.') ELSE {sql} END"
    elif values.is_dats(column):
        iso = f"LEFT({text}, 4)||'-'||SUBSTRING({text}, 5, 2)||'-'||RIGHT({text}, 2)"
        sql = f"CASE WHEN {text} = '00000000' THEN '' WHEN {text} LIKE_REGEXPR '{_DATE}' THEN {iso} ELSE {text} END"
    elif values.is_tims(column):
        iso = f"LEFT({text}, 2)||':'||SUBSTRING({text}, 3, 2)||':'||RIGHT({text}, 2)"
        sql = f"CASE WHEN {text} = '000000' THEN '' WHEN {text} LIKE_REGEXPR '{_TIME}' THEN {iso} ELSE {text} END"
    elif (padded := values.padded_length(column)) is not None:
        full = f" AND LENGTH({text}) = {padded:d}" if padded else ""
        sql = f"CASE WHEN {text} LIKE_REGEXPR '^0[0-9]*$'{full} THEN LTRIM({text}, '0') ELSE {text} END"
    else:
        sql = text
    return [value, f'{sql} AS "S{place}"']


def _json(column: Column, place: int) -> str:
    """Return SQL for a metadata value as JSON."""
    value = f'"V{place}"'
    if column.type_name in _INTEGERS:
        return f"COALESCE({value}, 'null')"
    if column.type_name not in _TEXTS:
        return f"""COALESCE('"'||{value}||'"', 'null')"""
    if values.is_dats(column) or values.is_tims(column):
        return f"""CASE WHEN "S{place}" = '' THEN 'null' ELSE '"'||{_escaped(f'"S{place}"', _ESCAPES)}||'"' END"""
    return f"""COALESCE('"'||{_escaped(f"RTRIM({value}, ' ')", _ESCAPES)}||'"', 'null')"""


def _key(column: Column) -> str:
    """Return SQL for a key value without control characters as JSON. Raises ValueError."""
    if column.type_name in _INTEGERS:
        return f"COALESCE(TO_NVARCHAR({quote(column.name)}), 'null')"
    if column.type_name in _TEXTS:
        return f"""COALESCE('"'||{_escaped(quote(column.name), _ESCAPES[:2])}||'"', 'null')"""
    raise ValueError(f"the key column {column.name!r} is a {column.type_name}")


def _escaped(sql: str, escapes: Sequence[tuple[str, str]]) -> str:
    """Return SQL that escapes a text for JSON."""
    for char, escape in escapes:
        sql = f"REPLACE({sql}, '{char}', '{escape}')"
    return sql


def _text(template: Template, optional: list[str], place: Mapping[str, int]) -> str:
    """Return SQL for the template's text: a variant for each combination of empty `optional` columns. Raises
    ValueError."""
    if not all(char.isprintable() or char in "\n\t" for literal in template.literals for char in literal):
        raise ValueError("the template contains control characters")
    if len(optional) > MOST_EMPTY:
        raise ValueError(
            f"the template has {len(optional)} columns that may be empty, at most {MOST_EMPTY} are compiled"
        )

    def variant(empty: frozenset[str], left: list[str]) -> str:
        if left:
            name, rest = left[0], left[1:]
            without = variant(empty | {name}, rest)
            return f"""CASE WHEN "S{place[name]}" = '' THEN {without} ELSE {variant(empty, rest)} END"""
        filled = [name for name in template.slots if name not in empty]
        pattern = template.pattern(tuple(name not in empty for name in template.slots))
        literals = (pattern % (("\0",) * len(filled))).strip().split("\0") if filled else [""]
        parts = [
            part
            for name, literal in zip(filled, literals[1:], strict=True)
            for part in (f'"S{place[name]}"', literal and _literal(literal))
        ]
        return "||".join(filter(None, [literals[0] and _literal(literals[0]), *parts])) or "''"

    return variant(frozenset(), optional)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
