"""A `[[collections]]` block as text for owl-sap.toml, with a comment above each line that has one. Total: whatever
names and comments hold, what comes out is TOML that reads back as what went in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit.items import Table

_WIDTH = 110
Value = str | Sequence[str] | Mapping[str, str]


def collection_block(
    block: Mapping[str, Value], comments: Mapping[str, str], notes: Iterable[str] = (), sql: str = ""
) -> str:
    """`comments` by setting, wrapped; `notes` follow the block, then `sql`, line by line, as comments too."""
    table = tomlkit.table()
    for name, value in block.items():
        _comment(table, comments.get(name, ""))
        table.add(name, _item(value))
    for note in notes:
        _comment(table, note)
    for line in sql.splitlines():
        table.add(tomlkit.comment(_printable(line)))
    blocks = tomlkit.aot()
    blocks.append(table)
    document = tomlkit.document()
    document.add("collections", blocks)
    return tomlkit.dumps(document)


def _item(value: Value) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        return list(value)
    inline = tomlkit.inline_table()
    inline.update(value)
    return inline


def _comment(table: Table, text: str) -> None:
    for line in textwrap.wrap(" ".join(_printable(text).split()), _WIDTH):
        table.add(tomlkit.comment(line))


def _printable(text: str) -> str:
    """On one line: a line break in a name must not end the comment."""
    return "".join(char if char.isprintable() else " " for char in text)
