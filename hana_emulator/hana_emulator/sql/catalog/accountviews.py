"""The SYS views of users, roles, privileges and logins, and the emulator's M_EMULATOR_ views of logins and faults."""

from __future__ import annotations

import json

from hana_emulator.sql.catalog.rights import OBJECT_PRIVILEGES, SCHEMA_PRIVILEGES
from hana_emulator.sql.catalog.system_view import NAME, TEXT, SystemView, flag, view
from hana_emulator.sql.language.datatypes import nvarchar
from hana_emulator.types import BIGINT, DOUBLE, INTEGER, TIMESTAMP

MONITOR_FUNCTION = "owl_monitor"
"""SQLite function that gives what a part of the emulator counts, by its name, as a JSON array of objects."""


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
"""Grants to the user, to PUBLIC and to the user's roles, and the rights of an owner."""
_EFFECTIVE_COLUMNS = "user, grantee, kind, privilege, schema, relation, grantor, grantable"

VIEWS: dict[str, SystemView] = {
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
