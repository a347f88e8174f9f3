"""SYS views of constraints, sequences, synonyms, triggers and temporary tables."""

from __future__ import annotations

from hana_emulator.sql.catalog.system_view import SystemView, view
from hana_emulator.sql.language.datatypes import nvarchar
from hana_emulator.types import BIGINT, INTEGER, NCLOB, TIMESTAMP

_FLAG = nvarchar(5)
_NAME = nvarchar(256)
_TEXT = nvarchar(5_000)


def _flag(condition: str) -> str:
    return f"CASE WHEN {condition} THEN 'TRUE' ELSE 'FALSE' END"


_CONSTRAINTS = view(
    "FROM (SELECT relation, name, primary_key, 1 AS keyed, position, column_name, NULL AS condition"
    " FROM owl_constraints UNION ALL SELECT relation, name, 0, 1, position, column_name, NULL FROM owl_indexes"
    " WHERE uniqueness = 'UNIQUE' UNION ALL SELECT relation, name, 0, 0, 1, NULL, condition FROM owl_checks) k"
    " CROSS JOIN owl_visible r ON r.id = k.relation",
    SCHEMA_NAME=(_NAME, "r.schema"),
    TABLE_NAME=(_NAME, "r.name"),
    TABLE_OID=(BIGINT, "r.id"),
    COLUMN_NAME=(_NAME, "k.column_name"),
    POSITION=(INTEGER, "k.position"),
    CONSTRAINT_NAME=(_NAME, "k.name"),
    IS_PRIMARY_KEY=(_FLAG, _flag("k.primary_key")),
    IS_UNIQUE_KEY=(_FLAG, _flag("k.keyed")),
    CHECK_CONDITION=(_TEXT, "k.condition"),
)

_REFERENTIAL_CONSTRAINTS = view(
    "FROM owl_references f JOIN owl_visible r ON r.id = f.relation JOIN owl_visible p ON p.id = f.parent",
    SCHEMA_NAME=(_NAME, "r.schema"),
    TABLE_NAME=(_NAME, "r.name"),
    COLUMN_NAME=(_NAME, "f.column_name"),
    POSITION=(INTEGER, "f.position"),
    CONSTRAINT_NAME=(_NAME, "f.name"),
    REFERENCED_SCHEMA_NAME=(_NAME, "p.schema"),
    REFERENCED_TABLE_NAME=(_NAME, "p.name"),
    REFERENCED_COLUMN_NAME=(_NAME, "f.parent_column"),
    REFERENCED_CONSTRAINT_NAME=(
        _NAME,
        "(SELECT k.name FROM owl_constraints k WHERE k.relation = f.parent AND k.column_name = f.parent_column"
        " ORDER BY k.primary_key DESC LIMIT 1)",
    ),
    UPDATE_RULE=(nvarchar(11), "f.on_update"),
    DELETE_RULE=(nvarchar(11), "f.on_delete"),
)

_SEQUENCES = view(
    "FROM owl_sequences s",
    SCHEMA_NAME=(_NAME, "s.schema"),
    SEQUENCE_NAME=(_NAME, "s.name"),
    SEQUENCE_OID=(BIGINT, "s.id"),
    START_NUMBER=(BIGINT, "s.start"),
    MIN_VALUE=(BIGINT, "s.minimum"),
    MAX_VALUE=(BIGINT, "s.maximum"),
    INCREMENT_BY=(BIGINT, "s.increment"),
    IS_CYCLED=(_FLAG, _flag("s.cycles")),
    RESET_BY_QUERY=(_TEXT, "s.reset_by"),
    CACHE_SIZE=(BIGINT, "s.cache"),
    CREATE_TIME=(TIMESTAMP, "s.created"),
)

_SYNONYMS = view(
    "FROM owl_synonyms y LEFT JOIN owl_visible r ON r.schema = y.object_schema AND r.name = y.object_name"
    " WHERE y.object_schema <> 'SYS'",
    SCHEMA_NAME=(_NAME, "y.schema"),
    SYNONYM_NAME=(_NAME, "y.name"),
    OBJECT_SCHEMA=(_NAME, "y.object_schema"),
    OBJECT_NAME=(_NAME, "y.object_name"),
    OBJECT_TYPE=(nvarchar(16), "r.kind"),
    IS_VALID=(_FLAG, _flag("r.id IS NOT NULL")),
    CREATE_TIME=(TIMESTAMP, "y.created"),
)

_TEMPORARY_TABLES = view(
    "FROM owl_visible r WHERE r.temporary IS NOT NULL",
    SCHEMA_NAME=(_NAME, "r.schema"),
    TABLE_NAME=(_NAME, "r.name"),
    TEMPORARY_TABLE_TYPE=(nvarchar(16), "r.temporary"),
    TABLE_TYPE=(nvarchar(16), "r.store"),
    CONNECTION_ID=(INTEGER, "hana_current_connection()"),
    CREATE_TIME=(TIMESTAMP, "r.created"),
)
"""HANA lists those of other connections too; here a session sees its own."""

_TRIGGERS = view(
    "FROM owl_triggers g JOIN owl_visible r ON r.id = g.relation",
    SCHEMA_NAME=(_NAME, "g.schema"),
    TRIGGER_NAME=(_NAME, "g.name"),
    TRIGGER_OID=(BIGINT, "g.id"),
    OWNER_NAME=(_NAME, "g.owner"),
    SUBJECT_TABLE_SCHEMA=(_NAME, "r.schema"),
    SUBJECT_TABLE_NAME=(_NAME, "r.name"),
    TRIGGER_ACTION_TIME=(nvarchar(16), "g.timing"),
    TRIGGER_EVENT=(nvarchar(32), "replace(g.events, ',', ' OR ')"),
    TRIGGERED_ACTION_LEVEL=(nvarchar(16), "'ROW'"),
    DEFINITION=(NCLOB, "g.definition"),
    IS_VALID=(_FLAG, _flag("g.valid")),
    IS_ENABLED=(_FLAG, _flag("g.enabled")),
    CREATE_TIME=(TIMESTAMP, "g.created"),
)

VIEWS: dict[str, SystemView] = {
    "CONSTRAINTS": _CONSTRAINTS,
    "REFERENTIAL_CONSTRAINTS": _REFERENTIAL_CONSTRAINTS,
    "SEQUENCES": _SEQUENCES,
    "SYNONYMS": _SYNONYMS,
    "TRIGGERS": _TRIGGERS,
    "M_TEMPORARY_TABLES": _TEMPORARY_TABLES,
}
