"""Guess the role of a column from type, length, name and comment: text, code, date, client ... Knows SAP's own names.
Use these guesses only for proposals, which users review.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

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
    PERSON = "person"  # the person responsible: not a text, and personal data that need a reason to be stored
    OTHER = "other"


TEXTS = (Role.TITLE, Role.TEXT, Role.LONG_TEXT)


@dataclass(frozen=True, slots=True)
class Guess:
    """A role and its reason. `known`: certain, by SAP's own name."""

    role: Role
    why: str
    known: bool = False


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


_CLIENTS = _names("MANDT CLIENT MANDANT RCLNT")
_LANGUAGES = _names("SPRAS LANGU SPRSL DDLANGUAGE LANGUAGE LANG LOCALE LANGUAGE_CODE")
_LONGEST_LOCALE = 14
_LONGEST_NUMBER = 40
_TITLES = _names(
    "MAKTX QMTXT KTEXT KTXT TXTSH TXTMD TXTLG NAME1 NAME2 NAME3 NAME_ORG1 NAME_ORG2 NAME_TEXT ARKTX TXZ01 BEZEI BEZEK "
    "VTEXT BUTXT WGBEZ TXT20 TXT30 TXT40 TXT50 MCTXT EQKTX PLTXT FETXT URTXT MATXT STEXT DDTEXT TITLE SUBJECT "
    "NAME_LAST NAME_FIRST NAME_GRP1 NAME_GRP2 NAME4"
)
_PLAIN_TEXTS = _names(
    "LTEXT LTXT WGBEZ60 STRAS ORT01 ORT02 SGTXT BKTXT TXT60 DESCRIPTION DESCR CITY1 CITY2 STREET STR_SUPPL1 STR_SUPPL2"
)
_CDS_NUMBERS = _names(
    "PRODUCT MATERIAL CUSTOMER SUPPLIER BUSINESSPARTNER SALESORDER SALESORDERITEM PURCHASEORDER PURCHASEORDERITEM "
    "EQUIPMENT FUNCTIONALLOCATION MAINTENANCENOTIFICATION MAINTENANCEORDER MAINTENANCENOTIFICATIONITEM NOTIFICATION "
    "BILLINGDOCUMENT DELIVERYDOCUMENT COSTCENTER PROFITCENTER GLACCOUNT ADDRESSID PARTNER PARTNER_GUID ADDRNUMBER"
)
"""Keys of SAP's CDS views (I_Product ...), business partners and addresses, whose names follow no rule."""
_TECHNICAL = _names("OBJVERS CHANGED RECORDMODE REQTSN DATAPAKID RECORD REQUID SID")
"""Technical columns of BW tables."""
_REPEATED = _words(r"match ?code|upper.?case|großbuchstaben|search term|sortfeld|sort field")
_PERSONS = _names("ERNAM AENAM UNAME USNAM BNAME QMNAM USNAM PERNR CREATED_BY CHANGED_BY CREATEDBY MODIFIEDBY")
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
_LONGEST_TITLE = 100
_SHORTEST_TEXT = 15
_SHORTEST_KNOWN = 10
"""The shortest column that SAP's name marks as a text; shorter ones are flags."""
_SURELY_TEXT = 60
_LONGEST_CODE = 10
_LONGEST_TINY_CODE = 4
_CUKY_LENGTH = 5
_CHANGED = _words(
    r"^(AEDAT|LAEDA|AEDTM|UDATE|UPD_?TMSTMP|UPDDAT)$|(?<!EX)(?<!INTER)CHANG|MODIF|UPDAT|LAST_?(CHG|UPD)|"
    r"last change|letzten? änderung|geändert"
)
_STAMPS = ((15, 0), (21, 7))
"""Precision and scale of ABAP's UTC time stamps."""
_MOMENTS = frozenset({"DATE", "TIMESTAMP", "SECONDDATE"})


def guess(column: Column) -> Guess:
    """Return the role of any column; OTHER if none fits."""
    if column.type_name in _MOMENTS:
        return Guess(Role.DATE, column.type_name)
    if column.type_name == "BOOLEAN":
        return Guess(Role.CODE, "BOOLEAN")
    if column.type_name not in CHARACTER_TYPES:
        return Guess(Role.OTHER, column.type_name)
    return _special(column) or _textual(column)


def _special(column: Column) -> Guess | None:
    name, both = column.name.upper().rpartition("/")[2], f"{column.name} {column.comment}"
    if (found := _by_name(name, column)) is not None:
        return found
    long = column.type_name in LOB_TYPES
    if not long and is_dats(column):
        return Guess(Role.DATE, "a date (DATS)")
    if not long and is_tims(column):
        return Guess(Role.OTHER, "a time (TIMS)")
    if name in _TITLES and column.length >= _SHORTEST_KNOWN:
        return Guess(Role.TITLE, "SAP's name for a short text", known=True)
    if name in _PLAIN_TEXTS and (long or column.length >= _SHORTEST_KNOWN):  # LTEXT(1) is a flag for a long text
        return Guess(Role.LONG_TEXT if long else Role.TEXT, "SAP's name for a text", known=True)
    if long:
        return Guess(Role.LONG_TEXT, f"long text ({column.type_name})")
    if name in _PERSONS or _PERSON.search(both):
        return Guess(Role.PERSON, "names a person")
    if _CONTACT.search(both) or _REPEATED.search(both):
        return Guess(Role.OTHER, "an address for machines, or a repeated text")
    return None


def _by_name(name: str, column: Column) -> Guess | None:
    """Return the role by names that mean the same in every SAP system."""
    if name in _CLIENTS and column.length <= 3:
        return Guess(Role.CLIENT, "SAP's client", known=True)
    if name in _LANGUAGES and column.length <= _LONGEST_LOCALE:
        return Guess(Role.LANGUAGE, "language key", known=True)
    if name in ALPHA_NAMES or (name in _CDS_NUMBERS and column.length <= _LONGEST_NUMBER):
        return Guess(Role.NUMBER, "SAP's name for a number", known=True)
    if name in _TECHNICAL:
        return Guess(Role.OTHER, "BW's own bookkeeping", known=True)
    return None


def _textual(column: Column) -> Guess:
    """Return the role of an unknown character column, by the name's end, then the comment, then the length."""
    shape = f"{column.type_name}({column.length})"
    if _UNIT.search(column.name) or _UNIT.search(column.comment):
        return Guess(Role.OTHER, "a unit or currency")
    if _NUMBER_NAME.search(column.name):
        return Guess(Role.NUMBER, "named as a number")
    if _CODE_NAME.search(column.name):
        return Guess(Role.CODE, "named as a code")
    if column.length >= _SHORTEST_TEXT and (_TEXT_NAME.search(column.name) or _TEXT_COMMENT.search(column.comment)):
        role = Role.TITLE if column.length <= _LONGEST_TITLE else Role.TEXT
        return Guess(role, f"{shape}, name or comment says text")
    if column.length > _LONGEST_TINY_CODE and _NUMBER_COMMENT.search(column.comment):
        return Guess(Role.NUMBER, "its comment says number")
    if column.length <= 2 * _LONGEST_CODE and _CODE_COMMENT.search(column.comment):
        return Guess(Role.CODE, "its comment says code")
    if column.length >= _SURELY_TEXT:
        return Guess(Role.TEXT, f"{shape}: long enough for words")
    return Guess(Role.CODE if column.length <= _LONGEST_CODE else Role.OTHER, shape)


# ------------------------------------------------------------------------------------------------- amounts, quantities

_NUMBERS = frozenset({"DECIMAL", "SMALLDECIMAL", "DOUBLE", "REAL"})
_UNITS = {
    **dict.fromkeys(("STPRS", "VERPR", "NETPR", "PREIS", "DMBTR", "WRBTR", "KBETR"), "WAERS"),
    **dict.fromkeys(("NETWR", "NETPR", "KZWI1"), "WAERK"),
    **dict.fromkeys(("BRGEW", "NTGEW"), "GEWEI"),
    **dict.fromkeys(("MENGE", "LABST", "GSMNG"), "MEINS"),
    "VOLUM": "VOLEH",
    "KWMENG": "VRKME",
    "LFIMG": "VRKME",
    "NetAmount": "TransactionCurrency",
}
_AMOUNT = _words(r"amount|price|value|cost|betrag|preis|wert|kosten|AMT$|PRICE$")


def measures(columns: Sequence[Column]) -> list[tuple[Column, Column]]:
    """Return amounts with their currency and quantities with their unit, as SAP pairs them: by known names, by NAMEUnit
    and NAMECurrency, or because one directly follows the other."""
    by_name = {column.name: column for column in columns}
    units = [column for column in columns if _is_unit(column)]
    found = []
    for column, behind in zip(columns, [*columns[1:], None], strict=True):
        if column.type_name not in _NUMBERS:
            continue
        names = (_UNITS.get(column.name, ""), f"{column.name}Unit", f"{column.name}Currency")
        unit = next((by_name[name] for name in names if name in by_name), None)
        if unit is None and behind is not None and behind in units:
            unit = behind
        if unit is None and is_amount(column) and _AMOUNT.search(f"{column.name} {column.comment}"):
            currencies = [each for each in units if is_currency(each)]
            unit = currencies[0] if len(currencies) == 1 else None
        if unit is not None:
            found.append((column, unit))
    return found


def _is_unit(column: Column) -> bool:
    named = _UNIT.search(column.name) or _UNIT.search(column.comment)
    return column.type_name in CHARACTER_TYPES and column.length <= _CUKY_LENGTH and bool(named)


# ------------------------------------------------------------------------------------------------------------ changes


def tells_changes(column: Column) -> bool:
    """Return whether this column may hold the time of the last change."""
    stamp = column.type_name == "DECIMAL" and (column.length, column.scale) in _STAMPS
    written = column.type_name in CHARACTER_TYPES and (column.length == 14 or is_dats(column))
    named = _CHANGED.search(column.name) or _CHANGED.search(column.comment)
    return (column.type_name in _MOMENTS or stamp or written) and bool(named)
