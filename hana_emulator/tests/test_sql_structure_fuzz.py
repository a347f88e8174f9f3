"""Random changes of structure: each works or is refused with a code, and the catalogue always tells what SQLite has."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulator_sql import Sql
from hana_emulator.errors import HanaError

TABLES, COLUMNS = st.sampled_from(["A", "B", "A", "B", "#L", "G"]), st.sampled_from(["X", "Y", "Z"])
KINDS = st.sampled_from(["INTEGER", "NVARCHAR(5)", "DECIMAL(5,2)", "REAL_VECTOR(2)", "NCLOB", "DATE"])
EXTRAS = st.sampled_from(["", "NOT NULL", "DEFAULT 1", "UNIQUE", "PRIMARY KEY", "CHECK ({c} > 0)", "REFERENCES A"])
SHAPES = st.sampled_from(
    [
        "CREATE TABLE {t} ({c} {k} {e}, W INTEGER)",
        "CREATE LOCAL TEMPORARY TABLE {t} ({c} {k} {e}, W INTEGER)",
        "CREATE GLOBAL TEMPORARY TABLE {t} ({c} {k} {e}, W INTEGER)",
        "CREATE TABLE {u} LIKE {t}",
        "DROP TABLE {t}",
        "DROP TABLE {t} CASCADE",
        "RENAME TABLE {t} TO {u}",
        "RENAME COLUMN {t}.{c} TO {d}",
        "ALTER TABLE {t} ADD ({c} {k} {e})",
        "ALTER TABLE {t} ALTER ({c} {k} NULL)",
        "ALTER TABLE {t} DROP ({c})",
        "ALTER TABLE {t} ADD PRIMARY KEY ({c})",
        "ALTER TABLE {t} DROP PRIMARY KEY",
        "ALTER TABLE {t} ADD CONSTRAINT N{c} UNIQUE ({c}, {d})",
        "ALTER TABLE {t} ADD CONSTRAINT F{c} FOREIGN KEY ({c}) REFERENCES {u} ON DELETE CASCADE ON UPDATE SET NULL",
        "ALTER TABLE {t} ADD CONSTRAINT C{c} CHECK ({c} IS NOT NULL OR {d} > W)",
        "ALTER TABLE {t} DROP CONSTRAINT F{c}",
        "CREATE INDEX I{c} ON {t} ({c}, {d} DESC)",
        "DROP INDEX I{c}",
        "CREATE OR REPLACE VIEW V AS SELECT {c}, W FROM {t}",
        "INSERT INTO {t} ({c}, W) VALUES ('1', 2)",
        "UPDATE {t} SET {c} = {d}, W = W + 1",
        "INSERT INTO {t} SELECT * FROM {t}",
        "DELETE FROM {t} WHERE W > 2",
        "DELETE FROM {t}",
        "TRUNCATE TABLE {t}",
        "CREATE SYNONYM {u} FOR {t}",
        "DROP SYNONYM {t}",
    ]
)
STATEMENTS = st.builds(
    lambda shape, e, **parts: shape.replace("{e}", e).format(**parts),
    SHAPES, EXTRAS, t=TABLES, u=TABLES, c=COLUMNS, d=COLUMNS, k=KINDS,
)  # fmt: skip
PLAUSIBLE = {
    7, 257, 259, 260, 261, 264, 266, 268, 272, 274, 276, 287, 288, 289, 294, 301, 303, 308, 311, 314, 315, 330, 339,
    350, 351, 362, 365, 366, 367, 368, 391, 397, 417, 419, 457, 461, 462, 510, 677, 20004,
}  # fmt: skip


START = [
    "DROP SCHEMA S CASCADE",
    "CREATE SCHEMA S",
    "CREATE TABLE A (X INTEGER PRIMARY KEY, Y NVARCHAR(5), W INTEGER)",
    "CREATE TABLE B (Y INTEGER REFERENCES A ON DELETE CASCADE ON UPDATE SET NULL, Z NCLOB, W INTEGER CHECK (W < 5))",
    "CREATE LOCAL TEMPORARY TABLE #L (X INTEGER, Z DECIMAL(5,2), W INTEGER)",
    "CREATE GLOBAL TEMPORARY TABLE G (X INTEGER PRIMARY KEY, Y NCLOB, W INTEGER)",
    "INSERT INTO A VALUES (1, 'a', 1)",
    "INSERT INTO B VALUES (1, 'b', 2)",
]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STATEMENTS, min_size=4, max_size=25))
def test_the_catalogue_and_sqlite_agree(sql: Sql, statements: list[str]) -> None:
    for text in START:
        sql.run(text)
    for text in statements:
        failure = refused(sql, text)
        assert failure is None or failure.code in PLAUSIBLE, (text, str(failure))
        agree(sql)


def refused(sql: Sql, text: str) -> HanaError | None:
    try:
        sql.run(text)
    except HanaError as error:
        return error
    return None


def agree(sql: Sql) -> None:
    """Every table of the catalogue reads as it is described, and SQLite holds no constraint that it does not know."""
    catalog = sql.session._database.catalog.seen_by(sql.session.connection_id)
    connection = sql.session._connection
    for relation in catalog.relations.values():
        if not relation.is_view:
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({relation.sqlite_name})")]
            hidden = relation.is_shared_by_sessions + bool(relation.next_row_id)
            assert len(names) == len(relation.columns) + hidden
            sql.rows(f"SELECT * FROM {relation.schema}.{relation.name}")
    tables = {relation.id: relation for relation in catalog.relations.values()}
    triggers = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'")]
    watched = [name for name in triggers if name.startswith("owl_touched ")]
    assert len(watched) == 2 * sum(not relation.is_view for relation in tables.values())
    triggers = [name for name in triggers if name not in watched]
    counted = {number: 2 * len(table.checks) + 4 * len(table.references) for number, table in tables.items()}
    assert len(triggers) == sum(counted.values())
    assert all(int(re.match(r"owl trigger (\d+) ", name)[1]) in tables for name in triggers)  # type: ignore[index]
