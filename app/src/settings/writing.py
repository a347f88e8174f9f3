"""Write settings as text: owl-sap.toml and .env.example as `owl-sap init` writes them, and one [[collections]] block.
Whatever names and comments hold, the text is TOML that reads back unchanged. Never a password."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tomlkit
from pydantic import BaseModel
from tomlkit.items import Table

from app.src.settings.collections import CollectionSettings
from app.src.settings.model import (
    ApiSettings,
    EmbeddingSettings,
    HanaSettings,
    StoreSettings,
    SyncSettings,
)

_WIDTH = 110
Value = str | Sequence[str] | Mapping[str, str]


def collection_block(
    block: Mapping[str, Value], comments: Mapping[str, str], notes: Iterable[str] = (), sql: str = ""
) -> str:
    """Return a [[collections]] block as TOML. `comments` by setting; `notes` and the lines of `sql` follow as
    comments."""
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


# By section: its model, what it is, and the settings that a start may need.
_SECTIONS: Mapping[str, tuple[type[BaseModel], str, tuple[str, ...]]] = {
    "hana": (
        HanaSettings,
        "where the rows are",
        ("host", "port", "user", "userkey", "schema", "encrypt", "validate_certificate", "trust_store",
         "host_name_in_certificate", "connect_timeout", "communication_timeout", "pool_size"),
    ),
    "store": (StoreSettings, "where the vectors go", ("kind", "path", "schema", "scan")),
    "embedding": (EmbeddingSettings, "what turns texts into vectors", ("model", "precision", "device", "threads")),
    "sync": (SyncSettings, "how rows are read and compared", ("page_rows", "readers", "max_deletes", "max_attempts")),
    "api": (ApiSettings, "the REST service (owl-sap serve)", ("host", "port", "job_workers", "run_schedules")),
}  # fmt: skip
# Of settings without a default; others are shown with theirs.
_EXAMPLES: Mapping[str, Any] = {
    "hana.host": "db.example.com",
    "hana.user": "OWL_TECHNICAL",
    "hana.userkey": "OWL",
    "hana.schema": "SAPABAP1",
    "hana.trust_store": "/etc/ssl/hana.pem",
    "hana.host_name_in_certificate": "db.example.com",
    "store.path": "vectors",
    "store.schema": "VECTORS",
    "embedding.threads": 4,
}
_OF_BLOCK = (
    ("schedule", '{ every = "15m" }'),
    ("chunk", "{ max_tokens = 254, overlap = 32 }"),
    ("row_rights", '{ MTART = "mtart" }'),
    ("model", '"all-MiniLM-L6-v2"'),
    ("switch", '"auto"'),
)
_BLOCK = """\
# A collection: rows of one table or view, as texts to search. `owl-sap tables` lists what there is;
# `owl-sap introspect SCHEMA.TABLE` proposes such a block, with a reason for each choice.
# [[collections]]
# name = "materials"  # {name}
# source = "SAPABAP1.MAKT"  # {source}
# key = ["MANDT", "MATNR", "SPRAS"]  # {key}
# where = "MANDT = '100' AND SPRAS = 'E'"  # {where}
# template = "{{MAKTX}}"  # {template}
# metadata = ["SPRAS"]  # {metadata}
# changes = {{ method = "full" }}  # {changes}
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


@dataclass(frozen=True, slots=True)
class Start:
    """The content of a starting file. `given`: values by section and key. `why`: by "section.key", a comment instead of
    the description. `blocks`: collections as TOML. `made_by`: the first line."""

    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    blocks: Sequence[str] = ()
    made_by: str = "Made by owl-sap init."


def settings_file(start: Start) -> str:
    """Return owl-sap.toml. It loads unchanged, and with any of its settings uncommented."""
    parts = [
        f"# {_line(start.made_by)} Change it as you need.",
        "# Every setting is a variable too, OWL_SAP_<SECTION>__<KEY>: `owl-sap config show --origin` shows their",
        "# sources, `owl-sap config schema` lists all. The password does not belong here, but into",
        "# HANA_PASSWORD, or into a file that HANA_PASSWORD_FILE names (see .env.example).",
        "",
    ]
    for name in _SECTIONS:
        parts += [*_section(name, start), ""]
    if start.blocks:
        parts.append("# Lines marked GUESS rest on a name or on the rows of today: look at them first.")
        parts += [block.rstrip("\n") + "\n" for block in start.blocks]
        parts += ["# More that a block may have:", *_more()]
    else:
        described = {name: _description(CollectionSettings, name) for name in CollectionSettings.model_fields}
        parts += [_BLOCK.format(**described), *_more()]
    return "\n".join(parts) + "\n"


def environment_file(start: Start) -> str:
    """.env.example."""
    hana = start.given.get("hana", {})
    example = {name: hana.get(name) or _EXAMPLES.get(f"hana.{name}", 443) for name in ("host", "port", "user")}
    shown = {name: _line(str(value)) for name, value in example.items()}
    return _ENVIRONMENT.format(**shown, kind=start.given.get("store", {}).get("kind", "hana"))


def _section(name: str, start: Start) -> Iterator[str]:
    model, about, keys = _SECTIONS[name]
    given = start.given.get(name, {})
    yield f"[{name}]  # {about}"
    for key in keys:
        path = f"{name}.{key}"
        why = _line(start.why.get(path) or _description(model, key))
        if given.get(key) is not None:
            yield f"{key} = {_toml_value(given[key])}  # {why}"
        else:
            yield f"# {key} = {_toml_value(_EXAMPLES.get(path, _default(model, key)))}  # {why}"


def _more() -> list[str]:
    return [f"# {key} = {value}  # {_line(_description(CollectionSettings, key))}" for key, value in _OF_BLOCK]


def _description(model: type[BaseModel], key: str) -> str:
    info = next(info for name, info in model.model_fields.items() if key in (name, info.alias))
    return info.description or key


def _default(model: type[BaseModel], key: str) -> Any:
    info = next(info for name, info in model.model_fields.items() if key in (name, info.alias))
    return info.default


def _toml_value(value: Any) -> str:
    return str(tomlkit.item(value).as_string())


def _line(text: str) -> str:
    """On one line."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
