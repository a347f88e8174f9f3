"""Guess the role of a column from type, length, name and comment: text, code, date, client ... Knows SAP's own names.
Use these guesses only for proposals, which users review.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from connector.discovery.sap_tables import COLUMNS, UNITS
from connector.document.values import ALPHA_NAMES, CHARACTER_TYPES, is_amount, is_currency, is_dats, is_tims
from connector.hana.catalog import LOB_TYPES
from connector.model import Column


class Role(Enum):
    """Roles of columns. Text roles are in the order in which a template uses them."""

    TITLE = "title"
    TEXT = "text"
    LONG_TEXT = "long text"
    CLIENT = "client"
    LANGUAGE = "language"
    CODE = "code"
    DATE = "date"
    NUMBER = "number"  # a number or name that identifies something: a key, not a text
    PERSON = "person"  # the person responsible: not a text, but personal data that need a reason to be stored
    OTHER = "other"


TEXTS = (Role.TITLE, Role.TEXT, Role.LONG_TEXT)


@dataclass(frozen=True, slots=True)
class Guess:
    """A role and its reason. `known`: certain, by SAP's own name."""

    role: Role
    why: str
    known: bool = False


def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


_REPEATED = _words(r"match ?code|upper.?case|großbuchstaben|search term|sortfeld|sort field")
_PERSON = _words(r"\b(person|user|employee)\b|(?-i:[a-z]User$)|benutzer|sachbearbeiter|(created|changed|modified)_?by")
_CONTACT = _words(
    r"TEL[FENX]|FAX|PHONE|MOBIL|MAIL|\bURL|_URL|HTTP|IBAN|BANK|SWIFT|STCD|TAX|GUID|UUID|HASH|PATH|FILE|BARCODE|EAN|PSTL|"
    r"postal|postleit|password|token"
)
_UNIT = _words(r"^(MEINS|GEWEI|VOLEH|VRKME|WAERS|BSTME|WAERK)$|\bunit\b|(?-i:[a-z]Unit$)|currency|einheit|währung")
_NUMBER_NAME = _words(r"(^|_)(ID|KEY|NO|NUM)$|(NR|NUMBER|NUMMER)$|(?-i:[a-z](Id|Key|No)$)")
_NUMBER_COMMENT = _words(r"\b(number|no\.|id|key)\b|nummer\b|schlüssel\b")
_CODE_NAME = _words(
    r"(^|_)(CODE|CD|TYPE|TYP|STATUS|GROUP|CATEGORY|CAT|KIND|FLAG|PLANT)$|"
    r"(?-i:[a-z](Code|Type|Status|Group|Category|Class|Priority|Plant|Division)$)"
)
_CODE_COMMENT = _words(
    r"\b(code|type|group|status|priority|plant|flag|indicator|category|class|country|division|level)\b|"
    r"\b(art|gruppe|werk|kennzeichen|priorität|klasse|sparte|land)\b"
)
_TEXT_NAME = _words(
    r"TE?XT|TITLE|SUBJECT|HEADLINE|NAME|DESC|BEZEICH|BESCHREIB|COMMENT|REMARK|NOTE|SUMMARY|BODY|CONTENT|MESSAGE|"
    r"REASON|PROBLEM|SOLUTION|DETAIL"
)
_TEXT_COMMENT = _words(
    r"\b(text|description|name|title|note|remark|comment|summary|message)\b|bezeichnung|beschreibung|text\b|\bbemerkung"
)
_CHANGED = _words(
    r"^(AEDAT|LAEDA|AEDTM|UDATE|UPD_?TMSTMP|UPDDAT)$|(?<!EX)(?<!INTER)CHANG|MODIF|UPDAT|LAST_?(CHG|UPD)|"
    r"last change|letzten? änderung|geändert"
)
_MOMENTS = frozenset({"DATE", "TIMESTAMP", "SECONDDATE"})
_NUMBERS = frozenset({"DECIMAL", "SMALLDECIMAL", "DOUBLE", "REAL"})
_AMOUNT = _words(r"amount|price|value|cost|betrag|preis|wert|kosten|AMT$|PRICE$")


@lru_cache(maxsize=4096)
def guess(column: Column) -> Guess:
    """Return the role of any column; OTHER if none fits. An unknown character column is judged by the end of its name,
    then its comment, then its length."""
    kind, length = column.type_name, column.length
    name, both = column.name.upper().rpartition("/")[2], f"{column.name} {column.comment}"
    long, shape = kind in LOB_TYPES, f"{kind}({length})"
    says_text = _TEXT_NAME.search(column.name) or _TEXT_COMMENT.search(column.comment)
    rules = (  # the first match counts
        (kind in _MOMENTS, Guess(Role.DATE, kind)),
        (kind == "BOOLEAN", Guess(Role.CODE, kind)),
        (kind not in CHARACTER_TYPES, Guess(Role.OTHER, kind)),
        (name in COLUMNS["client"] and length <= 3, Guess(Role.CLIENT, "SAP's client", known=True)),
        (name in COLUMNS["language"] and length <= 14, Guess(Role.LANGUAGE, "language key", known=True)),
        (
            name in ALPHA_NAMES or (name in COLUMNS["number"] and length <= 40),
            Guess(Role.NUMBER, "SAP's name for a number", known=True),
        ),
        (name in COLUMNS["technical"], Guess(Role.OTHER, "BW's own bookkeeping", known=True)),
        (is_dats(column), Guess(Role.DATE, "a date (DATS)")),
        (is_tims(column), Guess(Role.OTHER, "a time (TIMS)")),
        # Shorter columns of these names are flags: LTEXT(1) says whether there is a long text.
        (name in COLUMNS["title"] and length >= 10, Guess(Role.TITLE, "SAP's name for a short text", known=True)),
        (name in COLUMNS["text"] and long, Guess(Role.LONG_TEXT, "SAP's name for a text", known=True)),
        (name in COLUMNS["text"] and length >= 10, Guess(Role.TEXT, "SAP's name for a text", known=True)),
        (long, Guess(Role.LONG_TEXT, f"long text ({kind})")),
        (name in COLUMNS["person"] or _PERSON.search(both), Guess(Role.PERSON, "names a person")),
        (
            _CONTACT.search(both) or _REPEATED.search(both),
            Guess(Role.OTHER, "contact data, a technical value, or a repeated text"),
        ),
        (_names_unit(column), Guess(Role.OTHER, "a unit or currency")),
        (_NUMBER_NAME.search(column.name), Guess(Role.NUMBER, "named like a number")),
        (_CODE_NAME.search(column.name), Guess(Role.CODE, "named like a code")),
        (says_text and 15 <= length <= 100, Guess(Role.TITLE, f"{shape}, name or comment says text")),
        (says_text and length > 100, Guess(Role.TEXT, f"{shape}, name or comment says text")),
        (length > 4 and _NUMBER_COMMENT.search(column.comment), Guess(Role.NUMBER, "its comment says number")),
        (length <= 20 and _CODE_COMMENT.search(column.comment), Guess(Role.CODE, "its comment says code")),
        (length >= 60, Guess(Role.TEXT, f"{shape}: long enough for words")),
        (length <= 10, Guess(Role.CODE, shape)),
    )
    return next((found for fits, found in rules if fits), Guess(Role.OTHER, shape))


def _names_unit(column: Column) -> bool:
    return bool(_UNIT.search(column.name) or _UNIT.search(column.comment))


def measures(columns: Sequence[Column]) -> list[tuple[Column, Column]]:
    """Return amounts with their currency and quantities with their unit, as SAP pairs them: by known names, by NAMEUnit
    and NAMECurrency, or because the unit directly follows."""
    by_name = {column.name: column for column in columns}
    units = [each for each in columns if each.type_name in CHARACTER_TYPES and each.length <= 5 and _names_unit(each)]
    found = []
    for column, behind in zip(columns, [*columns[1:], None], strict=True):
        if column.type_name not in _NUMBERS:
            continue
        names = (UNITS.get(column.name, ""), f"{column.name}Unit", f"{column.name}Currency")
        unit = next((by_name[name] for name in names if name in by_name), behind if behind in units else None)
        if unit is None and is_amount(column) and _AMOUNT.search(f"{column.name} {column.comment}"):
            currencies = [each for each in units if is_currency(each)]
            unit = currencies[0] if len(currencies) == 1 else None
        if unit is not None:
            found.append((column, unit))
    return found


def may_hold_change_time(column: Column) -> bool:
    """Return whether this column may hold the time of the last change. DECIMAL(15) and (21,7) are ABAP's UTC time
    stamps."""
    stamp = column.type_name == "DECIMAL" and (column.length, column.scale) in ((15, 0), (21, 7))
    written = column.type_name in CHARACTER_TYPES and (column.length == 14 or is_dats(column))
    named = _CHANGED.search(column.name) or _CHANGED.search(column.comment)
    return (column.type_name in _MOMENTS or stamp or written) and bool(named)
