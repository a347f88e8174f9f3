"""Facts about SAP's own tables, for proposals: text tables, item tables, and texts that SQL cannot read. Source: SAP's
data dictionary in documentation and field lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """`texts`: text tables, best first. `items`: tables with several rows per row of this one, whose texts belong to
    it. `long_text`: the object of its long texts in STXH and STXL."""

    about: str
    texts: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    long_text: str = ""


KNOWN: Mapping[str, Known] = {
    "MARA": Known("materials", ("MAKT",), long_text="MATERIAL"),
    "MAKT": Known("names of materials"),
    "MARC": Known("materials in plants", ("MAKT",)),
    "MARD": Known("stocks of materials", ("MAKT",)),
    "T023": Known("material groups", ("T023T",)),
    "QMEL": Known("notifications", items=("QMFE", "QMSM"), long_text="QMEL"),
    "QMFE": Known("items of notifications", long_text="QMFE"),
    "QMSM": Known("tasks of notifications", long_text="QMSM"),
    "AUFK": Known("orders", long_text="AUFK"),
    "EQUI": Known("equipment", ("EQKT",), long_text="EQUI"),
    "EQKT": Known("names of equipment"),
    "IFLOT": Known("functional locations", ("IFLOTX",), long_text="IFLOT"),
    "IFLOTX": Known("names of functional locations"),
    "KNA1": Known("customers", long_text="KNA1"),
    "LFA1": Known("suppliers", long_text="LFA1"),
    "BUT000": Known("business partners"),
    "ADRC": Known("addresses"),
    "VBAK": Known("sales orders", items=("VBAP",), long_text="VBBK"),
    "VBAP": Known("items of sales orders", long_text="VBBP"),
    "EKKO": Known("purchase orders", items=("EKPO",), long_text="EKKO"),
    "EKPO": Known("items of purchase orders", long_text="EKPO"),
    "CSKS": Known("cost centres", ("CSKT",)),
    "CEPC": Known("profit centres", ("CEPCT",)),
    "SKA1": Known("accounts", ("SKAT",)),
    "T001W": Known("plants"),
}
_LONG_TEXTS = frozenset({"STXH", "STXL", "STXB"})
_BW_MASTER = re.compile(r"/(BIC|BI0)/P(.+)")
_CDS = re.compile(r"[IC]_[A-Za-z0-9_]+")
UNPACK = (
    "Unpack them with an ABAP program that calls READ_TEXT for each header in STXH and writes key, language and text "
    "into a table of your own (the text as a string, which is an NCLOB), and introspect that table"
)


def known(table: str) -> Known:
    return KNOWN.get(table, Known(""))


def unreadable(table: str) -> str | None:
    """Return why SQL cannot read texts from the table; None if it can."""
    if table not in _LONG_TEXTS:
        return None
    what = "holds the headers of" if table == "STXH" else "holds"
    return (
        f"{table} {what} SAPscript's long texts, which STXL stores as compressed ABAP clusters that SQL cannot read. "
        f"{UNPACK}"
    )


def long_text_note(table: str) -> str | None:
    """Return a warning for a table whose long texts SQL cannot read."""
    object_name = known(table).long_text
    if not object_name:
        return None
    return (
        f"Long texts written in SAP GUI are not in {table}: they stand in STXL (object {object_name}), compressed, "
        f"where SQL cannot read them. {UNPACK}."
    )


def text_table_names(table: str) -> Sequence[str]:
    """Return the names of a table's text table by SAP's conventions, likeliest first: known pairs; BW's master data
    (/BIC/PZMAT has /BIC/TZMAT); a CDS view I_Product with I_ProductText; MARAT or MART; CAP's _TEXTS."""
    names = [*known(table).texts]
    if found := _BW_MASTER.fullmatch(table):
        names.append(f"/{found[1]}/T{found[2]}")
    if _CDS.fullmatch(table):
        names.append(f"{table}{'TEXT' if table.isupper() else 'Text'}")
    return [*names, f"{table}T", f"{table[:-1]}T", f"{table}_TEXTS", f"{table}_texts", f"{table}.texts"]


def outside_names(table: str) -> Sequence[str]:
    """Return those of `text_table_names` whose key may differ from the table's."""
    return text_table_names(table)[:-5]
