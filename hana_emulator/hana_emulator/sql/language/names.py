"""Map HANA names to SQLite names. SQLite folds case and reserves words; HANA does neither for quoted names.

'^' escapes lower-case letters, dots and itself, so that names can differ only in case and "SCHEMA.TABLE" is
unambiguous.
"""

from __future__ import annotations

import re

from hana_emulator.errors import HanaError

MAX_IDENTIFIER = 127
_ESCAPED = re.compile(r"[a-z^.]")
_ESCAPE = re.compile(r"\^(.)")


def encode(name: str) -> str:
    """The SQLite form of a HANA identifier. Raises HanaError 397 for an invalid name."""
    if not name or "\0" in name or len(name) > MAX_IDENTIFIER:
        raise HanaError(
            397, f"invalid object name: {name[:MAX_IDENTIFIER]!r} (1 to {MAX_IDENTIFIER} characters, no NUL)"
        )
    return _ESCAPED.sub(lambda match: "^" + match.group().upper(), name)


def decode(encoded: str) -> str:
    return _ESCAPE.sub(lambda match: match.group(1).lower(), encoded)


def quoted(name: str) -> str:
    return '"' + encode(name).replace('"', '""') + '"'


def quoted_table(schema: str, table: str) -> str:
    """A quoted table name for SQLite; the leading '~' avoids SQLite's reserved prefix 'sqlite_'."""
    return quoted_key(table_key(schema, table))


def quoted_key(key: str) -> str:
    return '"' + key.replace('"', '""') + '"'


def quoted_index(schema: str, index: str) -> str:
    """A quoted index name: SQLite keeps indexes and tables in one name space, HANA does not."""
    return '"#' + table_key(schema, index).replace('"', '""') + '"'


def table_key(schema: str, table: str) -> str:
    return f"~{encode(schema)}.{encode(table)}"


def literal(text: str) -> str:
    """A string literal for SQLite; NUL, which would end the statement, is encoded."""
    if "\0" in text:
        return f"CAST(x'{text.encode().hex()}' AS TEXT)"
    return "'" + text.replace("'", "''") + "'"


def hana_identifier(name: str) -> str:
    """A name as in HANA's messages: quoted only if necessary."""
    return name if re.fullmatch(r"[A-Z_][A-Z0-9_$#]*", name) else '"' + name.replace('"', '""') + '"'
