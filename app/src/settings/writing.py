"""Write settings as text: owl-sap.toml and .env.example for `owl-sap init`, and single [[collections]] blocks. The TOML
reads back unchanged, whatever characters names and comments contain. Never writes a password."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import tomlkit

from app.src.settings.model import Settings

_WIDTH = 110
Value = str | Sequence[str] | Mapping[str, str]


def collection_block(
    block: Mapping[str, Value], comments: Mapping[str, str], notes: Iterable[str] = (), sql: str = ""
) -> str:
    """Return a [[collections]] block as TOML. `comments`: by setting. `notes` and the lines of `sql` follow
    as comments."""
    table = tomlkit.table()
    for name, value in block.items():
        for line in textwrap.wrap(_line(comments.get(name, "")), _WIDTH):
            table.add(tomlkit.comment(line))
        item: Any = value if isinstance(value, str) else list(value)
        if isinstance(value, Mapping):
            item = tomlkit.inline_table()
            item.update(value)
        table.add(name, item)
    wrapped = [line for note in notes for line in textwrap.wrap(_line(note), _WIDTH)]
    for line in (*wrapped, *map(_printable, sql.splitlines())):
        table.add(tomlkit.comment(line))
    blocks = tomlkit.aot()
    blocks.append(table)
    document = tomlkit.document()
    document.add("collections", blocks)
    return tomlkit.dumps(document)


def _printable(text: str) -> str:
    """Replace unprintable characters with blanks: a line break would end the comment."""
    return "".join(char if char.isprintable() else " " for char in text)


def _line(text: str) -> str:
    return " ".join(_printable(text).split())


_TABLES = tomllib.loads(files(__package__).joinpath("writing.toml").read_text(encoding="utf-8"))
ENVIRONMENT_FILE: str = _TABLES["texts"]["environment"]


def settings_file(
    given: Mapping[str, Mapping[str, Any]], why: Mapping[str, str], blocks: Sequence[str], made_by: str
) -> str:
    """Return the text of owl-sap.toml. It loads unchanged, and with any of its settings uncommented. `given`: values by
    section and key; `why`: by "section.key", a comment that replaces the description; `blocks`: collections as TOML."""
    parts = [_TABLES["texts"]["head"].format(made_by=_line(made_by))]
    for section, keys in _TABLES["shown"].items():
        model = type(getattr(Settings(), section))
        parts.append(f"[{section}]")
        infos = {info.alias or name: info for name, info in model.model_fields.items()}
        for key in keys.split():
            reason = _line(why.get(f"{section}.{key}") or infos[key].description or key)
            value, default = given.get(section, {}).get(key), infos[key].default
            shown = next(each for each in (value, default, _TABLES["examples"].get(key)) if each is not None)
            setting = f"{key} = {tomlkit.item(shown).as_string()}  # {reason}"
            parts.append(setting if value is not None else f"# {setting}")
        parts.append("")
    if blocks:
        parts.append("# Lines marked GUESS rest on a name or on the rows of today: look at them first.")
    return "\n".join([*parts, *blocks] if blocks else [*parts, _TABLES["texts"]["block"]])
