"""The SYS views: typed columns, and a SQLite query over the catalogue tables for each."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from hana_emulator.sql.catalog.rights import OBJECT_PRIVILEGES, SCHEMA_PRIVILEGES
from hana_emulator.sql.functions.registration import SESSION_VARIABLES
from hana_emulator.sql.language.datatypes import CATALOGUE_NAMES, FLOATING_SCALE, nvarchar
from hana_emulator.sql.language.names import quoted_table
from hana_emulator.types import BIGINT, DOUBLE, INTEGER, LOBS, NCLOB, TIMESTAMP, Column, HanaType, TypeCode

FLAG = nvarchar(5)
NAME = nvarchar(256)
TEXT = nvarchar(5_000)


@dataclass(frozen=True, slots=True)
class SystemView:
    columns: tuple[Column, ...]
    sql: str


SEES_FUNCTION = "owl_sees"  # SQLite function: whether the session's user may see the table or view with an id
_ALL_RELATIONS = "owl_visible r"
_SEEN_RELATIONS = f"(SELECT * FROM owl_visible WHERE {SEES_FUNCTION}(id)) r"


def view(sql_from: str, **columns: tuple[HanaType, str]) -> SystemView:
    """A view of `columns` (type and SQLite expression of each) over the FROM text.

    `owl_visible r` means tables and views on which the user has some privilege: HANA filters system views this way,
    except for CATALOG READ (SAP HANA Security Guide, system privileges).
    """
    sql_from = sql_from.replace(_ALL_RELATIONS, _SEEN_RELATIONS)
    items = ", ".join(f'{text} AS "{name}"' for name, (_, text) in columns.items())
    described = tuple(Column(name, kind, True, "", "SYS") for name, (kind, _) in columns.items())
    return SystemView(described, f"SELECT {items} {sql_from}")


def flag(condition: str) -> tuple[HanaType, str]:
    return FLAG, f"CASE WHEN {condition} THEN 'TRUE' ELSE 'FALSE' END"


# --- users, roles, privileges, logins, and the emulator's own views M_EMULATOR_... ------------------------------------


# SQLite function that returns the rows of an entry of `Database.monitors` as a JSON array of objects
MONITOR_FUNCTION = "owl_monitor"


def _monitored(name: str) -> str:
    return f"json_each({MONITOR_FUNCTION}('{name}'))"


_KIND = "CASE WHEN {0} IN (SELECT name FROM owl_users) THEN 'USER' ELSE 'ROLE' END"
_OBJECT_TYPE = "CASE g.kind WHEN 'OBJECT' THEN t.kind WHEN 'SCHEMA' THEN 'SCHEMA' ELSE 'SYSTEMPRIVILEGE' END"
_PRIVILEGE_COLUMNS = {
    "GRANTOR": (NAME, "g.grantor"),
    "OBJECT_TYPE": (nvarchar(32), _OBJECT_TYPE),
    "SCHEMA_NAME": (NAME, "g.schema"),
    "OBJECT_NAME": (NAME, "t.name"),
    "COLUMN_NAME": (NAME, "NULL"),
    "PRIVILEGE": (NAME, "g.privilege"),
    "IS_GRANTABLE": flag("g.grantable"),
    "IS_VALID": flag("1"),
}
_REACH = """
WITH RECURSIVE reach(user, grantee) AS (
  SELECT name, name FROM owl_users UNION SELECT name, 'PUBLIC' FROM owl_users
  UNION SELECT reach.user, o.privilege FROM reach JOIN owl_grants o ON o.grantee = reach.grantee AND o.kind = 'ROLE')
"""


def _owned(privileges: tuple[str, ...], columns: str, source: str) -> str:
    return f"SELECT {columns} FROM {source}, json_each('{json.dumps(privileges)}') p"


# Grants to the user, to PUBLIC and to the user's roles, and the rights of an owner
_EFFECTIVE = " UNION ALL ".join(
    (
        f"{_REACH} SELECT reach.user, g.* FROM reach JOIN owl_grants g ON g.grantee = reach.grantee"
        " WHERE g.kind <> 'ROLE'",
        _owned(
            OBJECT_PRIVILEGES,
            "w.owner, w.owner, 'OBJECT', p.value, q.schema, q.id, 'SYS', 1",
            "owl_owners w JOIN owl_relations q ON q.id = w.relation",
        ),
        _owned(SCHEMA_PRIVILEGES, "s.owner, s.owner, 'SCHEMA', p.value, s.name, NULL, 'SYS', 1", "owl_schemas s"),
    )
)
_EFFECTIVE_COLUMNS = "user, grantee, kind, privilege, schema, relation, grantor, grantable"

_ACCOUNT_VIEWS: dict[str, SystemView] = {
    "USERS": view(
        "FROM owl_users u LEFT JOIN owl_deactivated d ON d.name = u.name"
        f" LEFT JOIN {_monitored('logins')} l ON l.value ->> 'user' = u.name",
        USER_NAME=(NAME, "u.name"),
        CREATE_TIME=(TIMESTAMP, "u.created"),
        INVALID_CONNECT_ATTEMPTS=(BIGINT, "coalesce(l.value ->> 'consecutive', 0)"),
        USER_DEACTIVATED=flag("d.name IS NOT NULL"),
        IS_PASSWORD_ENABLED=flag("1"),
    ),
    "ROLES": view(
        "FROM (SELECT name, creator FROM owl_roles UNION ALL SELECT 'PUBLIC', 'SYS') r",
        ROLE_NAME=(NAME, "r.name"),
        CREATOR=(NAME, "r.creator"),
    ),
    "GRANTED_ROLES": view(
        "FROM owl_grants g WHERE g.kind = 'ROLE'",
        GRANTEE=(NAME, "g.grantee"),
        GRANTEE_TYPE=(nvarchar(4), _KIND.format("g.grantee")),
        ROLE_NAME=(NAME, "g.privilege"),
        GRANTOR=(NAME, "g.grantor"),
        IS_GRANTABLE=flag("g.grantable"),
    ),
    "GRANTED_PRIVILEGES": view(
        "FROM owl_grants g LEFT JOIN owl_relations t ON t.id = g.relation WHERE g.kind <> 'ROLE'",
        GRANTEE=(NAME, "g.grantee"),
        GRANTEE_TYPE=(nvarchar(4), _KIND.format("g.grantee")),
        **_PRIVILEGE_COLUMNS,
    ),
    "EFFECTIVE_PRIVILEGES": view(
        f"FROM (WITH e({_EFFECTIVE_COLUMNS}) AS (SELECT * FROM ({_EFFECTIVE})) SELECT * FROM e) g"
        " LEFT JOIN owl_relations t ON t.id = g.relation",
        USER_NAME=(NAME, "g.user"),
        GRANTEE=(NAME, "g.grantee"),
        GRANTEE_TYPE=(nvarchar(4), _KIND.format("g.grantee")),
        **_PRIVILEGE_COLUMNS,
    ),
    "INVALID_CONNECT_ATTEMPTS": view(
        f"FROM {_monitored('logins')} l",
        USER_NAME=(NAME, "l.value ->> 'user'"),
        SUCCESSFUL_CONNECTS=(BIGINT, "(l.value ->> 'attempts') - (l.value ->> 'failures')"),
        INVALID_CONNECT_ATTEMPTS=(BIGINT, "l.value ->> 'consecutive'"),
    ),
    "M_EMULATOR_LOGINS": view(
        f"FROM {_monitored('logins')} l",
        USER_NAME=(NAME, "l.value ->> 'user'"),
        ATTEMPTS=(BIGINT, "l.value ->> 'attempts'"),
        FAILURES=(BIGINT, "l.value ->> 'failures'"),
        IS_LOCKED=flag("l.value ->> 'locked'"),
    ),
    "M_EMULATOR_FAULTS": view(
        f"FROM {_monitored('faults')} f",
        FAULT_ID=(INTEGER, "f.value ->> 'id'"),
        MATCH=(TEXT, "f.value ->> 'match'"),
        ACTION=(nvarchar(16), "f.value ->> 'action'"),
        SKIP=(BIGINT, "f.value ->> 'skip'"),
        COUNT=(BIGINT, "f.value ->> 'count'"),
        ERROR_CODE=(INTEGER, "f.value ->> 'code'"),
        SECONDS=(DOUBLE, "f.value ->> 'seconds'"),
        BYTES=(BIGINT, "f.value ->> 'bytes'"),
        MATCHES=(BIGINT, "f.value ->> 'matches'"),
        HITS=(BIGINT, "f.value ->> 'hits'"),
    ),
}


# --- constraints, sequences, synonyms, triggers, temporary tables -----------------------------------------------------


_SCHEMA_VIEWS: dict[str, SystemView] = {
    "CONSTRAINTS": view(
        "FROM (SELECT relation, name, primary_key, 1 AS keyed, position, column_name, NULL AS condition"
        " FROM owl_constraints UNION ALL SELECT relation, name, 0, 1, position, column_name, NULL FROM owl_indexes"
        " WHERE uniqueness = 'UNIQUE' UNION ALL SELECT relation, name, 0, 0, 1, NULL, condition FROM owl_checks) k"
        " CROSS JOIN owl_visible r ON r.id = k.relation",
        SCHEMA_NAME=(NAME, "r.schema"),
        TABLE_NAME=(NAME, "r.name"),
        TABLE_OID=(BIGINT, "r.id"),
        COLUMN_NAME=(NAME, "k.column_name"),
        POSITION=(INTEGER, "k.position"),
        CONSTRAINT_NAME=(NAME, "k.name"),
        IS_PRIMARY_KEY=flag("k.primary_key"),
        IS_UNIQUE_KEY=flag("k.keyed"),
        CHECK_CONDITION=(TEXT, "k.condition"),
    ),
    "REFERENTIAL_CONSTRAINTS": view(
        "FROM owl_references f JOIN owl_visible r ON r.id = f.relation JOIN owl_visible p ON p.id = f.parent",
        SCHEMA_NAME=(NAME, "r.schema"),
        TABLE_NAME=(NAME, "r.name"),
        COLUMN_NAME=(NAME, "f.column_name"),
        POSITION=(INTEGER, "f.position"),
        CONSTRAINT_NAME=(NAME, "f.name"),
        REFERENCED_SCHEMA_NAME=(NAME, "p.schema"),
        REFERENCED_TABLE_NAME=(NAME, "p.name"),
        REFERENCED_COLUMN_NAME=(NAME, "f.parent_column"),
        REFERENCED_CONSTRAINT_NAME=(
            NAME,
            "(SELECT k.name FROM owl_constraints k WHERE k.relation = f.parent AND k.column_name = f.parent_column"
            " ORDER BY k.primary_key DESC LIMIT 1)",
        ),
        UPDATE_RULE=(nvarchar(11), "f.on_update"),
        DELETE_RULE=(nvarchar(11), "f.on_delete"),
    ),
    "SEQUENCES": view(
        "FROM owl_sequences s",
        SCHEMA_NAME=(NAME, "s.schema"),
        SEQUENCE_NAME=(NAME, "s.name"),
        SEQUENCE_OID=(BIGINT, "s.id"),
        START_NUMBER=(BIGINT, "s.start"),
        MIN_VALUE=(BIGINT, "s.minimum"),
        MAX_VALUE=(BIGINT, "s.maximum"),
        INCREMENT_BY=(BIGINT, "s.increment"),
        IS_CYCLED=flag("s.cycles"),
        RESET_BY_QUERY=(TEXT, "NULL"),
        CACHE_SIZE=(BIGINT, "s.cache"),
        CREATE_TIME=(TIMESTAMP, "s.created"),
    ),
    "SYNONYMS": view(
        "FROM owl_synonyms y LEFT JOIN owl_visible r ON r.schema = y.object_schema AND r.name = y.object_name"
        " WHERE y.object_schema <> 'SYS'",
        SCHEMA_NAME=(NAME, "y.schema"),
        SYNONYM_NAME=(NAME, "y.name"),
        OBJECT_SCHEMA=(NAME, "y.object_schema"),
        OBJECT_NAME=(NAME, "y.object_name"),
        OBJECT_TYPE=(nvarchar(16), "r.kind"),
        IS_VALID=flag("r.id IS NOT NULL"),
        CREATE_TIME=(TIMESTAMP, "y.created"),
    ),
    "TRIGGERS": view(
        "FROM owl_triggers g JOIN owl_visible r ON r.id = g.relation",
        SCHEMA_NAME=(NAME, "g.schema"),
        TRIGGER_NAME=(NAME, "g.name"),
        TRIGGER_OID=(BIGINT, "g.id"),
        OWNER_NAME=(NAME, "g.owner"),
        SUBJECT_TABLE_SCHEMA=(NAME, "r.schema"),
        SUBJECT_TABLE_NAME=(NAME, "r.name"),
        TRIGGER_ACTION_TIME=(nvarchar(16), "g.timing"),
        TRIGGER_EVENT=(nvarchar(32), "replace(g.events, ',', ' OR ')"),
        TRIGGERED_ACTION_LEVEL=(nvarchar(16), "'ROW'"),
        DEFINITION=(NCLOB, "g.definition"),
        IS_VALID=flag("g.valid"),
        IS_ENABLED=flag("g.enabled"),
        CREATE_TIME=(TIMESTAMP, "g.created"),
    ),
    # HANA also lists local tables of other connections; the emulator lists the session's own and the global ones
    "M_TEMPORARY_TABLES": view(
        "FROM owl_visible r WHERE r.temporary IS NOT NULL",
        SCHEMA_NAME=(NAME, "r.schema"),
        TABLE_NAME=(NAME, "r.name"),
        TEMPORARY_TABLE_TYPE=(nvarchar(16), "r.temporary"),
        TABLE_TYPE=(nvarchar(16), "r.store"),
        CONNECTION_ID=(INTEGER, "hana_current_connection()"),
        CREATE_TIME=(TIMESTAMP, "r.created"),
    ),
}


# --- tables, views, columns, indexes, the database --------------------------------------------------------------------


VERSION = "4.00.000.00.1700000000"
# Quarterly release of HANA Cloud whose SQL this emulator imitates: late enough for REAL_VECTOR and HALF_VECTOR
CLOUD_VERSION = "2025.40.0"


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
# A text literal without its quotes, because the test suite of sqlalchemy-hana compares defaults in this form
_PLAIN_DEFAULT = (
    "CASE WHEN c.defaults GLOB char(39) || '*' || char(39)"
    f" AND instr(replace({_QUOTED_DEFAULT}, char(39, 39), ''), char(39)) = 0"
    f" THEN replace({_QUOTED_DEFAULT}, char(39, 39), char(39)) ELSE c.defaults END"
)


# The words for generated columns are those that sqlalchemy-hana reads.
_GENERATION = (
    "CASE WHEN c.identity IS NOT NULL THEN c.identity || ' AS IDENTITY'"
    " WHEN c.virtual THEN 'ALWAYS CALCULATED AS' WHEN c.formula IS NOT NULL THEN 'ALWAYS AS' END"
)


def _columns_view(kind: str, name: str) -> SystemView:
    return view(
        f"FROM owl_columns c JOIN owl_visible r ON r.id = c.relation WHERE r.kind = '{kind}'",
        SCHEMA_NAME=(NAME, "r.schema"),
        **{f"{name}_NAME": (NAME, "r.name"), f"{name}_OID": (BIGINT, "r.id")},
        COLUMN_NAME=(NAME, "c.name"),
        POSITION=(INTEGER, "c.position"),
        DATA_TYPE_ID=(INTEGER, "c.type"),
        DATA_TYPE_NAME=(nvarchar(16), _TYPE_NAME),
        OFFSET=(INTEGER, "0"),
        LENGTH=(INTEGER, _TYPE_LENGTH),
        SCALE=(INTEGER, _TYPE_SCALE),
        IS_NULLABLE=(FLAG, "CASE c.nullable WHEN 1 THEN 'TRUE' ELSE 'FALSE' END"),
        DEFAULT_VALUE=(TEXT, f"CASE WHEN c.identity IS NULL THEN {_PLAIN_DEFAULT} END"),
        COMMENTS=(TEXT, "c.comment"),
        GENERATION_TYPE=(nvarchar(32), _GENERATION),
        GENERATED_ALWAYS_AS=(HanaType(TypeCode.NCLOB), "c.formula"),
        COLUMN_ID=(BIGINT, "c.relation * 10000 + c.position"),
    )


# A UNIQUE constraint is also listed as an index, and a unique index as a constraint
_INDEXED = (
    "(SELECT schema, name, relation, kind, uniqueness, position, column_name, descending FROM owl_indexes UNION ALL"
    " SELECT r.schema, k.name, k.relation, 'INVERTED VALUE UNIQUE',"
    " 'UNIQUE', k.position, k.column_name, 0"
    " FROM owl_constraints k JOIN owl_relations r ON r.id = k.relation WHERE NOT k.primary_key)"
)


_VIEWS: dict[str, SystemView] = {
    **_ACCOUNT_VIEWS,
    "DUMMY": view("", DUMMY=(nvarchar(1), "'X'")),
    "TABLES": view(
        "FROM owl_visible r WHERE r.kind = 'TABLE'",
        SCHEMA_NAME=(NAME, "r.schema"),
        TABLE_NAME=(NAME, "r.name"),
        TABLE_OID=(BIGINT, "r.id"),
        COMMENTS=(TEXT, "r.comment"),
        TABLE_TYPE=(nvarchar(16), "r.store"),
        IS_COLUMN_TABLE=(FLAG, "CASE r.store WHEN 'COLUMN' THEN 'TRUE' ELSE 'FALSE' END"),
        HAS_PRIMARY_KEY=(
            FLAG,
            "CASE WHEN EXISTS (SELECT 1 FROM owl_constraints k WHERE k.relation = r.id AND k.primary_key) THEN 'TRUE'"
            " ELSE 'FALSE' END",
        ),
        IS_TEMPORARY=(FLAG, "CASE WHEN r.temporary IS NULL THEN 'FALSE' ELSE 'TRUE' END"),
        TEMPORARY_TABLE_TYPE=(nvarchar(16), "r.temporary"),
        IS_USER_DEFINED_TYPE=(FLAG, "'FALSE'"),
        IS_SYSTEM_TABLE=(FLAG, "'FALSE'"),
        CREATE_TIME=(TIMESTAMP, "r.created"),
    ),
    "M_TABLES": view(
        "FROM owl_visible r WHERE r.kind = 'TABLE' AND r.temporary IS NOT 'LOCAL'",
        SCHEMA_NAME=(NAME, "r.schema"),
        TABLE_NAME=(NAME, "r.name"),
        RECORD_COUNT=(BIGINT, "owl_record_count(r.schema, r.name)"),
        IS_COLUMN_TABLE=(FLAG, "CASE r.store WHEN 'COLUMN' THEN 'TRUE' ELSE 'FALSE' END"),
        TABLE_TYPE=(nvarchar(16), "r.store"),
    ),
    # Each column table has one part: the emulator does not partition tables
    "M_CS_TABLES": view(
        "FROM owl_visible r WHERE r.kind = 'TABLE' AND r.store = 'COLUMN' AND r.temporary IS NOT 'LOCAL'",
        SCHEMA_NAME=(NAME, "r.schema"),
        TABLE_NAME=(NAME, "r.name"),
        PART_ID=(INTEGER, "0"),
        RECORD_COUNT=(BIGINT, "owl_record_count(r.schema, r.name)"),
        LOADED=(nvarchar(10), "'FULL'"),
    ),
    "VIEWS": view(
        "FROM owl_visible r WHERE r.kind = 'VIEW'",
        SCHEMA_NAME=(NAME, "r.schema"),
        VIEW_NAME=(NAME, "r.name"),
        VIEW_OID=(BIGINT, "r.id"),
        VIEW_TYPE=(nvarchar(16), "'ROW'"),
        DEFINITION=(HanaType(TypeCode.NCLOB), "r.definition"),
        COMMENTS=(TEXT, "r.comment"),
        IS_VALID=(
            FLAG,
            "CASE WHEN r.id IN (SELECT relation FROM owl_invalid_views) THEN 'FALSE' ELSE 'TRUE' END",
        ),
        IS_COLUMN_VIEW=(FLAG, "'FALSE'"),
        CREATE_TIME=(TIMESTAMP, "r.created"),
    ),
    "TABLE_COLUMNS": _columns_view("TABLE", "TABLE"),
    "VIEW_COLUMNS": _columns_view("VIEW", "VIEW"),
    "SCHEMAS": view(
        "FROM (SELECT name, owner, created FROM owl_schemas UNION ALL"
        " SELECT 'SYS', 'SYS', '2020-01-01 00:00:00.0000000') s",
        SCHEMA_NAME=(NAME, "s.name"),
        SCHEMA_OWNER=(NAME, "s.owner"),
        CREATE_TIME=(TIMESTAMP, "s.created"),
        HAS_PRIVILEGES=(FLAG, "'TRUE'"),
    ),
    "INDEXES": view(
        f"FROM (SELECT DISTINCT schema, name, relation, kind, uniqueness FROM {_INDEXED}) i"
        " JOIN owl_visible r ON r.id = i.relation",
        SCHEMA_NAME=(NAME, "i.schema"),
        TABLE_NAME=(NAME, "r.name"),
        TABLE_OID=(BIGINT, "r.id"),
        INDEX_NAME=(NAME, "i.name"),
        INDEX_TYPE=(nvarchar(32), "i.kind"),
        CONSTRAINT=(nvarchar(32), "i.uniqueness"),
    ),
    "INDEX_COLUMNS": view(
        f"FROM {_INDEXED} i JOIN owl_visible r ON r.id = i.relation",
        SCHEMA_NAME=(NAME, "i.schema"),
        TABLE_NAME=(NAME, "r.name"),
        INDEX_NAME=(NAME, "i.name"),
        COLUMN_NAME=(NAME, "i.column_name"),
        POSITION=(INTEGER, "i.position"),
        ASCENDING_ORDER=(FLAG, "CASE i.descending WHEN 1 THEN 'FALSE' ELSE 'TRUE' END"),
        CONSTRAINT=(nvarchar(32), "i.uniqueness"),
    ),
    "DATA_TYPES": view(
        "FROM (SELECT value AS name FROM json_each('[" + ",".join(f'"{name}"' for name in CATALOGUE_NAMES) + "]')) t",
        TYPE_NAME=(nvarchar(16), "t.name"),
    ),
    "M_DATABASE": view(
        "",
        SYSTEM_ID=(nvarchar(3), "'OWL'"),
        DATABASE_NAME=(NAME, "'EMULATOR'"),
        HOST=(NAME, "'localhost'"),
        VERSION=(nvarchar(64), f"'{VERSION}'"),
        CLOUD_VERSION=(nvarchar(64), f"'{CLOUD_VERSION}'"),
        USAGE=(nvarchar(32), "'DEVELOPMENT'"),
    ),
    "M_SESSION_CONTEXT": view(
        f"FROM json_each({SESSION_VARIABLES}()) v",
        HOST=(NAME, "'localhost'"),
        PORT=(INTEGER, "0"),
        CONNECTION_ID=(INTEGER, "hana_current_connection()"),
        KEY=(NAME, "v.key"),
        VALUE=(nvarchar(512), "v.value"),
        SECTION=(nvarchar(32), "'USER'"),
    ),
    "M_SYSTEM_OVERVIEW": view(
        "FROM (SELECT 'System' AS section, 'Version' AS name, '" + VERSION + "' AS value"
        " UNION ALL SELECT 'System', 'Instance ID', 'OWL' UNION ALL SELECT 'System', 'Distributed', 'No') o",
        SECTION=(nvarchar(32), "o.section"),
        NAME=(nvarchar(128), "o.name"),
        STATUS=(nvarchar(10), "''"),
        VALUE=(NAME, "o.value"),
    ),
    **_SCHEMA_VIEWS,
}


def find(schema: str, name: str) -> SystemView | None:
    """Find a SYS view. `schema` is SYS, or empty or PUBLIC for the view's public synonym."""
    return _VIEWS.get(name) if schema in ("", "SYS", "PUBLIC") else None


def register(connection: sqlite3.Connection) -> None:
    def record_count(schema: str, table: str) -> int:
        (count,) = connection.execute(f"SELECT COUNT(*) FROM {quoted_table(schema, table)}").fetchone()
        return int(count)

    connection.create_function("owl_record_count", 2, record_count)
