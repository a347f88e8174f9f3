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


# Per section: its description, and the settings to show, with an example where there is no default.
_SECTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "hana": (
        "where the rows are",
        {
            "host": "db.example.com",
            "port": None,
            "user": "OWL_TECHNICAL",
            "userkey": "OWL",
            "schema": "SAPABAP1",
            "encrypt": None,
            "validate_certificate": None,
            "trust_store": "/etc/ssl/hana.pem",
            "host_name_in_certificate": "db.example.com",
        },
    ),
    "store": ("where the vectors go", {"kind": None, "path": "vectors", "schema": "VECTORS"}),
    "embedding": (
        "what turns texts into vectors",
        {"model": None, "precision": None, "device": None, "threads": 4},
    ),
    "sync": ("how rows are read and compared", {"page_rows": None, "readers": None, "max_deletes": None}),
    "api": (
        "the REST service (owl-sap serve)",
        {"host": None, "port": None, "job_workers": None, "run_schedules": None},
    ),
}
_BLOCK = """\
# A collection: rows of one table or view, as texts to search. `owl-sap tables` lists what there is;
# `owl-sap introspect SCHEMA.TABLE` proposes such a block, with a reason for each choice.
# [[collections]]
# name = "materials"
# source = "SAPABAP1.MAKT"
# key = ["MANDT", "MATNR", "SPRAS"]  # default: the primary key
# where = "MANDT = '100' AND SPRAS = 'E'"  # your own SQL condition, sent unchanged
# template = "{MAKTX}"
"""
_MORE = """\
# metadata = ["SPRAS", "MTART"]  # columns stored beside the vector, for filters
# changes = { method = "full" }  # how changes are found: full, watermark, log or rowid
# schedule = { every = "15m" }  # when `serve` or `worker` syncs by itself
# chunk = { max_tokens = 254, overlap = 32 }  # how long texts are split; default: as long as the model takes
# row_rights = { MTART = "mtart" }  # metadata column = claim of the caller: docs/row-rights.md
# model = "all-MiniLM-L6-v2"  # a model of its own
# switch = "auto"  # to a new model once it is built and verified; default: manual
"""
_ENVIRONMENT = """\
# Copy to .env (chmod 600, never commit it) and fill in. Read from the working directory; the real environment wins.
# NAME_FILE=/run/secrets/x reads any of these from a file instead. Empty means not set, and owl-sap.toml decides.
HANA_PASSWORD=
#HANA_PASSWORD_FILE=/run/secrets/hana_password

# Set here, these override owl-sap.toml.
#HANA_HOST={host}
#HANA_PORT={port}
#HANA_USER={user}
#HANA_SCHEMA=
#HANA_SSL_TRUST_STORE=/run/secrets/hana_ca.pem

# Every other setting: OWL_SAP_<SECTION>__<KEY>
#OWL_SAP_STORE__KIND={kind}
#OWL_SAP_EMBEDDING__PRECISION=auto
"""


def settings_file(
    given: Mapping[str, Mapping[str, Any]], why: Mapping[str, str], blocks: Sequence[str], made_by: str
) -> str:
    """Return owl-sap.toml. It loads unchanged, and with any of its settings uncommented. `given`: values by section and
    key; `why`: by "section.key", a comment that replaces the description; `blocks`: collections as TOML."""
    parts = [
        f"# {_line(made_by)} Change it as you need.",
        "# Every setting is a variable too, OWL_SAP_<SECTION>__<KEY>: `owl-sap config show --origin` shows their",
        "# sources, `owl-sap config schema` lists all. The password does not belong here, but into",
        "# HANA_PASSWORD, or into a file that HANA_PASSWORD_FILE names (see .env.example).",
        "",
    ]
    for section, (about, examples) in _SECTIONS.items():
        parts.append(f"[{section}]  # {about}")
        infos = {info.alias or name: info for name, info in type(getattr(Settings(), section)).model_fields.items()}
        for key, example in examples.items():
            reason = _line(why.get(f"{section}.{key}") or infos[key].description or key)
            value = given.get(section, {}).get(key)
            shown = value if value is not None else infos[key].default if example is None else example
            setting = f"{key} = {tomlkit.item(shown).as_string()}  # {reason}"
            parts.append(setting if value is not None else f"# {setting}")
        parts.append("")
    if blocks:
        parts.append("# Lines marked GUESS rest on a name or on the rows of today: look at them first.")
        parts += [block.rstrip("\n") + "\n" for block in blocks]
        parts.append("# More that a block may have:")
    return "\n".join(parts) + "\n" + ("" if blocks else _BLOCK) + _MORE


def environment_file(given: Mapping[str, Mapping[str, Any]]) -> str:
    """Return .env.example; `given` as in `settings_file`."""
    hana, examples = given["hana"], _SECTIONS["hana"][1]
    shown = {name: _line(str(hana.get(name) or examples[name] or 443)) for name in ("host", "port", "user")}
    return _ENVIRONMENT.format(**shown, kind=given["store"]["kind"])
