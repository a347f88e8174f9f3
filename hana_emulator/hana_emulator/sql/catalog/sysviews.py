"""The SYS views: typed columns and the SQLite query over our catalogue tables behind each."""

from __future__ import annotations

import sqlite3

from hana_emulator.sql.catalog import accountviews, schema_views
from hana_emulator.sql.catalog.system_view import FLAG as _FLAG
from hana_emulator.sql.catalog.system_view import NAME as _NAME
from hana_emulator.sql.catalog.system_view import TEXT as _TEXT
from hana_emulator.sql.catalog.system_view import SystemView
from hana_emulator.sql.catalog.system_view import view as _view
from hana_emulator.sql.functions.registration import SESSION_VARIABLES
from hana_emulator.sql.language.datatypes import CATALOGUE_NAMES, FLOATING_SCALE, nvarchar
from hana_emulator.sql.language.names import quoted_table
from hana_emulator.types import BIGINT, INTEGER, LOBS, TIMESTAMP, HanaType, TypeCode

VERSION = "4.00.000.00.1700000000"
CLOUD_VERSION = "2025.40.0"
"""Quarterly release of HANA Cloud whose SQL this emulator imitates: late enough for REAL_VECTOR and HALF_VECTOR."""


def find(schema: str, name: str) -> SystemView | None:
    """SYS views answer under SYS and, as public synonyms, without a schema."""
    return _VIEWS.get(name) if schema in ("", "SYS", "PUBLIC") else None


def names() -> list[str]:
    return sorted(_VIEWS)


def register(connection: sqlite3.Connection) -> None:
    """The functions that views ask for."""

    def record_count(schema: str, table: str) -> int:
        (count,) = connection.execute(f"SELECT COUNT(*) FROM {quoted_table(schema, table)}").fetchone()
        return int(count)

    connection.create_function("owl_record_count", 2, record_count)


def _codes(codes: frozenset[TypeCode]) -> str:
    return ", ".join(str(int(code)) for code in sorted(codes))


_SMALL = f"c.type = {int(TypeCode.DECIMAL)} AND c.scale = {FLOATING_SCALE} AND c.length = 16"
_TYPE_NAME = (
    f"CASE WHEN {_SMALL} THEN 'SMALLDECIMAL' ELSE CASE c.type "
    + " ".join(f"WHEN {int(code)} THEN '{code.name}'" for code in TypeCode)
    + " END END"
)
_TYPE_LENGTH = f"CASE WHEN c.type IN ({_codes(LOBS)}) THEN 2147483647 ELSE c.length END"
_TYPE_SCALE = f"CASE WHEN c.type = {int(TypeCode.DECIMAL)} AND c.scale <> {FLOATING_SCALE} THEN c.scale END"


_QUOTED_DEFAULT = "substr(c.defaults, 2, length(c.defaults) - 2)"
_PLAIN_DEFAULT = (
    "CASE WHEN c.defaults GLOB char(39) || '*' || char(39)"
    f" AND instr(replace({_QUOTED_DEFAULT}, char(39, 39), ''), char(39)) = 0"
    f" THEN replace({_QUOTED_DEFAULT}, char(39, 39), char(39)) ELSE c.defaults END"
)
"""A text literal without its quotes: the suite of sqlalchemy-hana, which compares defaults, expects it so."""


def _columns_view(kind: str, name: str) -> SystemView:
    return _view(
        f"FROM owl_columns c JOIN owl_visible r ON r.id = c.relation WHERE r.kind = '{kind}'",
        SCHEMA_NAME=(_NAME, "r.schema"),
        **{f"{name}_NAME": (_NAME, "r.name"), f"{name}_OID": (BIGINT, "r.id")},
        COLUMN_NAME=(_NAME, "c.name"),
        POSITION=(INTEGER, "c.position"),
        DATA_TYPE_ID=(INTEGER, "c.type"),
        DATA_TYPE_NAME=(nvarchar(16), _TYPE_NAME),
        OFFSET=(INTEGER, "0"),
        LENGTH=(INTEGER, _TYPE_LENGTH),
        SCALE=(INTEGER, _TYPE_SCALE),
        IS_NULLABLE=(_FLAG, "CASE c.nullable WHEN 1 THEN 'TRUE' ELSE 'FALSE' END"),
        DEFAULT_VALUE=(_TEXT, _PLAIN_DEFAULT),
        COMMENTS=(_TEXT, "c.comment"),
        GENERATION_TYPE=(nvarchar(32), "CASE WHEN c.identity IS NOT NULL THEN c.identity || ' AS IDENTITY' END"),
        GENERATED_ALWAYS_AS=(HanaType(TypeCode.NCLOB), "NULL"),
        COLUMN_ID=(BIGINT, "c.relation * 10000 + c.position"),
    )


_TABLES = _view(
    "FROM owl_visible r WHERE r.kind = 'TABLE'",
    SCHEMA_NAME=(_NAME, "r.schema"),
    TABLE_NAME=(_NAME, "r.name"),
    TABLE_OID=(BIGINT, "r.id"),
    COMMENTS=(_TEXT, "r.comment"),
    TABLE_TYPE=(nvarchar(16), "r.store"),
    IS_COLUMN_TABLE=(_FLAG, "CASE r.store WHEN 'COLUMN' THEN 'TRUE' ELSE 'FALSE' END"),
    HAS_PRIMARY_KEY=(
        _FLAG,
        "CASE WHEN EXISTS (SELECT 1 FROM owl_constraints k WHERE k.relation = r.id AND k.primary_key) THEN 'TRUE'"
        " ELSE 'FALSE' END",
    ),
    IS_TEMPORARY=(_FLAG, "CASE WHEN r.temporary IS NULL THEN 'FALSE' ELSE 'TRUE' END"),
    TEMPORARY_TABLE_TYPE=(nvarchar(16), "r.temporary"),
    IS_USER_DEFINED_TYPE=(_FLAG, "'FALSE'"),
    IS_SYSTEM_TABLE=(_FLAG, "'FALSE'"),
    CREATE_TIME=(TIMESTAMP, "r.created"),
)


_M_TABLES = _view(
    "FROM owl_visible r WHERE r.kind = 'TABLE' AND r.temporary IS NOT 'LOCAL'",
    SCHEMA_NAME=(_NAME, "r.schema"),
    TABLE_NAME=(_NAME, "r.name"),
    RECORD_COUNT=(BIGINT, "owl_record_count(r.schema, r.name)"),
    IS_COLUMN_TABLE=(_FLAG, "CASE r.store WHEN 'COLUMN' THEN 'TRUE' ELSE 'FALSE' END"),
    TABLE_TYPE=(nvarchar(16), "r.store"),
)


_M_CS_TABLES = _view(
    "FROM owl_visible r WHERE r.kind = 'TABLE' AND r.store = 'COLUMN' AND r.temporary IS NOT 'LOCAL'",
    SCHEMA_NAME=(_NAME, "r.schema"),
    TABLE_NAME=(_NAME, "r.name"),
    PART_ID=(INTEGER, "0"),
    RECORD_COUNT=(BIGINT, "owl_record_count(r.schema, r.name)"),
    LOADED=(nvarchar(10), "'FULL'"),
)
"""One part for each column table: none is partitioned here."""


def _views_view() -> SystemView:
    return _view(
        "FROM owl_visible r WHERE r.kind = 'VIEW'",
        SCHEMA_NAME=(_NAME, "r.schema"),
        VIEW_NAME=(_NAME, "r.name"),
        VIEW_OID=(BIGINT, "r.id"),
        VIEW_TYPE=(nvarchar(16), "'ROW'"),
        DEFINITION=(HanaType(TypeCode.NCLOB), "r.definition"),
        COMMENTS=(_TEXT, "r.comment"),
        IS_VALID=(
            _FLAG,
            "CASE WHEN r.id IN (SELECT relation FROM owl_invalid_views) THEN 'FALSE' ELSE 'TRUE' END",
        ),
        IS_COLUMN_VIEW=(_FLAG, "'FALSE'"),
        CREATE_TIME=(TIMESTAMP, "r.created"),
    )


_INDEXED = (
    "(SELECT schema, name, relation, kind, uniqueness, position, column_name, descending FROM owl_indexes UNION ALL"
    " SELECT r.schema, k.name, k.relation, 'INVERTED VALUE UNIQUE',"
    " 'UNIQUE', k.position, k.column_name, 0"
    " FROM owl_constraints k JOIN owl_relations r ON r.id = k.relation WHERE NOT k.primary_key)"
)
"""A UNIQUE constraint is listed among the indexes too, as a unique index does among the constraints."""

_INDEXES = _view(
    f"FROM (SELECT DISTINCT schema, name, relation, kind, uniqueness FROM {_INDEXED}) i"
    " JOIN owl_visible r ON r.id = i.relation",
    SCHEMA_NAME=(_NAME, "i.schema"),
    TABLE_NAME=(_NAME, "r.name"),
    TABLE_OID=(BIGINT, "r.id"),
    INDEX_NAME=(_NAME, "i.name"),
    INDEX_TYPE=(nvarchar(32), "i.kind"),
    CONSTRAINT=(nvarchar(32), "i.uniqueness"),
)

_INDEX_COLUMNS = _view(
    f"FROM {_INDEXED} i JOIN owl_visible r ON r.id = i.relation",
    SCHEMA_NAME=(_NAME, "i.schema"),
    TABLE_NAME=(_NAME, "r.name"),
    INDEX_NAME=(_NAME, "i.name"),
    COLUMN_NAME=(_NAME, "i.column_name"),
    POSITION=(INTEGER, "i.position"),
    ASCENDING_ORDER=(_FLAG, "CASE i.descending WHEN 1 THEN 'FALSE' ELSE 'TRUE' END"),
    CONSTRAINT=(nvarchar(32), "i.uniqueness"),
)

_SCHEMAS = _view(
    "FROM (SELECT name, owner, created FROM owl_schemas UNION ALL"
    " SELECT 'SYS', 'SYS', '2020-01-01 00:00:00.0000000') s",
    SCHEMA_NAME=(_NAME, "s.name"),
    SCHEMA_OWNER=(_NAME, "s.owner"),
    CREATE_TIME=(TIMESTAMP, "s.created"),
    HAS_PRIVILEGES=(_FLAG, "'TRUE'"),
)

_VIEWS: dict[str, SystemView] = {
    **accountviews.VIEWS,
    "DUMMY": _view("", DUMMY=(nvarchar(1), "'X'")),
    "TABLES": _TABLES,
    "M_TABLES": _M_TABLES,
    "M_CS_TABLES": _M_CS_TABLES,
    "VIEWS": _views_view(),
    "TABLE_COLUMNS": _columns_view("TABLE", "TABLE"),
    "VIEW_COLUMNS": _columns_view("VIEW", "VIEW"),
    "SCHEMAS": _SCHEMAS,
    "INDEXES": _INDEXES,
    "INDEX_COLUMNS": _INDEX_COLUMNS,
    "DATA_TYPES": _view(
        "FROM (SELECT value AS name FROM json_each('[" + ",".join(f'"{name}"' for name in CATALOGUE_NAMES) + "]')) t",
        TYPE_NAME=(nvarchar(16), "t.name"),
    ),
    "M_DATABASE": _view(
        "",
        SYSTEM_ID=(nvarchar(3), "'OWL'"),
        DATABASE_NAME=(_NAME, "'EMULATOR'"),
        HOST=(_NAME, "'localhost'"),
        VERSION=(nvarchar(64), f"'{VERSION}'"),
        CLOUD_VERSION=(nvarchar(64), f"'{CLOUD_VERSION}'"),
        USAGE=(nvarchar(32), "'DEVELOPMENT'"),
    ),
    "M_SESSION_CONTEXT": _view(
        f"FROM json_each({SESSION_VARIABLES}()) v",
        HOST=(_NAME, "'localhost'"),
        PORT=(INTEGER, "0"),
        CONNECTION_ID=(INTEGER, "hana_current_connection()"),
        KEY=(_NAME, "v.key"),
        VALUE=(nvarchar(512), "v.value"),
        SECTION=(nvarchar(32), "'USER'"),
    ),
    "M_SYSTEM_OVERVIEW": _view(
        "FROM (SELECT 'System' AS section, 'Version' AS name, '" + VERSION + "' AS value"
        " UNION ALL SELECT 'System', 'Instance ID', 'OWL' UNION ALL SELECT 'System', 'Distributed', 'No') o",
        SECTION=(nvarchar(32), "o.section"),
        NAME=(nvarchar(128), "o.name"),
        STATUS=(nvarchar(10), "''"),
        VALUE=(_NAME, "o.value"),
    ),
    **schema_views.VIEWS,
}
