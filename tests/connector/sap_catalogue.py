"""Tables as SAP systems have them, with the columns that matter for a proposal: `name type comment` a line, key
columns with a star. Written from SAP's data dictionary; types as HANA shows ABAP's.
"""

from __future__ import annotations

import re

from connector.model import Column, Table, TableRef

_LINE = re.compile(
    r"(?P<key>\*?)(?P<name>\S+) (?P<type>\w+)(?:\((?P<length>\d+)(?:,(?P<scale>\d+))?\))?(?: (?P<comment>.*))?"
)

_FIELDS = {
    "MARA": """*MANDT NVARCHAR(3) Client
        *MATNR NVARCHAR(40) Material Number
        ERSDA NVARCHAR(8) Created On
        ERNAM NVARCHAR(12) Name of Person Responsible for Creating the Object
        LAEDA NVARCHAR(8) Date of Last Change
        AENAM NVARCHAR(12) Name of Person Who Changed Object
        LVORM NVARCHAR(1) Flag Material for Deletion at Client Level
        MTART NVARCHAR(4) Material type
        MBRSH NVARCHAR(1) Industry Sector
        MATKL NVARCHAR(9) Material Group
        MEINS NVARCHAR(3) Base Unit of Measure
        BRGEW DECIMAL(13,3) Gross weight
        NTGEW DECIMAL(13,3) Net Weight
        GEWEI NVARCHAR(3) Unit of Weight""",
    "MAKT": """*MANDT NVARCHAR(3) Client
        *MATNR NVARCHAR(40) Material Number
        *SPRAS NVARCHAR(1) Language Key
        MAKTX NVARCHAR(40) Material description
        MAKTG NVARCHAR(40) Material description in upper case for matchcodes""",
    "MARC": """*MANDT NVARCHAR(3) Client
        *MATNR NVARCHAR(40) Material Number
        *WERKS NVARCHAR(4) Plant
        EKGRP NVARCHAR(3) Purchasing Group
        DISMM NVARCHAR(2) MRP Type""",
    "QMEL": """*MANDT NVARCHAR(3) Client
        *QMNUM NVARCHAR(12) Notification No
        QMART NVARCHAR(2) Notification Type
        QMTXT NVARCHAR(40) Short Text
        PRIOK NVARCHAR(1) Priority
        ERNAM NVARCHAR(12) Name of Person Responsible for Creating the Object
        ERDAT NVARCHAR(8) Date on Which Record Was Created
        AENAM NVARCHAR(12) Name of Person Who Changed Object
        AEDAT NVARCHAR(8) Changed On
        MZEIT NVARCHAR(6) Time of Notification
        QMDAT NVARCHAR(8) Date of Notification
        QMNAM NVARCHAR(12) Name of Person Reporting Notification
        AEZEIT NVARCHAR(6) Time of Change""",
    "QMFE": """*MANDT NVARCHAR(3) Client
        *QMNUM NVARCHAR(12) Notification No
        *FENUM NVARCHAR(4) Item Number in Item Record
        FETXT NVARCHAR(40) Notification Item Short Text
        FEGRP NVARCHAR(8) Code Group - Problem""",
    "QMSM": """*MANDT NVARCHAR(3) Client
        *QMNUM NVARCHAR(12) Notification No
        *MANUM NVARCHAR(4) Sequential Task Number
        MATXT NVARCHAR(40) Task Text""",
    "AUFK": """*MANDT NVARCHAR(3) Client
        *AUFNR NVARCHAR(12) Order Number
        AUART NVARCHAR(4) Order Type
        AUTYP NVARCHAR(2) Order category
        ERNAM NVARCHAR(12) Entered by
        ERDAT NVARCHAR(8) Created on
        AEDAT NVARCHAR(8) Change date for order master
        KTEXT NVARCHAR(40) Description
        LTEXT NVARCHAR(1) Long Text Exists
        WERKS NVARCHAR(4) Plant""",
    "EQUI": """*MANDT NVARCHAR(3) Client
        *EQUNR NVARCHAR(18) Equipment Number
        ERDAT NVARCHAR(8) Created on
        EQTYP NVARCHAR(1) Equipment category
        EQART NVARCHAR(10) Type of Technical Object
        HERST NVARCHAR(30) Manufacturer of Asset
        ANSWT DECIMAL(13,2) Acquisition Value
        WAERS NVARCHAR(5) Currency Key""",
    "EQKT": """*MANDT NVARCHAR(3) Client
        *EQUNR NVARCHAR(18) Equipment Number
        *SPRAS NVARCHAR(1) Language Key
        EQKTX NVARCHAR(40) Description of technical object
        EQKTU NVARCHAR(40) Equipment description in upper case""",
    "IFLOT": """*MANDT NVARCHAR(3) Client
        *TPLNR NVARCHAR(30) Functional Location
        FLTYP NVARCHAR(1) Functional location category
        IWERK NVARCHAR(4) Maintenance Planning Plant""",
    "IFLOTX": """*MANDT NVARCHAR(3) Client
        *TPLNR NVARCHAR(30) Functional Location
        *SPRAS NVARCHAR(1) Language Key
        PLTXT NVARCHAR(40) Description of functional location""",
    "KNA1": """*MANDT NVARCHAR(3) Client
        *KUNNR NVARCHAR(10) Customer Number
        LAND1 NVARCHAR(3) Country Key
        NAME1 NVARCHAR(35) Name 1
        NAME2 NVARCHAR(35) Name 2
        ORT01 NVARCHAR(35) City
        PSTLZ NVARCHAR(10) Postal Code
        SORTL NVARCHAR(10) Sort field
        STRAS NVARCHAR(35) Street and House Number
        TELF1 NVARCHAR(16) First telephone number
        MCOD1 NVARCHAR(25) Search term for matchcode search
        BRSCH NVARCHAR(4) Industry key
        ERDAT NVARCHAR(8) Date on which the Record Was Created
        KTOKD NVARCHAR(4) Customer Account Group
        SPRAS NVARCHAR(1) Language Key""",
    "LFA1": """*MANDT NVARCHAR(3) Client
        *LIFNR NVARCHAR(10) Account Number of Supplier
        LAND1 NVARCHAR(3) Country Key
        NAME1 NVARCHAR(35) Name 1
        ORT01 NVARCHAR(35) City
        KTOKK NVARCHAR(4) Vendor account group
        SPRAS NVARCHAR(1) Language Key""",
    "BUT000": """*CLIENT NVARCHAR(3) Client
        *PARTNER NVARCHAR(10) Business Partner Number
        TYPE NVARCHAR(1) Business Partner Category
        BPKIND NVARCHAR(4) Business Partner Type
        BU_SORT1 NVARCHAR(20) Search Term 1 for Business Partner
        NAME_ORG1 NVARCHAR(40) Name 1 of organization
        NAME_ORG2 NVARCHAR(40) Name 2 of organization
        NAME_LAST NVARCHAR(40) Last Name of Business Partner (Person)
        NAME_FIRST NVARCHAR(40) First Name of Business Partner (Person)
        CRUSR NVARCHAR(12) User who created the object
        CHUSR NVARCHAR(12) Last user to change object
        CHDAT NVARCHAR(8) Date when object was last changed
        CHTIM NVARCHAR(6) Time at which object was last changed""",
    "ADRC": """*CLIENT NVARCHAR(3) Client
        *ADDRNUMBER NVARCHAR(10) Address Number
        *DATE_FROM NVARCHAR(8) Valid-from date - in current Release only 00010101 possible
        *NATION NVARCHAR(1) Version ID for International Addresses
        NAME1 NVARCHAR(40) Name 1
        CITY1 NVARCHAR(40) City
        POST_CODE1 NVARCHAR(10) City postal code
        STREET NVARCHAR(60) Street
        COUNTRY NVARCHAR(3) Country Key
        LANGU NVARCHAR(1) Language Key
        TEL_NUMBER NVARCHAR(30) First telephone no.: dialling code+number""",
    "VBAK": """*MANDT NVARCHAR(3) Client
        *VBELN NVARCHAR(10) Sales Document
        ERDAT NVARCHAR(8) Date on which the record was created
        ERNAM NVARCHAR(12) Name of Person who Created the Object
        AUART NVARCHAR(4) Sales Document Type
        NETWR DECIMAL(15,2) Net Value of the Sales Order in Document Currency
        WAERK NVARCHAR(5) SD document currency
        VKORG NVARCHAR(4) Sales Organization
        BSTNK NVARCHAR(20) Customer purchase order number
        KTEXT NVARCHAR(40) Description
        KUNNR NVARCHAR(10) Sold-to Party
        AEDAT NVARCHAR(8) Date on Which Record Was Last Changed
        UPD_TMSTMP DECIMAL(21,7) UTC Time Stamp of Last Change""",
    "VBAP": """*MANDT NVARCHAR(3) Client
        *VBELN NVARCHAR(10) Sales Document
        *POSNR NVARCHAR(6) Sales Document Item
        MATNR NVARCHAR(40) Material Number
        ARKTX NVARCHAR(40) Short Text for Sales Order Item
        KWMENG DECIMAL(15,3) Cumulative Order Quantity in Sales Units
        VRKME NVARCHAR(3) Sales unit
        NETWR DECIMAL(15,2) Net Value of the Order Item in Document Currency
        WAERK NVARCHAR(5) SD document currency
        ERDAT NVARCHAR(8) Date on which the record was created""",
    "EKKO": """*MANDT NVARCHAR(3) Client
        *EBELN NVARCHAR(10) Purchasing Document Number
        BUKRS NVARCHAR(4) Company Code
        BSART NVARCHAR(4) Purchasing Document Type
        AEDAT NVARCHAR(8) Date on which the purchasing document was created
        LASTCHANGEDATETIME DECIMAL(21,7) Change Time Stamp
        LIFNR NVARCHAR(10) Supplier's Account Number
        WAERS NVARCHAR(5) Currency Key""",
    "EKPO": """*MANDT NVARCHAR(3) Client
        *EBELN NVARCHAR(10) Purchasing Document Number
        *EBELP NVARCHAR(5) Item Number of Purchasing Document
        TXZ01 NVARCHAR(40) Short Text
        MATNR NVARCHAR(40) Material Number
        MATKL NVARCHAR(9) Material Group
        MENGE DECIMAL(13,3) Purchase Order Quantity
        MEINS NVARCHAR(3) Purchase Order Unit of Measure
        NETPR DECIMAL(11,2) Net Price in Purchasing Document""",
    "STXH": """*MANDT NVARCHAR(3) Client
        *TDOBJECT NVARCHAR(10) Texts: application object
        *TDNAME NVARCHAR(70) Name
        *TDID NVARCHAR(4) Text ID
        *TDSPRAS NVARCHAR(1) Language Key
        TDTITLE NVARCHAR(60) Title""",
    "STXL": """*MANDT NVARCHAR(3) Client
        *RELID NVARCHAR(2) Region in IMPORT/EXPORT Data Table
        *TDOBJECT NVARCHAR(10) Texts: application object
        *TDNAME NVARCHAR(70) Name
        *TDID NVARCHAR(4) Text ID
        *TDSPRAS NVARCHAR(1) Language Key
        *SRTF2 INTEGER Current number of the data record
        CLUSTR SMALLINT Length of field with user data
        CLUSTD BLOB User data""",
    "/BIC/PZMAT": """*/BIC/ZMAT NVARCHAR(18) Material
        *OBJVERS NVARCHAR(1) Object version
        CHANGED NVARCHAR(1) Flag: change
        /BIC/ZGROUP NVARCHAR(9) Material group""",
    "/BIC/TZMAT": """*/BIC/ZMAT NVARCHAR(18) Material
        *LANGU NVARCHAR(1) Language Key
        TXTSH NVARCHAR(20) Short description
        TXTMD NVARCHAR(40) Medium description""",
    "/BIC/AZD00100": """*DOC_NUMBER NVARCHAR(10) Sales document
        *S_ORD_ITEM NVARCHAR(6) Sales document item
        /BIC/ZTEXT NVARCHAR(250) Description of the complaint
        RECORDMODE NVARCHAR(1) BW Delta Process: Update Mode""",
    "SAP_BOOKS": """*ID NVARCHAR(36)
        createdAt TIMESTAMP
        modifiedAt TIMESTAMP
        modifiedBy NVARCHAR(255)
        title NVARCHAR(111)
        descr NVARCHAR(1111)
        stock INTEGER
        price DECIMAL(9,2)
        currency_code NVARCHAR(3)""",
    "SAP_BOOKS_TEXTS": """*locale NVARCHAR(14)
        *ID NVARCHAR(36)
        title NVARCHAR(111)
        descr NVARCHAR(1111)""",
}
_VIEWS = {
    "I_Product": """Product NVARCHAR(40) Product Number
        ProductType NVARCHAR(4) Product Type
        CreationDate NVARCHAR(8) Created On
        CreatedByUser NVARCHAR(12) Created By
        LastChangeDateTime DECIMAL(21,7) Change Time Stamp
        ProductGroup NVARCHAR(9) Product Group
        BaseUnit NVARCHAR(3) Base Unit of Measure
        GrossWeight DECIMAL(13,3) Gross Weight
        WeightUnit NVARCHAR(3) Weight Unit""",
    "I_ProductText": """Product NVARCHAR(40) Product Number
        Language NVARCHAR(1) Language Key
        ProductName NVARCHAR(40) Product Description""",
    "I_MaintenanceNotification": """MaintenanceNotification NVARCHAR(12) Notification Number
        NotificationText NVARCHAR(40) Notification Description
        NotificationType NVARCHAR(2) Notification Type
        MaintPriority NVARCHAR(1) Priority
        CreationDate NVARCHAR(8) Created On
        ReportedByUser NVARCHAR(12) Reported By
        LastChangeDateTime DECIMAL(21,7) Change Time Stamp""",
}


def _table(name: str, lines: str, *, is_view: bool = False) -> Table:
    columns, key = [], []
    for line in lines.splitlines():
        found = _LINE.fullmatch(line.strip())
        assert found, line
        nullable = not found["key"]
        comment = found["comment"] or ""
        length, scale = int(found["length"] or 0), int(found["scale"] or 0)
        columns.append(Column(found["name"], found["type"], length, scale, nullable, comment))
        if found["key"]:
            key.append(found["name"])
    return Table(TableRef("SAPABAP1", name), tuple(columns), tuple(key), is_view)


CATALOGUE: dict[str, Table] = {name: _table(name, lines) for name, lines in _FIELDS.items()} | {
    name: _table(name, lines, is_view=True) for name, lines in _VIEWS.items()
}


def create(table: Table, schema: str) -> str:
    """The table's SQL; of a view too, as a table without a key, where only its columns matter."""
    quoted = {column.name: '"' + column.name.replace('"', '""') + '"' for column in table.columns}
    lines = [f"{quoted[column.name]} {_declared(column)}" for column in table.columns]
    if table.primary_key:
        lines.append(f"PRIMARY KEY ({', '.join(quoted[name] for name in table.primary_key)})")
    return f'CREATE COLUMN TABLE "{schema}"."{table.ref.name}" ({", ".join(lines)})'


def _declared(column: Column) -> str:
    if column.type_name in ("NVARCHAR", "DECIMAL"):
        scale = f",{column.scale}" if column.type_name == "DECIMAL" else ""
        return f"{column.type_name}({column.length}{scale})"
    return column.type_name
