"""FOREIGN KEY, CHECK, UNIQUE and NOT NULL: what they refuse, with which code, and what their actions do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulator_sql import Sql, vector
from hana_emulator.errors import HanaError
from hana_emulator.sql.database import Database

ACTIONS = ["CASCADE", "RESTRICT", "SET NULL", "SET DEFAULT"]


def with_family(sql: Sql) -> Sql:
    """P with keys 1, 2, 9 and 'a', 'b', 'z'; C refers to both."""
    sql.run("CREATE TABLE P (A INTEGER PRIMARY KEY, B NVARCHAR(5) UNIQUE)")
    sql.run(
        "CREATE TABLE C (ID INTEGER PRIMARY KEY, X INTEGER REFERENCES P, Y NVARCHAR(5),"
        " CONSTRAINT BY_B FOREIGN KEY (Y) REFERENCES P (B) ON DELETE RESTRICT)"
    )
    sql.many("INSERT INTO P VALUES (?, ?)", [(1, "a"), (2, "b"), (9, "z")])
    sql.run("INSERT INTO C VALUES (1, 1, 'a')")
    return sql


@pytest.fixture
def family(sql: Sql) -> Sql:
    return with_family(sql)


@pytest.fixture(scope="module")
def refusing(shared: Sql) -> Sql:
    with_family(shared)
    shared.run("CREATE TABLE NOKEY (A INTEGER)")
    shared.run("CREATE TABLE NUMBERS (A INTEGER PRIMARY KEY)")
    return shared


ORPHANS = [
    ("INSERT INTO C VALUES (2, 3, 'a')", ()),
    ("INSERT INTO C VALUES (2, ?, ?)", (1, "q")),
    ("INSERT INTO C SELECT ID + 1, 7, Y FROM C", ()),
    ("UPDATE C SET X = 3", ()),
    ("UPDATE C SET Y = 'q' WHERE ID = 1", ()),
    ("UPSERT C VALUES (1, 5, 'a') WITH PRIMARY KEY", ()),
    ("UPSERT C VALUES (8, 5, 'a') WITH PRIMARY KEY", ()),
    ("UPSERT C VALUES (1, 5, 'a') WHERE ID = 1", ()),
    ("MERGE INTO C USING P ON C.ID = P.A WHEN MATCHED THEN UPDATE SET X = 77", ()),
    ("MERGE INTO C USING P ON C.ID = P.A WHEN NOT MATCHED THEN INSERT (ID, X, Y) VALUES (P.A, 77, NULL)", ()),
]
USED = [
    "DELETE FROM P WHERE A = 1",
    "DELETE FROM P",
    "UPDATE P SET A = 5 WHERE A = 1",
    "UPDATE P SET B = 'c' WHERE A = 1",
    "UPSERT P VALUES (1, 'c') WITH PRIMARY KEY",
    "MERGE INTO P USING C ON P.A = C.X WHEN MATCHED THEN DELETE",
    "TRUNCATE TABLE P",
]


@pytest.mark.parametrize(("text", "row"), ORPHANS)
def test_a_row_needs_its_parent(refusing: Sql, text: str, row: tuple[Any, ...]) -> None:
    assert refusing.code(text, *row) == 461
    assert refusing.rows("SELECT * FROM C") == [(1, 1, "a")]


@pytest.mark.parametrize("text", USED)
def test_a_row_that_is_referred_to_stays(refusing: Sql, text: str) -> None:
    assert refusing.code(text) == 462
    assert refusing.column("SELECT A FROM P ORDER BY A") == [1, 2, 9]


def test_what_breaks_no_reference_goes(family: Sql) -> None:
    family.run("DELETE FROM P WHERE A = 2")
    family.run("UPDATE P SET A = 1, B = 'a' WHERE A = 1")
    family.run("INSERT INTO C VALUES (2, NULL, NULL)")
    family.run("UPDATE C SET X = NULL, Y = NULL WHERE ID = 1")
    assert family.run("DELETE FROM P") == 2


def test_a_batch_is_refused_as_a_whole(family: Sql) -> None:
    family.autocommit = False
    family.run("INSERT INTO P VALUES (3, 'c')")
    statement = family.prepare("INSERT INTO C VALUES (?, ?, NULL)")
    with pytest.raises(HanaError) as caught:
        family.session.execute(statement, [(2, 3), (3, 4), (4, 2)], autocommit=False)
    assert (caught.value.code, caught.value.rolls_back) == (461, False)
    assert family.column("SELECT ID FROM C") == [1]
    assert family.value("SELECT COUNT(*) FROM P WHERE A = 3") == 1


AFTER_DELETE = {
    "CASCADE": [(2, 2)],
    "SET NULL": [(1, None), (2, 2)],
    "SET DEFAULT": [(1, 9), (2, 2)],
    "RESTRICT": [(1, 1), (2, 2)],
}
AFTER_UPDATE = {**AFTER_DELETE, "CASCADE": [(1, 5), (2, 2)]}


@pytest.mark.parametrize("action", ACTIONS)
def test_actions(sql: Sql, action: str) -> None:
    sql.run("CREATE TABLE P (A INTEGER PRIMARY KEY)")
    sql.run(
        "CREATE TABLE C (ID INTEGER, X INTEGER DEFAULT 9,"
        f" FOREIGN KEY (X) REFERENCES P (A) ON UPDATE {action} ON DELETE {action})"
    )
    for text, expected in (
        ("UPDATE P SET A = 5 WHERE A = 1", AFTER_UPDATE),
        ("DELETE FROM P WHERE A = 1", AFTER_DELETE),
    ):
        sql.run("DELETE FROM C")
        sql.run("DELETE FROM P")
        sql.many("INSERT INTO P VALUES (?)", [(1,), (2,), (9,)])
        sql.many("INSERT INTO C VALUES (?, ?)", [(1, 1), (2, 2)])
        if action == "RESTRICT":
            assert sql.code(text) == 462
        else:
            assert sql.run(text) == 1, "rows of the actions do not count"
        assert sql.rows("SELECT ID, X FROM C ORDER BY ID") == expected[action]


def test_set_default_needs_the_default_to_exist(sql: Sql) -> None:
    sql.run("CREATE TABLE P (A INTEGER PRIMARY KEY)")
    sql.run("CREATE TABLE C (X INTEGER DEFAULT 9 REFERENCES P ON DELETE SET DEFAULT)")
    sql.run("INSERT INTO P VALUES (1)")
    sql.run("INSERT INTO C VALUES (1)")
    assert sql.code("DELETE FROM P") == 461
    assert sql.rows("SELECT * FROM C") == [(1,)]


def test_composite_keys(sql: Sql) -> None:
    sql.run("CREATE TABLE P (A INTEGER, D DECIMAL(5,2), PRIMARY KEY (A, D))")
    sql.run("CREATE TABLE C (D DECIMAL(5,2), A INTEGER, FOREIGN KEY (A, D) REFERENCES P ON UPDATE CASCADE)")
    sql.run("INSERT INTO P VALUES (1, 1.5)")
    sql.run("INSERT INTO C VALUES (?, ?)", "1.50", 1)
    sql.run("INSERT INTO C VALUES (7, NULL)")
    assert sql.code("INSERT INTO C VALUES (1.51, 1)") == 461
    sql.run("UPDATE P SET D = 2")
    assert sql.rows("SELECT * FROM C ORDER BY D") == [("2.00", 1), ("7.00", None)]
    rows = sql.rows(
        "SELECT COLUMN_NAME, POSITION, REFERENCED_TABLE_NAME, REFERENCED_COLUMN_NAME, UPDATE_RULE, DELETE_RULE"
        " FROM SYS.REFERENTIAL_CONSTRAINTS WHERE TABLE_NAME = 'C' ORDER BY POSITION"
    )
    assert rows == [("A", 1, "P", "A", "CASCADE", "RESTRICT"), ("D", 2, "P", "D", "CASCADE", "RESTRICT")]


def test_a_table_that_refers_to_itself(sql: Sql) -> None:
    sql.run("CREATE TABLE T (ID INTEGER PRIMARY KEY, BOSS INTEGER REFERENCES T ON DELETE CASCADE)")
    sql.many("INSERT INTO T VALUES (?, ?)", [(1, 1), (2, 1), (3, 2), (4, 3), (5, None)])
    assert sql.code("INSERT INTO T VALUES (6, 7)") == 461
    assert sql.run("DELETE FROM T WHERE ID = 2") == 1
    assert sql.column("SELECT ID FROM T ORDER BY ID") == [1, 5]


def test_an_action_is_seen_by_vector_searches(sql: Sql) -> None:
    """The cached matrix of the child must go with rows that only a foreign key's action removed."""
    sql.run("CREATE TABLE P (A INTEGER PRIMARY KEY)")
    sql.run("CREATE TABLE C (X INTEGER REFERENCES P ON DELETE CASCADE, V REAL_VECTOR(2))")
    sql.many("INSERT INTO P VALUES (?)", [(1,), (2,)])
    sql.many("INSERT INTO C VALUES (?, ?)", [(1, vector(1, 0)), (2, vector(0, 1))])
    search = "SELECT TOP 2 X FROM C ORDER BY COSINE_SIMILARITY(V, TO_REAL_VECTOR('[1,0]')) DESC"
    assert sql.column(search) == [1, 2]
    sql.run("DELETE FROM P WHERE A = 1")
    sql.run("INSERT INTO P VALUES (1)")
    assert sql.column(search) == [2]


REFUSED = [
    ("CREATE TABLE X (A INTEGER REFERENCES NOSUCH)", 259),
    ("CREATE TABLE X (A INTEGER REFERENCES P (NOSUCH))", 260),
    ("CREATE TABLE X (A INTEGER, FOREIGN KEY (NOSUCH) REFERENCES P)", 260),
    ("CREATE TABLE X (A INTEGER REFERENCES NOKEY)", 366),
    ("CREATE TABLE X (A INTEGER REFERENCES NOKEY (A))", 365),
    ("CREATE TABLE X (A INTEGER, B INTEGER, FOREIGN KEY (A, B) REFERENCES P (A))", 367),
    ("CREATE TABLE X (A NVARCHAR(5) REFERENCES P (A))", 266),
    ("CREATE TABLE X (A INTEGER REFERENCES P ON DELETE NOTHING)", 257),
    ("CREATE TABLE X (A INTEGER, CONSTRAINT K CHECK (A > 1), CONSTRAINT K CHECK (A > 2))", 457),
    ("CREATE TABLE X (A INTEGER, CONSTRAINT K PRIMARY KEY (A), CONSTRAINT K CHECK (A > 2))", 457),
    ("CREATE TABLE X (A INTEGER CHECK (NOSUCH > 1))", 260),
    ("CREATE TABLE X (A INTEGER CHECK (A > ?))", 7),
    ("CREATE TABLE X (A INTEGER CHECK (COUNT(*) > 1))", 257),
    ("CREATE TABLE X (A INTEGER CHECK (A > Q.NEXTVAL))", 7),
    ("CREATE TABLE X (A INTEGER CHECK (A + 1))", 257),
    ("CREATE TABLE X (A INTEGER CHECK ())", 257),
    ("CREATE TABLE X (A INTEGER CHECK (A IN (SELECT A FROM P)))", 7),
    ("ALTER TABLE C ADD CONSTRAINT BY_B CHECK (ID > 0)", 457),
    ("ALTER TABLE C ADD CHECK (ID > 1)", 677),
    ("ALTER TABLE C ADD FOREIGN KEY (ID) REFERENCES NUMBERS", 461),
    ("ALTER TABLE C ADD CONSTRAINT U UNIQUE (NOSUCH)", 260),
    ("ALTER TABLE C DROP CONSTRAINT NOSUCH", 397),
    ("ALTER TABLE P DROP PRIMARY KEY", 417),
    ("ALTER TABLE P DROP (B)", 417),
    ("ALTER TABLE P ALTER (A NVARCHAR(5))", 266),
    ("DROP TABLE P", 417),
    ("DROP TABLE P RESTRICT", 419),
]


@pytest.mark.parametrize(("text", "code"), REFUSED)
def test_refused_constraints_leave_the_catalogue(
    refusing: Sql, shared_database: Database, text: str, code: int
) -> None:
    before = shared_database.catalog
    assert refusing.code(text) == code
    assert shared_database.catalog is before
    assert refusing.code("DELETE FROM P") == 462
    assert refusing.code("INSERT INTO C VALUES (2, 3, 'a')") == 461


def test_drop_cascade_takes_the_foreign_keys_along(family: Sql) -> None:
    family.run("CREATE VIEW V AS SELECT A FROM P")
    family.run("DROP TABLE P CASCADE")
    assert family.rows("SELECT * FROM SYS.REFERENTIAL_CONSTRAINTS") == []
    assert family.code("SELECT * FROM V") == 259
    family.run("INSERT INTO C VALUES (2, 99, 'q')")


CHECKS = [
    ("A > 0", 1, 0),
    ("A > 0 AND B IN ('x', 'y')", 1, -5),
    ("LENGTH(B) < 3 OR A BETWEEN 3 AND 5", 3, 9),
    ("B <> 'abc' OR A IS NULL OR A = 3", 3, 4),
]


@pytest.mark.parametrize(("condition", "good", "bad"), CHECKS)
def test_check(sql: Sql, condition: str, good: int, bad: int) -> None:
    sql.run(f"CREATE TABLE T (A INTEGER, B NVARCHAR(5) DEFAULT 'abc', CONSTRAINT CK CHECK ({condition}))")
    if "IN (" in condition:
        sql.run("ALTER TABLE T ALTER (B NVARCHAR(5) DEFAULT 'x')")
    sql.run("INSERT INTO T (A) VALUES (?)", good)
    assert sql.code("INSERT INTO T (A) VALUES (?)", bad) == 677
    assert sql.code("UPDATE T SET A = ?", bad) == 677
    assert sql.code("UPSERT T (A) VALUES (?) WHERE A = ?", bad, good) == 677
    sql.run("INSERT INTO T VALUES (NULL, NULL)")
    assert sql.column("SELECT A FROM T WHERE A IS NOT NULL") == [good]
    found = sql.rows("SELECT CONSTRAINT_NAME, CHECK_CONDITION FROM SYS.CONSTRAINTS WHERE CHECK_CONDITION IS NOT NULL")
    assert found == [("CK", condition)]
    sql.run("ALTER TABLE T DROP CONSTRAINT CK")
    sql.run("INSERT INTO T (A) VALUES (?)", bad)


def test_a_check_follows_its_columns(sql: Sql) -> None:
    sql.run('CREATE TABLE T (A INTEGER, "b" NVARCHAR(5), CHECK (A > 0 AND "b" <> \'A\'))')
    sql.run('RENAME COLUMN T.A TO "New name"')
    sql.run("RENAME TABLE T TO U")
    assert sql.code("INSERT INTO U VALUES (-1, 'x')") == 677
    assert sql.code("INSERT INTO U VALUES (1, 'A')") == 677, "the literal 'A' is no column"
    assert sql.code('ALTER TABLE U DROP ("b")') == 351
    sql.run("CREATE TABLE W (A INTEGER, B INTEGER CHECK (B > 0))")
    sql.run("ALTER TABLE W DROP (B)")
    assert sql.rows("SELECT * FROM SYS.CONSTRAINTS WHERE TABLE_NAME = 'W'") == []


def test_constraints_are_named_as_in_the_catalogue_of_hana(family: Sql) -> None:
    family.run("CREATE TABLE N (A INTEGER, CONSTRAINT KEY_OF_N PRIMARY KEY (A), B INTEGER CONSTRAINT ONE UNIQUE)")
    found = family.rows(
        "SELECT CONSTRAINT_NAME, COLUMN_NAME, IS_PRIMARY_KEY, IS_UNIQUE_KEY FROM SYS.CONSTRAINTS"
        " WHERE TABLE_NAME = 'N' ORDER BY 1"
    )
    assert found == [("KEY_OF_N", "A", "TRUE", "TRUE"), ("ONE", "B", "FALSE", "TRUE")]
    names = family.column("SELECT CONSTRAINT_NAME FROM SYS.REFERENTIAL_CONSTRAINTS ORDER BY 1")
    assert names[0] == "BY_B"
    assert names[1].startswith("_SYS_CONSTRAINT_")
    assert family.code("INSERT INTO N VALUES (NULL, 1)") == 287
    family.run("INSERT INTO N VALUES (1, 1)")
    assert family.code("INSERT INTO N VALUES (2, 1)") == 301


def test_other_tables_keep_their_constraints_while_one_is_altered(family: Sql) -> None:
    """Also where one table's id begins with another's: 1 and 11."""
    for number in range(12):
        family.run(f"CREATE TABLE T{number} (A INTEGER CHECK (A > 0), P INTEGER REFERENCES P)")
    family.run("ALTER TABLE T0 ADD (B INTEGER)")
    family.run("DROP TABLE T1")
    family.run("ALTER TABLE P ADD (MORE INTEGER)")
    for number in (0, *range(2, 12)):
        assert family.code(f"INSERT INTO T{number} (A, P) VALUES (0, 1)") == 677
        assert family.code(f"INSERT INTO T{number} (A, P) VALUES (1, 5)") == 461
        family.run(f"INSERT INTO T{number} (A, P) VALUES (1, 1)")
    assert family.code("DELETE FROM P WHERE A = 1") == 462


KEYS = st.integers(0, 3)
STEP = st.one_of(
    st.tuples(st.just("parent"), KEYS, KEYS),
    st.tuples(st.just("child"), KEYS, st.none() | KEYS),
    st.tuples(st.just("move"), KEYS, KEYS),
    st.tuples(st.just("remove"), KEYS, KEYS),
    st.tuples(st.just("turn"), KEYS, st.none() | KEYS),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEP, max_size=12), st.sampled_from(ACTIONS), st.sampled_from(ACTIONS))
def test_against_a_model(sql: Sql, steps: list[tuple[str, int, int | None]], on_delete: str, on_update: str) -> None:
    """Random writes leave what a model in Python says, and never a child without its parent."""
    for table in ("C", "P"):
        sql.run(f"DROP TABLE IF EXISTS {table}")
    sql.run("CREATE TABLE P (A INTEGER PRIMARY KEY)")
    rules = f"ON DELETE {on_delete} ON UPDATE {on_update}"
    sql.run(f"CREATE TABLE C (ID INTEGER PRIMARY KEY, X INTEGER DEFAULT 3, FOREIGN KEY (X) REFERENCES P {rules})")
    model = Model(on_delete, on_update)
    texts = {
        "parent": "INSERT INTO P SELECT ? FROM DUMMY WHERE ? >= 0",
        "child": "INSERT INTO C VALUES (?, ?)",
        "move": "UPDATE P SET A = ? WHERE A = ?",
        "remove": "DELETE FROM P WHERE A = ? AND ? >= 0",
        "turn": "UPDATE C SET X = ? WHERE ID = ?",
    }
    for kind, first, second in steps:
        row = (second, first) if kind in ("move", "turn") else (first, second)
        failure = model.apply(kind, first, second)
        if failure:
            assert sql.code(texts[kind], *row) == failure
        else:
            sql.run(texts[kind], *row)
        assert set(sql.column("SELECT A FROM P")) == model.parents
        assert dict(sql.rows("SELECT ID, X FROM C")) == model.children


@dataclass
class Model:
    """Parents by key, children by id; what a write does to them, or the code that it fails with."""

    on_delete: str
    on_update: str
    parents: set[int] = field(default_factory=set)
    children: dict[int, int | None] = field(default_factory=dict)

    def apply(self, kind: str, first: int, second: int | None) -> int:
        before = (set(self.parents), dict(self.children))
        failure = getattr(self, kind)(first, second)
        if not failure and any(x is not None and x not in self.parents for x in self.children.values()):
            failure = 461
        if failure:
            self.parents, self.children = before
        return int(failure)

    def parent(self, key: int, _: int) -> int:
        taken = key in self.parents
        self.parents.add(key)
        return 301 if taken else 0

    def child(self, number: int, key: int | None) -> int:
        if number in self.children:
            return 301
        self.children[number] = key
        return 0

    def turn(self, number: int, key: int | None) -> int:
        if number in self.children:
            self.children[number] = key
        return 0

    def remove(self, key: int, _: int) -> int:
        if key not in self.parents:
            return 0
        self.parents.discard(key)
        return self._follow(self.on_delete, key, None)

    def move(self, key: int, new: int) -> int:
        if key not in self.parents or key == new:
            return 0
        if new in self.parents:
            return 301
        self.parents = self.parents - {key} | {new}
        return self._follow(self.on_update, key, new)

    def _follow(self, action: str, key: int, new: int | None) -> int:
        used = [number for number, x in self.children.items() if x == key]
        for number in used:
            if action == "RESTRICT":
                return 462
            if action == "CASCADE" and new is None:
                del self.children[number]
            else:
                self.children[number] = {"CASCADE": new, "SET NULL": None, "SET DEFAULT": 3}[action]
        return 0
