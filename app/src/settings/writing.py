"""Write settings as text: owl-sap.toml and .env.example for `owl-sap init`, and [[collections]] blocks, also at the end
of a file. The TOML reads back unchanged, whatever characters names and comments contain. Never writes a password."""

from __future__ import annotations

import errno
import fcntl
import os
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomlkit

from app.src.settings.model import Settings
from app.src.settings.sources import Loaded, SettingsError, load

_WIDTH = 110
Value = str | bool | Sequence[str] | Mapping[str, Any]


def collection_block(
    block: Mapping[str, Value], comments: Mapping[str, str], notes: Iterable[str] = (), sql: str = ""
) -> str:
    """Return a [[collections]] block as TOML. `comments`: by setting. `notes` and the lines of `sql` follow
    as comments."""
    table = tomlkit.table()
    for name, value in block.items():
        for line in textwrap.wrap(_line(comments.get(name, "")), _WIDTH):
            table.add(tomlkit.comment(line))
        item: Any = value if isinstance(value, str | bool) else list(value)
        if isinstance(value, Mapping):
            item = tomlkit.inline_table()
            item.update({name: each for name, each in value.items() if each is not None})
        table.add(name, item)
    wrapped = [line for note in notes for line in textwrap.wrap(_line(note), _WIDTH)]
    for line in (*wrapped, *map(_printable, sql.splitlines())):
        table.add(tomlkit.comment(line))
    blocks = tomlkit.aot()
    blocks.append(table)
    document = tomlkit.document()
    document.add("collections", blocks)
    return tomlkit.dumps(document)


def append_block(file: Path, block: str, check: Callable[[Loaded], None]) -> None:
    """Append a [[collections]] block to a settings file in one write. `check` gets the file's settings, and may raise.
    Raises SettingsError for a file that is invalid or cannot be written, or whose collections are set elsewhere."""
    try:
        # Appending keeps links, mode and owner, and text that an editor adds at the same time.
        with open(file, "rb+", 0, opener=lambda path, flags: os.open(path, flags | os.O_APPEND)) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)  # other processes append one after another
            before, loaded = opened.read(), load(file)
            origin = loaded.origins.get(("collections",), str(file))
            if origin != str(file):
                raise SettingsError(f"the collections come from {origin}, not from {file.name}")
            check(loaded)
            end = b"\r\n" if before.endswith(b"\r\n") else b"\n"
            gap = end if before.endswith(b"\n") else end * 2
            added = gap + block.encode().replace(b"\n", end)
            try:
                tomllib.loads((before + added).decode("utf-8-sig"))
            except tomllib.TOMLDecodeError:
                raise SettingsError(f"{file.name} has `collections` as a list: a block cannot be appended") from None
            if opened.write(added) < len(added):
                opened.truncate(len(before))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(opened)
            if not os.path.samestat(file.stat(), os.fstat(opened.fileno())):  # by an editor
                raise SettingsError(f"{file.name} was replaced at the same time")
    except OSError as error:
        raise SettingsError(f"{file.name} cannot be written ({error.strerror})") from None


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
