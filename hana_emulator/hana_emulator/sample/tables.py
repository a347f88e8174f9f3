"""The sample tables as SQL with SAP's names, types, key order and comments; views of material texts and suppliers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """A column: its SQL type and its name in SAP's data dictionary."""

    type: str
    comment: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first `key` fields are its primary key."""

    name: str
    comment: str
    key: int
    fields: Mapping[str, Field]

    def statements(self) -> Iterator[str]:
        """CREATE and COMMENT statements for the current schema."""
        keys = list(self.fields)[: self.key]
        lines = [f'"{name}" {field.type}{" NOT NULL" if name in keys else ""}' for name, field in self.fields.items()]
        lines.append("PRIMARY KEY (" + ", ".join(f'"{name}"' for name in keys) + ")")
        yield f'CREATE COLUMN TABLE "{self.name}" ({", ".join(lines)})'
        yield f"COMMENT ON TABLE \"{self.name}\" IS '{self.comment}'"
        for name, field in self.fields.items():
            yield f'COMMENT ON COLUMN "{self.name}"."{name}" IS \'{field.comment}\''

    def insert(self) -> str:
        columns = ", ".join(f'"{name}"' for name in self.fields)
        return f'INSERT INTO "{self.name}" ({columns}) VALUES ({", ".join("?" * len(self.fields))})'


_CLIENT = Field("NVARCHAR(3)", "Client")
_MATERIAL = Field("NVARCHAR(40)", "Material number")
_LANGUAGE = Field("NVARCHAR(1)", "Language key")

MARA = Table(
    "MARA",
    "General material data",
    2,
    {
        "MANDT": _CLIENT,
        "MATNR": _MATERIAL,
        "MTART": Field("NVARCHAR(4)", "Material type"),
        "MATKL": Field("NVARCHAR(9)", "Material group"),
        "MEINS": Field("NVARCHAR(3)", "Base unit of measure"),
        "BRGEW": Field("DECIMAL(13,3)", "Gross weight"),
        "NTGEW": Field("DECIMAL(13,3)", "Net weight"),
        "GEWEI": Field("NVARCHAR(3)", "Weight unit"),
        "STPRS": Field("DECIMAL(11,2)", "Standard price"),
        "WAERS": Field("NVARCHAR(5)", "Currency key"),
        "ERSDA": Field("NVARCHAR(8)", "Created on"),
        "LAEDA": Field("NVARCHAR(8)", "Date of last change"),
        "ERNAM": Field("NVARCHAR(12)", "Name of person who created the object"),
        "LVORM": Field("NVARCHAR(1)", "Flag for deletion at client level"),
    },
)
MAKT = Table(
    "MAKT",
    "Material descriptions",
    3,
    {
        "MANDT": _CLIENT,
        "MATNR": _MATERIAL,
        "SPRAS": _LANGUAGE,
        "MAKTX": Field("NVARCHAR(40)", "Material description"),
    },
)
MATERIAL_TEXT = Table(
    "MATERIAL_TEXT",
    "Long texts of materials, unpacked from STXL",
    3,
    {
        "MANDT": _CLIENT,
        "MATNR": _MATERIAL,
        "SPRAS": _LANGUAGE,
        "LTEXT": Field("NCLOB", "Basic data text"),
    },
)
QMEL = Table(
    "QMEL",
    "Quality and maintenance notifications",
    2,
    {
        "MANDT": _CLIENT,
        "QMNUM": Field("NVARCHAR(12)", "Notification number"),
        "QMART": Field("NVARCHAR(2)", "Notification type"),
        "QMTXT": Field("NVARCHAR(40)", "Short text"),
        "LTEXT": Field("NCLOB", "Long text"),
        "PRIOK": Field("NVARCHAR(1)", "Priority"),
        "EQUNR": Field("NVARCHAR(18)", "Equipment number"),
        "TPLNR": Field("NVARCHAR(30)", "Functional location"),
        "QMDAT": Field("NVARCHAR(8)", "Date of notification"),
        "MZEIT": Field("NVARCHAR(6)", "Time of notification"),
        "LTRMN": Field("NVARCHAR(8)", "Required end date"),
        "QMNAM": Field("NVARCHAR(12)", "Name of person reporting notification"),
    },
)
KNA1 = Table(
    "KNA1",
    "General data in customer master",
    2,
    {
        "MANDT": _CLIENT,
        "KUNNR": Field("NVARCHAR(10)", "Customer number"),
        "NAME1": Field("NVARCHAR(35)", "Name 1"),
        "NAME2": Field("NVARCHAR(35)", "Name 2"),
        "STRAS": Field("NVARCHAR(35)", "Street and house number"),
        "PSTLZ": Field("NVARCHAR(10)", "Postal code"),
        "ORT01": Field("NVARCHAR(35)", "City"),
        "LAND1": Field("NVARCHAR(3)", "Country key"),
        "TELF1": Field("NVARCHAR(16)", "First telephone number"),
        "SPRAS": _LANGUAGE,
        "ERDAT": Field("NVARCHAR(8)", "Date on which the record was created"),
    },
)


def _texts(name: str, comment: str, code: dict[str, Field], text: dict[str, Field]) -> Table:
    """A table with the texts of codes by language."""
    return Table(name, comment, 2 + len(code), {"MANDT": _CLIENT, "SPRAS": _LANGUAGE, **code, **text})


CODE_TEXTS = (
    _texts(
        "T134T", "Names of material types", {"MTART": MARA.fields["MTART"]}, {"MTBEZ": Field("NVARCHAR(25)", "Name")}
    ),
    _texts(
        "T023T", "Names of material groups", {"MATKL": MARA.fields["MATKL"]}, {"WGBEZ": Field("NVARCHAR(20)", "Name")}
    ),
    _texts(
        "TQ80_T",
        "Names of notification types",
        {"QMART": QMEL.fields["QMART"]},
        {"QMARTX": Field("NVARCHAR(20)", "Name")},
    ),
    _texts(
        "T356_T",
        "Names of priorities",
        {"ARTPR": Field("NVARCHAR(2)", "Priority type"), "PRIOK": QMEL.fields["PRIOK"]},
        {"PRIOKX": Field("NVARCHAR(20)", "Name")},
    ),
    _texts("TCURT", "Names of currencies", {"WAERS": MARA.fields["WAERS"]}, {"LTEXT": Field("NVARCHAR(40)", "Name")}),
    Table(
        "T002T",
        "Names of languages",
        2,
        {"SPRAS": _LANGUAGE, "SPRSL": Field("NVARCHAR(1)", "Language"), "SPTXT": Field("NVARCHAR(16)", "Name")},
    ),
)
SUPPLIERS_DELTA = Table(
    "SUPPLIERS_Delta",
    "Suppliers with their changes, as SAP Datasphere keeps a local table with delta capture",
    1,
    {
        "ID": Field("NVARCHAR(10)", "Supplier"),
        "NAME": Field("NVARCHAR(80)", "Name"),
        "Change_Type": Field("NVARCHAR(1)", "Type of the last change"),
        "Change_Date": Field("TIMESTAMP", "Time of the last change"),
    },
)
T001W = Table(
    "T001W",
    "Plants, as a remote subscription of SDI of type UPSERT keeps them",
    2,
    {
        "MANDT": _CLIENT,
        "WERKS": Field("NVARCHAR(4)", "Plant"),
        "NAME1": Field("NVARCHAR(30)", "Name"),
        "ORT01": Field("NVARCHAR(25)", "City"),
        "SDI_CHANGE_TYPE": Field("VARCHAR(2)", "Type of the last change; NULL since the initial load"),
        "SDI_CHANGE_TIME": Field("TIMESTAMP", "Time of the last change"),
    },
)
TABLES = (MARA, MAKT, MATERIAL_TEXT, QMEL, KNA1, *CODE_TEXTS, SUPPLIERS_DELTA, T001W)

VIEW = "V_MATERIALS"
VIEW_STATEMENTS = (
    'CREATE OR REPLACE VIEW "SUPPLIERS" AS SELECT "ID", "NAME" FROM "SUPPLIERS_Delta" '
    "WHERE \"Change_Type\" NOT IN ('D', 'X')",
    "COMMENT ON VIEW \"SUPPLIERS\" IS 'Suppliers: the active records of SUPPLIERS_Delta'",
    f'CREATE VIEW "{VIEW}" AS SELECT m."MANDT", m."MATNR", t."SPRAS", m."MTART", m."MATKL", m."MEINS", m."BRGEW", '
    'm."GEWEI", m."STPRS", m."WAERS", m."ERSDA", m."LAEDA", t."MAKTX", x."LTEXT" FROM "MARA" m '
    'INNER JOIN "MAKT" t ON t."MANDT" = m."MANDT" AND t."MATNR" = m."MATNR" '
    'LEFT OUTER JOIN "MATERIAL_TEXT" x ON x."MANDT" = t."MANDT" AND x."MATNR" = t."MATNR" AND x."SPRAS" = t."SPRAS"',
    f"COMMENT ON VIEW \"{VIEW}\" IS 'Materials with their texts, one row per language'",
)
