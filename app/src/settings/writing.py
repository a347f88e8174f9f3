"""Write settings as text: owl-sap.toml and .env.example for `owl-sap init`, and single [[collections]] blocks. The TOML
reads back unchanged with any names and comments. Never writes a password."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tomlkit

from app.src.settings.model import Settings

_WIDTH = 110
Value = str | Sequence[str] | Mapping[str, str]


def collection_block(
    block: Mapping[str, Value], comments: Mapping[str, str], notes: Iterable[str] = (), sql: str = ""
) -> str:
    """Return a [[collections]] block as TOML. `comments` by setting; `notes` and the lines of `sql` follow as
    comments."""
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
    """Replace what would end the comment."""
    return "".join(char if char.isprintable() else " " for char in text)


def _line(text: str) -> str:
    return " ".join(_printable(text).split())


# Settings to show by section, and examples for those without a default.
_SHOWN = {
    "hana": "host port user userkey schema encrypt validate_certificate trust_store host_name_in_certificate",
    "store": "kind path schema",
    "embedding": "model precision device threads",
    "sync": "page_rows readers max_deletes",
    "api": "host port job_workers run_schedules",
}
_EXAMPLES: Mapping[str, str | int] = {
    "host": "db.example.com",
    "user": "OWL_TECHNICAL",
    "userkey": "OWL",
    "schema": "VECTORS",
    "trust_store": "/etc/ssl/hana.pem",
    "host_name_in_certificate": "db.example.com",
    "path": "vectors",
    "threads": 4,
}
_HEAD = """\
# {made_by} Change it as you need.
# Every setting is a variable too, OWL_SAP_<SECTION>__<KEY>: `owl-sap config show --origin` shows their
# sources, `owl-sap config schema` lists all. The password does not belong here, but into
# HANA_PASSWORD, or into a file that HANA_PASSWORD_FILE names (see .env.example).
"""
_BLOCK = """\
# A collection: rows of one table or view, as texts to search. `owl-sap tables` lists what there is;
# `owl-sap introspect SCHEMA.TABLE` proposes such a block, with a reason for each choice.
# [[collections]]
# name = "materials"
# source = "SAPABAP1.MAKT"
# key = ["MANDT", "MATNR", "SPRAS"]  # default: the primary key
# where = "MANDT = '100' AND SPRAS = 'E'"  # your own SQL condition, sent unchanged
# template = "{MAKTX}"
# metadata = ["SPRAS", "MTART"]  # columns stored beside the vector, for filters
# changes = { method = "full" }  # how changes are found: full, watermark, log or rowid
# schedule = { every = "15m" }  # when `serve` or `worker` syncs by itself
"""
ENVIRONMENT_FILE = """\
# Copy to .env (chmod 600, never commit it) and fill in. Read from the working directory; the real environment wins.
# HANA_PASSWORD_FILE=/run/secrets/hana_password reads it from a file instead. Empty means not set.
# Every other setting is a variable too, OWL_SAP_<SECTION>__<KEY>, which overrides owl-sap.toml.
HANA_PASSWORD=
"""


def settings_file(
    given: Mapping[str, Mapping[str, Any]], why: Mapping[str, str], blocks: Sequence[str], made_by: str
) -> str:
    """Return owl-sap.toml. It loads unchanged, and with any of its settings uncommented. `given`: values by section and
    key; `why`: by "section.key", a comment that replaces the description; `blocks`: collections as TOML."""
    parts = [_HEAD.format(made_by=_line(made_by))]
    for section, keys in _SHOWN.items():
        model = type(getattr(Settings(), section))
        parts.append(f"[{section}]")
        infos = {info.alias or name: info for name, info in model.model_fields.items()}
        for key in keys.split():
            reason = _line(why.get(f"{section}.{key}") or infos[key].description or key)
            value, default = given.get(section, {}).get(key), infos[key].default
            shown = next(each for each in (value, default, _EXAMPLES.get(key)) if each is not None)
            setting = f"{key} = {tomlkit.item(shown).as_string()}  # {reason}"
            parts.append(setting if value is not None else f"# {setting}")
        parts.append("")
    if blocks:
        parts.append("# Lines marked GUESS rest on a name or on the rows of today: look at them first.")
    return "\n".join([*parts, *blocks] if blocks else [*parts, _BLOCK])
