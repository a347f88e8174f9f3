"""Facts about SAP's own tables, from sap_tables.toml and from SAP's naming conventions."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_FACTS = tomllib.loads(files(__package__).joinpath("sap_tables.toml").read_text(encoding="utf-8"))
COLUMNS: Mapping[str, frozenset[str]] = {kind: frozenset(names.split()) for kind, names in _FACTS["columns"].items()}
UNITS: Mapping[str, str] = _FACTS["units"]
VALUES: Mapping[str, tuple[str, str, str]] = {name: tuple(place.split()) for name, place in _FACTS["values"].items()}
LANGUAGE_NAMES: Mapping[str, str] = {code: each.partition(" ")[2] for code, each in _FACTS["languages"].items()}
ISO: dict[str, str] = {  # by SAP's one-letter keys
    key: code for code, each in _FACTS["languages"].items() for key in each.partition(" ")[0]
}
TABLES: Mapping[str, Mapping[str, Any]] = _FACTS["tables"]
LONG_TEXTS = frozenset({"STXH", "STXL", "STXB"})
UNPACK = (
    "where SQL cannot read them. Unpack them with an ABAP program that calls READ_TEXT for each header in "
    "STXH and writes key, language and text into a table of your own (the text as a string, which is an NCLOB), and "
    "introspect that table"
)


def text_table_names(table: str) -> tuple[list[str], list[str]]:
    """Return two lists of names that a table's text tables have by SAP's conventions, likeliest first. Tables in the
    first list may have another key: known pairs, BW's master data (/BIC/PZMAT has /BIC/TZMAT), CDS views (I_Product
    has I_ProductText). Tables in the second list have the same key: MARAT or MART, CAP's _TEXTS."""
    outside = list(TABLES.get(table, {}).get("texts", ()))
    if found := re.fullmatch(r"/(BIC|BI0)/P(.+)", table):
        outside.append(f"/{found[1]}/T{found[2]}")
    if re.fullmatch(r"[IC]_[A-Za-z0-9_]+", table):
        outside.append(f"{table}{'TEXT' if table.isupper() else 'Text'}")
    return outside, [f"{table}T", f"{table[:-1]}T", f"{table}_TEXTS", f"{table}_texts", f"{table}.texts"]
