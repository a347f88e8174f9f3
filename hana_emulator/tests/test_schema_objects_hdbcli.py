"""Constraints, sequences, temporary tables, ALTER TABLE and EXPLAIN as the real hdbcli meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hdbcli import dbapi

from hana_emulator.testing import Emulator


@pytest.fixture
def second(emulator: Emulator, hana_schema: str) -> Iterator[Any]:
    """Another connection to the same schema; it commits by itself."""
    connection = emulator.connect(currentSchema=hana_schema, autocommit=True)
    yield connection
    connection.close()


def code_of(action: Callable[[], object]) -> int:
    with pytest.raises(dbapi.Error) as caught:
        action()
    return int(caught.value.errorcode)


def rows(connection: Any, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return [tuple(row) for row in cursor.fetchall()]


def test_constraints(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE TABLE P (A INTEGER PRIMARY KEY)")
    cursor.execute(
        "CREATE TABLE C (ID INTEGER, A INTEGER REFERENCES P ON DELETE CASCADE, CONSTRAINT CK CHECK (ID > 0))"
    )
    cursor.executemany("INSERT INTO P VALUES (?)", [(1,), (2,)])
    hana.commit()
    assert code_of(lambda: cursor.executemany("INSERT INTO C VALUES (?, ?)", [(1, 1), (2, 3)])) == 461
    assert code_of(lambda: cursor.execute("INSERT INTO C VALUES (?, ?)", (0, 1))) == 677
    cursor.execute("INSERT INTO C VALUES (?, ?)", (1, 1))
    assert code_of(lambda: cursor.execute("UPDATE P SET A = 9 WHERE A = 1")) == 462
    cursor.execute("DELETE FROM P WHERE A = 1")
    assert cursor.rowcount == 1
    assert rows(hana, "SELECT * FROM C") == []
    hana.rollback()
    assert rows(hana, "SELECT A FROM P ORDER BY A") == [(1,), (2,)]


def test_sequences(hana: Any, second: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE SEQUENCE Q START WITH 100")
    cursor.execute("CREATE TABLE T (A BIGINT, B NVARCHAR(3))")
    cursor.executemany("INSERT INTO T VALUES (Q.NEXTVAL, ?)", [("a",), ("b",)])
    assert rows(second, "SELECT Q.NEXTVAL FROM DUMMY") == [(102,)]
    assert rows(hana, "SELECT Q.CURRVAL FROM DUMMY") == [(101,)]
    hana.rollback()
    assert rows(hana, "SELECT Q.NEXTVAL FROM DUMMY") == [(103,)]
    cursor.execute("DROP SEQUENCE Q")
    assert code_of(lambda: cursor.execute("SELECT Q.NEXTVAL FROM DUMMY")) == 313


def test_temporary_tables(hana: Any, second: Any, emulator: Emulator, hana_schema: str) -> None:
    cursor = hana.cursor()
    cursor.execute('CREATE LOCAL TEMPORARY COLUMN TABLE "#T" (A INTEGER, B NVARCHAR(5))')
    cursor.execute("CREATE GLOBAL TEMPORARY TABLE G (A INTEGER)")
    cursor.executemany("INSERT INTO #T VALUES (?, ?)", [(1, "a"), (2, "b")])
    cursor.execute("INSERT INTO G SELECT A FROM #T")
    hana.commit()
    assert rows(hana, "SELECT COUNT(*) FROM #T") == rows(hana, "SELECT COUNT(*) FROM G") == [(2,)]
    assert code_of(lambda: rows(second, 'SELECT * FROM "#T"')) == 259
    assert rows(second, "SELECT * FROM G") == []
    third = emulator.connect(currentSchema=hana_schema, autocommit=True)
    third.cursor().execute("CREATE LOCAL TEMPORARY TABLE #T (X DATE)")
    assert rows(third, "SELECT * FROM #T") == []
    third.close()
    cursor.execute("DROP TABLE #T")
    assert code_of(lambda: cursor.execute("SELECT * FROM #T")) == 259


def test_a_statement_prepared_before_an_alteration(hana: Any, second: Any) -> None:
    cursor = second.cursor()
    cursor.execute("CREATE TABLE T (A INTEGER, B NVARCHAR(9))")
    cursor.execute("INSERT INTO T VALUES (?, ?)", (1, "one"))
    cursor.execute("SELECT * FROM T WHERE A = ?", (1,))
    hana.cursor().execute("ALTER TABLE T ADD (C DECIMAL(5,2) DEFAULT 1.5 NOT NULL)")
    hana.cursor().execute("ALTER TABLE T ALTER (B NVARCHAR(50))")
    cursor.execute("INSERT INTO T (A, B) VALUES (?, ?)", (2, "a text of more than nine"))
    assert code_of(lambda: cursor.execute("INSERT INTO T VALUES (?, ?)", (3, "x"))) == 268
    assert [len(row) for row in rows(second, "SELECT * FROM T ORDER BY A")] == [3, 3]
    hana.cursor().execute("RENAME TABLE T TO U")
    assert code_of(lambda: cursor.execute("INSERT INTO T (A, B) VALUES (?, ?)", (2, "x"))) == 259
    assert len(rows(second, "SELECT * FROM U")) == 2


def test_explain_plan(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE TABLE T (ID INTEGER, V REAL_VECTOR(2))")
    search = "SELECT TOP 3 ID FROM T ORDER BY COSINE_SIMILARITY(V, TO_REAL_VECTOR(?)) DESC"
    plan = "SELECT OPERATOR_NAME, OPERATOR_DETAILS FROM EXPLAIN_PLAN_TABLE WHERE STATEMENT_NAME = ? ORDER BY LEVEL DESC"
    cursor.execute(f"EXPLAIN PLAN SET STATEMENT_NAME = 'before' FOR {search}")
    cursor.execute("CREATE HNSW VECTOR INDEX H ON T (V) SIMILARITY FUNCTION COSINE_SIMILARITY ONLINE")
    cursor.execute(f"EXPLAIN PLAN SET STATEMENT_NAME = 'after' FOR {search}")
    cursor.execute(f"EXPLAIN PLAN SET STATEMENT_NAME = 'hint' FOR {search} WITH HINT (NO_VECTOR_INDEX)")
    leaves = {name: rows(hana, plan, name)[0] for name in ("before", "after", "hint")}
    assert {name: leaf[0] for name, leaf in leaves.items()} == {
        "before": "COLUMN TABLE", "after": "HNSW INDEX SEARCH", "hint": "COLUMN TABLE",
    }  # fmt: skip
    assert "no HNSW index" in leaves["before"][1]
    assert "emulator: computed exactly" in leaves["after"][1]
    assert code_of(lambda: cursor.execute("CREATE HNSW VECTOR INDEX H ON T (V) SIMILARITY FUNCTION L2DISTANCE")) == 289
    written = sum(len(rows(hana, plan, name)) for name in leaves)
    cursor.execute("DELETE FROM EXPLAIN_PLAN_TABLE")
    assert cursor.rowcount == written == 6


def test_views_over_views_and_synonyms(hana: Any) -> None:
    cursor = hana.cursor()
    cursor.execute("CREATE TABLE T (A INTEGER, B NVARCHAR(5))")
    cursor.execute("INSERT INTO T VALUES (1, 'x')")
    cursor.execute("CREATE VIEW V (K, TEXT) AS SELECT A, B FROM T")
    cursor.execute("CREATE OR REPLACE VIEW W AS SELECT TEXT, K + 1 AS K FROM V")
    cursor.execute("CREATE SYNONYM Y FOR W")
    assert rows(hana, "SELECT K, TEXT FROM Y") == [(2, "x")]
    cursor.execute("RENAME COLUMN T.B TO C")
    assert code_of(lambda: cursor.execute("SELECT * FROM Y")) == 391
    assert code_of(lambda: cursor.execute("DROP TABLE T RESTRICT")) == 419
    cursor.execute("DROP TABLE T CASCADE")
    assert code_of(lambda: cursor.execute("SELECT * FROM Y")) == 259


@pytest.mark.parametrize("text", ["CALL SYS.ANY_PROCEDURE(?)", "DO BEGIN SELECT 1 FROM DUMMY; END"])
def test_procedures_stay_refused(hana: Any, text: str) -> None:
    assert code_of(lambda: hana.cursor().execute(text)) == 7
