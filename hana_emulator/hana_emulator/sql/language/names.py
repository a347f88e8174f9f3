"""How HANA names become SQLite names. SQLite folds case and reserves words; HANA does neither once a name is quoted.

Lower-case letters, dots and the escape sign itself are escaped by '^', so that names differing only in case coexist and
"SCHEMA.TABLE" splits in one way only.
"""

from __future__ import annotations

import re

from hana_emulator.errors import HanaError

MAX_IDENTIFIER = 127
_ESCAPED = re.compile(r"[a-z^.]")
_ESCAPE = re.compile(r"\^(.)")


def encode(name: str) -> str:
    """One HANA identifier in its SQLite spelling. Raises HanaError 397 for a name that HANA would not take either."""
    if not name or "\0" in name or len(name) > MAX_IDENTIFIER:
        raise HanaError(
            397, f"invalid object name: {name[:MAX_IDENTIFIER]!r} (1 to {MAX_IDENTIFIER} characters, no NUL)"
        )
    return _ESCAPED.sub(lambda match: "^" + match.group().upper(), name)


def decode(encoded: str) -> str:
    return _ESCAPE.sub(lambda match: match.group(1).lower(), encoded)


def quoted(name: str) -> str:
    """A column name quoted for SQLite text."""
    return '"' + encode(name).replace('"', '""') + '"'


def quoted_table(schema: str, table: str) -> str:
    """A table name quoted for SQLite text; a leading '~' keeps clear of SQLite's reserved 'sqlite_' names."""
    return quoted_key(table_key(schema, table))


def quoted_key(key: str) -> str:
    """`table_key` quoted for SQLite text."""
    return '"' + key.replace('"', '""') + '"'


def quoted_index(schema: str, index: str) -> str:
    """In SQLite, indexes share one name space with tables; in HANA they do not."""
    return '"#' + table_key(schema, index).replace('"', '""') + '"'


def table_key(schema: str, table: str) -> str:
    return f"~{encode(schema)}.{encode(table)}"


def literal(text: str) -> str:
    """A string for SQLite, whose statements end at a NUL."""
    if "\0" in text:
        return f"CAST(x'{text.encode().hex()}' AS TEXT)"
    return "'" + text.replace("'", "''") + "'"


def hana_identifier(name: str) -> str:
    """A name as HANA prints it in messages: quoted only when it has to be."""
    return name if re.fullmatch(r"[A-Z_][A-Z0-9_$#]*", name) else '"' + name.replace('"', '""') + '"'
