"""Users, roles and grants of the emulator: who gets 258 and who does not, who is locked out, and what the views say."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator_sql import SCHEMA, USER, Sql, open_database
from hana_emulator.sql.database import Database
from hana_emulator.testing import Emulator, running

dbapi = pytest.importorskip("hdbcli.dbapi")


@pytest.fixture
def guest(sql: Sql, database: Database) -> Sql:
    """A user who owns his empty schema GUEST, beside a table S.T and a view S.V that are not his."""
    sql.run("CREATE TABLE T (A INTEGER PRIMARY KEY, B NVARCHAR(10))")
    sql.run("INSERT INTO T VALUES (1, 'one')")
    sql.run("CREATE VIEW V AS SELECT A FROM T")
    sql.run('CREATE USER GUEST PASSWORD "Secret-1" NO FORCE_FIRST_PASSWORD_CHANGE')
    return Sql(database.connect("GUEST"))


STATEMENTS = [
    ("SELECT", "SELECT * FROM S.T"),
    ("SELECT", "SELECT COUNT(*) FROM (SELECT A FROM S.T) X"),
    ("SELECT", "WITH W AS (SELECT A FROM S.T) SELECT * FROM W"),
    ("SELECT", "SELECT 1 FROM DUMMY WHERE EXISTS (SELECT 1 FROM S.T)"),
    ("SELECT", "SELECT (SELECT MAX(A) FROM S.T) FROM DUMMY"),
    ("SELECT", "SELECT 1 FROM DUMMY UNION ALL SELECT A FROM S.T"),
    ("SELECT", "CREATE TABLE MINE AS (SELECT A FROM S.T)"),
    ("INSERT", "INSERT INTO S.T VALUES (2, 'two')"),
    ("UPDATE", "UPDATE S.T SET B = 'x'"),
    ("DELETE", "DELETE FROM S.T"),
    ("ALTER", "ALTER TABLE S.T ADD (C INTEGER)"),
    ("INDEX", "CREATE INDEX S.I ON S.T (B)"),
    ("DROP", "DROP TABLE S.T CASCADE"),
    ("DELETE", "TRUNCATE TABLE S.T"),
    ("ALTER", "COMMENT ON TABLE S.T IS 'x'"),
    ("ALTER", "COMMENT ON COLUMN S.T.A IS 'x'"),
]


@pytest.mark.parametrize(("privilege", "statement"), STATEMENTS)
def test_each_statement_needs_its_privilege(sql: Sql, guest: Sql, privilege: str, statement: str) -> None:
    assert guest.code(statement) == 258
    others = {"SELECT", "INSERT", "UPDATE", "DELETE", "ALTER", "INDEX", "DROP"} - {privilege}
    sql.run(f"GRANT {', '.join(sorted(others))} ON S.T TO GUEST")
    assert guest.code(statement) == 258
    sql.run(f"GRANT {privilege} ON S.T TO GUEST")
    guest.session.execute(guest.prepare(statement), [()], autocommit=True)


@pytest.mark.parametrize(
    ("privileges", "statement"),
    [
        ({"INSERT", "UPDATE"}, "UPSERT S.T VALUES (1, 'x') WITH PRIMARY KEY"),
        (
            {"INSERT", "UPDATE"},
            "MERGE INTO S.T USING DUMMY D ON A = 5 WHEN MATCHED THEN UPDATE SET B = 'x' "
            "WHEN NOT MATCHED THEN INSERT VALUES (5, 'y')",
        ),
        ({"INSERT", "SELECT"}, "INSERT INTO S.T SELECT A + 10, B FROM S.T"),
    ],
)
def test_some_statements_need_two(sql: Sql, guest: Sql, privileges: set[str], statement: str) -> None:
    for one in privileges:
        sql.run(f"GRANT {', '.join(privileges - {one})} ON S.T TO GUEST")
        assert guest.code(statement) == 258
        sql.run("REVOKE ALL PRIVILEGES ON S.T FROM GUEST")
    sql.run(f"GRANT {', '.join(privileges)} ON S.T TO GUEST")
    guest.run(statement)


def test_the_message_names_user_privilege_and_table(guest: Sql) -> None:
    from hana_emulator.errors import HanaError

    with pytest.raises(HanaError, match=r"insufficient privilege: GUEST has no SELECT on S\.T"):
        guest.prepare("SELECT * FROM S.T")


def test_what_does_not_exist_is_259_for_everybody(guest: Sql) -> None:
    assert guest.code("SELECT * FROM S.NOSUCH") == 259
    assert guest.code("SELECT * FROM NOSUCH.T") == 362


@pytest.mark.parametrize(
    "grant", ["SELECT ON S.T", "INSERT ON S.T", "SELECT ON SCHEMA S", "CREATE ANY ON SCHEMA S", "CATALOG READ", "NEAR"]
)
def test_the_catalogue_shows_what_one_has_some_privilege_on(sql: Sql, guest: Sql, grant: str) -> None:
    sql.run("CREATE ROLE NEAR")
    sql.run("GRANT DELETE ON S.T TO NEAR")
    sql.run("CREATE INDEX I ON T (B)")
    views = ["TABLES", "TABLE_COLUMNS", "CONSTRAINTS", "INDEXES", "INDEX_COLUMNS"]
    seen = "SELECT COUNT(*) FROM SYS.{} WHERE TABLE_NAME = 'T'"
    assert [guest.value(seen.format(view)) for view in views] == [0] * 5
    assert guest.value("SELECT COUNT(*) FROM SYS.VIEW_COLUMNS WHERE VIEW_NAME = 'V'") == 0
    sql.run(f"GRANT {grant} TO GUEST")
    assert [guest.value(seen.format(view)) for view in views] == [sql.value(seen.format(view)) for view in views]
    sql.run(f"REVOKE {grant} FROM GUEST")
    assert [guest.value(seen.format(view)) for view in views] == [0] * 5
    assert guest.value("SELECT * FROM DUMMY") == "X"


def test_a_view_is_enough_for_what_it_shows(sql: Sql, guest: Sql) -> None:
    assert guest.code("SELECT * FROM S.V") == 258
    sql.run("GRANT SELECT ON S.V TO GUEST")
    assert guest.rows("SELECT * FROM S.V") == [(1,)]
    assert guest.code("SELECT * FROM S.T") == 258


def test_a_view_over_what_one_may_not_read_is_refused(guest: Sql) -> None:
    assert guest.code("CREATE VIEW W AS SELECT * FROM S.T") == 258
    assert guest.code("SELECT * FROM W") == 259


def test_one_s_own_schema_needs_no_grant(sql: Sql, guest: Sql) -> None:
    guest.run("CREATE TABLE MINE (A INTEGER)")
    guest.run("INSERT INTO MINE VALUES (1)")
    guest.run("CREATE VIEW MINE_V AS SELECT * FROM MINE")
    assert guest.rows("SELECT * FROM MINE_V") == [(1,)]
    guest.run("ALTER TABLE MINE ADD (B INTEGER)")
    guest.run("DROP TABLE MINE CASCADE")


def test_a_schema_grant_covers_every_table_in_it(sql: Sql, guest: Sql) -> None:
    sql.run("GRANT SELECT ON SCHEMA S TO GUEST")
    sql.run("CREATE TABLE LATER (A INTEGER)")
    assert guest.rows("SELECT * FROM S.LATER") == []
    assert guest.code("INSERT INTO S.LATER VALUES (1)") == 258
    sql.run("REVOKE SELECT ON SCHEMA S FROM GUEST")
    assert guest.code("SELECT * FROM S.LATER") == 258


def test_create_any_makes_owners(sql: Sql, guest: Sql) -> None:
    assert guest.code("CREATE TABLE S.MINE (A INTEGER)") == 258
    sql.run("GRANT CREATE ANY ON SCHEMA S TO GUEST")
    guest.run("CREATE TABLE S.MINE (A INTEGER)")
    guest.run("INSERT INTO S.MINE VALUES (1)")
    assert guest.rows("SELECT * FROM S.MINE") == [(1,)]
    assert guest.code("SELECT * FROM S.T") == 258
    guest.run("CREATE INDEX S.I ON S.MINE (A)")
    guest.run("DROP TABLE S.MINE")


def test_schemas_and_users_need_system_privileges(sql: Sql, guest: Sql) -> None:
    for statement in (
        "CREATE SCHEMA X", "DROP SCHEMA S CASCADE", "CREATE USER X PASSWORD y", "DROP USER OWL", "CREATE ROLE X",
        "ALTER USER OWL DEACTIVATE USER NOW", "ALTER USER OWL PASSWORD y", "ALTER USER OWL RESET CONNECT ATTEMPTS",
        "GRANT CREATE SCHEMA TO GUEST", "GRANT SELECT ON S.T TO GUEST", "GRANT SELECT ON SCHEMA S TO GUEST",
    ):  # fmt: skip
        assert guest.code(statement) == 258, statement
    sql.run("GRANT CREATE SCHEMA, USER ADMIN TO GUEST")
    guest.run("CREATE SCHEMA X")
    guest.run("DROP SCHEMA X")
    guest.run("CREATE USER X PASSWORD y")
    assert guest.code("DROP SCHEMA S CASCADE") == 258


def test_a_refused_definition_leaves_nothing(sql: Sql, guest: Sql) -> None:
    assert guest.code("DROP TABLE S.T CASCADE") == 258
    assert guest.code("ALTER TABLE S.T ADD (C INTEGER)") == 258
    assert sql.rows("SELECT * FROM T") == [(1, "one")]
    assert guest.session.in_transaction is False


def test_a_statement_prepared_before_loses_its_right(sql: Sql, guest: Sql) -> None:
    from hana_emulator.errors import HanaError

    sql.run("GRANT SELECT ON S.T TO GUEST")
    prepared = guest.prepare("SELECT * FROM S.T")
    guest.session.execute(prepared, [()], autocommit=True)
    sql.run("REVOKE SELECT ON S.T FROM GUEST")
    with pytest.raises(HanaError) as caught:
        guest.session.execute(prepared, [()], autocommit=True)
    assert caught.value.code == 258


def test_a_plan_of_one_user_opens_nothing_to_another(sql: Sql, guest: Sql) -> None:
    sql.rows("SELECT * FROM S.T")
    assert guest.code("SELECT * FROM S.T") == 258


# --- roles, and passing on


def test_roles_and_roles_in_roles(sql: Sql, guest: Sql) -> None:
    sql.run("CREATE ROLE READER")
    sql.run("CREATE ROLE EVERYTHING")
    sql.run("GRANT SELECT ON S.T TO READER")
    sql.run("GRANT READER TO EVERYTHING")
    sql.run("GRANT EVERYTHING TO GUEST")
    assert guest.rows("SELECT A FROM S.T") == [(1,)]
    sql.run("REVOKE READER FROM EVERYTHING")
    assert guest.code("SELECT A FROM S.T") == 258
    sql.run("GRANT READER TO GUEST")
    assert guest.rows("SELECT A FROM S.T") == [(1,)]
    sql.run("DROP ROLE READER")
    assert guest.code("SELECT A FROM S.T") == 258


def test_roles_that_contain_each_other_end(sql: Sql, guest: Sql) -> None:
    sql.run("CREATE ROLE A1")
    sql.run("CREATE ROLE A2")
    sql.run("GRANT A1 TO A2")
    sql.run("GRANT A2 TO A1")
    sql.run("GRANT A1 TO GUEST")
    assert guest.code("SELECT A FROM S.T") == 258
    assert sql.rows("SELECT ROLE_NAME FROM SYS.GRANTED_ROLES WHERE GRANTEE = 'GUEST'") == [("A1",)]
    assert sql.rows("SELECT * FROM SYS.EFFECTIVE_PRIVILEGES WHERE USER_NAME = 'GUEST' AND SCHEMA_NAME = 'S'") == []


def test_public_is_everybody(sql: Sql, guest: Sql) -> None:
    sql.run("GRANT SELECT ON S.T TO PUBLIC")
    assert guest.rows("SELECT A FROM S.T") == [(1,)]


def test_only_with_grant_option_can_it_be_passed_on(sql: Sql, guest: Sql, database: Database) -> None:
    sql.run("CREATE USER SECOND PASSWORD y")
    second = Sql(database.connect("SECOND"))
    sql.run("GRANT SELECT ON S.T TO GUEST")
    assert guest.code("GRANT SELECT ON S.T TO SECOND") == 258
    sql.run("GRANT SELECT ON S.T TO GUEST WITH GRANT OPTION")
    guest.run("GRANT SELECT ON S.T TO SECOND")
    assert second.rows("SELECT A FROM S.T") == [(1,)]
    assert second.code("GRANT SELECT ON S.T TO GUEST") == 258


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("GRANT SELECT ON S.T TO NOBODY", 332),
        ("GRANT SELECT ON S.NOSUCH TO GUEST", 259),
        ("GRANT SELECT ON SCHEMA NOSUCH TO GUEST", 362),
        ("GRANT NOSUCH TO GUEST", 389),
        ("GRANT CREATE ANY ON S.T TO GUEST", 7),
        ("GRANT FLY ON S.T TO GUEST", 7),
        ("GRANT SELECT ON S.T", 257),
        ("GRANT SELECT ON S.T TO", 257),
        ("GRANT", 257),
        ("REVOKE SELECT ON S.T FROM NOBODY", 332),
        ("CREATE USER GUEST PASSWORD y", 331),
        ("CREATE USER PUBLIC PASSWORD y", 331),
        ("CREATE USER X", 257),
        ("ALTER USER NOBODY PASSWORD y", 332),
        ("ALTER USER NOBODY DEACTIVATE USER NOW", 332),
        ("ALTER USER GUEST FLY", 257),
        ("DROP USER NOBODY", 332),
        ("DROP USER OWL", 332),
        ("DROP ROLE NOBODY", 389),
    ],
)
def test_refused_statements(sql: Sql, guest: Sql, statement: str, code: int) -> None:
    assert sql.code(statement) == code


def test_roles_share_the_name_space_of_users(sql: Sql, guest: Sql) -> None:
    sql.run("CREATE ROLE R")
    assert sql.code("CREATE USER R PASSWORD y") == 331
    assert sql.code("CREATE ROLE R") == 387
    assert sql.code("CREATE ROLE GUEST") == 387


def test_a_dropped_user_takes_his_things_along_with_cascade_only(sql: Sql, guest: Sql) -> None:
    guest.run("CREATE TABLE MINE (A INTEGER)")
    sql.run("GRANT SELECT ON S.T TO GUEST")
    assert sql.code("DROP USER GUEST") == 417
    sql.run("DROP USER GUEST CASCADE")
    assert sql.rows("SELECT SCHEMA_NAME FROM SYS.SCHEMAS WHERE SCHEMA_NAME = 'GUEST'") == []
    assert sql.code("SELECT * FROM GUEST.MINE") == 362
    assert sql.rows("SELECT * FROM SYS.GRANTED_PRIVILEGES WHERE GRANTEE = 'GUEST'") == []


def test_a_table_made_anew_has_no_old_grants(sql: Sql, guest: Sql) -> None:
    sql.run("GRANT SELECT ON S.T TO GUEST")
    sql.run("DROP TABLE T CASCADE")
    sql.run("CREATE TABLE T (A INTEGER)")
    assert guest.code("SELECT * FROM S.T") == 258


def test_rights_survive_a_restart(tmp_path: Path) -> None:
    first = open_database(tmp_path)
    sql = Sql(first.connect(USER))
    sql.run("CREATE TABLE T (A INTEGER)")
    sql.run("CREATE USER GUEST PASSWORD y")
    sql.run("GRANT SELECT ON S.T TO GUEST")
    first.close()
    second = open_database(tmp_path)
    guest = Sql(second.connect("GUEST"))
    assert guest.rows("SELECT * FROM S.T") == []
    assert guest.code("INSERT INTO S.T VALUES (1)") == 258
    second.close()


def test_only_the_present_administrator_may_do_everything(tmp_path: Path) -> None:
    first = open_database(tmp_path)
    Sql(first.connect(USER)).run("CREATE TABLE T (A INTEGER)")
    first.close()
    second = Database(tmp_path, "BOSS", "y", "B")
    Sql(second.connect("BOSS")).run("CREATE USER OTHER PASSWORD y")
    Sql(second.connect("BOSS")).run(f"DROP TABLE {SCHEMA}.T")
    former = Sql(second.connect(USER))
    assert former.code("CREATE USER X PASSWORD y") == 258
    second.close()


# --- any order of statements


STEPS = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from(["SELECT", "INSERT", "DELETE"]),
        st.sampled_from(["S.T", "SCHEMA S"]),
        st.sampled_from(["GUEST", "PUBLIC", "NEAR", "FAR", "OTHER"]),
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Sql, Sql]]:
    """GUEST has the role NEAR, NEAR has FAR; nobody has OTHER."""
    opened = open_database()
    sql = Sql(opened.connect(USER))
    for statement in (
        "CREATE TABLE T (A INTEGER)", "CREATE USER GUEST PASSWORD x", "CREATE ROLE NEAR", "CREATE ROLE FAR",
        "CREATE ROLE OTHER", "GRANT NEAR TO GUEST", "GRANT FAR TO NEAR",
    ):  # fmt: skip
        sql.run(statement)
    yield sql, Sql(opened.connect("GUEST"))
    opened.close()


@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_grants_and_revokes_in_any_order(stage: tuple[Sql, Sql], steps: list[tuple[bool, str, str, str]]) -> None:
    """Against the plain rule: one has what any of one's names has, on the table or on its schema."""
    sql, guest = stage
    held: set[tuple[str, str, str]] = set()
    for granting, privilege, place, grantee in steps:
        sql.run(f"{'GRANT' if granting else 'REVOKE'} {privilege} ON {place} {'TO' if granting else 'FROM'} {grantee}")
        (held.add if granting else held.discard)((privilege, place, grantee))
    may = {privilege for privilege, _, grantee in held if grantee != "OTHER"}
    for privilege, statement in (("SELECT", "SELECT * FROM S.T"), ("INSERT", "INSERT INTO S.T VALUES (1)")):
        if privilege in may:
            guest.session.execute(guest.prepare(statement), [()], autocommit=True)
        else:
            assert guest.code(statement) == 258
    sql.run("DELETE FROM T")
    for privilege, place, grantee in held:
        sql.run(f"REVOKE {privilege} ON {place} FROM {grantee}")
    assert sql.rows("SELECT * FROM SYS.GRANTED_PRIVILEGES WHERE SCHEMA_NAME = 'S'") == []


WORDS = [
    "GRANT",
    "REVOKE",
    "CREATE",
    "ALTER",
    "DROP",
    "USER",
    "ROLE",
    "SELECT",
    "INSERT",
    "ANY",
    "ALL",
    "PRIVILEGES",
    "ON",
    "SCHEMA",
    "TABLE",
    "S",
    "T",
    ".",
    ",",
    "TO",
    "FROM",
    "GUEST",
    "NEAR",
    "PUBLIC",
    "WITH",
    "OPTION",
    "ADMIN",
    "PASSWORD",
    "RESET",
    "CONNECT",
    "ATTEMPTS",
    "ACTIVATE",
    "DEACTIVATE",
    "NOW",
    "CASCADE",
    "'x'",
    '"q"',
    "1",
    "(",
    ")",
    ";",
    "?",
]


@settings(max_examples=25, deadline=None)
@given(first=st.sampled_from(["GRANT", "REVOKE", "CREATE USER", "ALTER USER", "CREATE ROLE"]), words=st.lists(
    st.sampled_from(WORDS), max_size=9
))  # fmt: skip
def test_garbled_statements_end_in_a_hana_error_or_run(first: str, words: list[str]) -> None:
    from hana_emulator.errors import HanaError

    with closing(open_database()) as database:
        sql = Sql(database.connect(USER))
        sql.run("CREATE TABLE T (A INTEGER)")
        try:
            sql.run(" ".join([first, *words]))
            code = 0
        except HanaError as error:
            code = error.code
        assert code != 2
        assert sql.rows("SELECT * FROM S.T") == []


# --- views


def test_granted_privileges(sql: Sql, guest: Sql) -> None:
    sql.run("CREATE ROLE R")
    sql.run("GRANT SELECT ON S.T TO GUEST WITH GRANT OPTION")
    sql.run("GRANT INSERT ON SCHEMA S TO R")
    sql.run("GRANT R TO GUEST")
    columns = "GRANTEE, GRANTEE_TYPE, GRANTOR, OBJECT_TYPE, SCHEMA_NAME, OBJECT_NAME, PRIVILEGE, IS_GRANTABLE"
    assert sql.rows(f"SELECT {columns} FROM SYS.GRANTED_PRIVILEGES WHERE GRANTOR = 'OWL' ORDER BY GRANTEE") == [
        ("GUEST", "USER", "OWL", "TABLE", "S", "T", "SELECT", "TRUE"),
        ("R", "ROLE", "OWL", "SCHEMA", "S", None, "INSERT", "FALSE"),
    ]
    effective = sql.rows(
        "SELECT GRANTEE, OBJECT_NAME, PRIVILEGE FROM SYS.EFFECTIVE_PRIVILEGES "
        "WHERE USER_NAME = 'GUEST' AND SCHEMA_NAME = 'S' ORDER BY PRIVILEGE"
    )
    assert effective == [("R", None, "INSERT"), ("GUEST", "T", "SELECT")]


def test_owners_have_effective_privileges(sql: Sql, guest: Sql) -> None:
    guest.run("CREATE TABLE MINE (A INTEGER)")
    asked = "FROM SYS.EFFECTIVE_PRIVILEGES WHERE USER_NAME = 'GUEST' AND SCHEMA_NAME = 'GUEST' AND PRIVILEGE = "
    assert sql.rows(f"SELECT OBJECT_TYPE, OBJECT_NAME {asked} 'SELECT' ORDER BY OBJECT_TYPE") == [
        ("SCHEMA", None),
        ("TABLE", "MINE"),
    ]
    assert sql.rows(f"SELECT OBJECT_TYPE {asked} 'CREATE ANY'") == [("SCHEMA",)]


def test_users_and_roles_are_listed(sql: Sql, guest: Sql) -> None:
    sql.run("CREATE ROLE R")
    sql.run("ALTER USER GUEST DEACTIVATE USER NOW")
    assert sql.rows("SELECT USER_NAME, USER_DEACTIVATED FROM SYS.USERS ORDER BY USER_NAME") == [
        ("GUEST", "TRUE"),
        ("OWL", "FALSE"),
    ]
    assert sql.rows("SELECT ROLE_NAME FROM SYS.ROLES ORDER BY ROLE_NAME") == [("PUBLIC",), ("R",)]


# --- logging in, by the real driver


@dataclass(frozen=True)
class House:
    """An emulator, and a user of it for one test alone: logins are counted for ever."""

    emulator: Emulator
    guest: str

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(self.emulator.connect(autocommit=True)) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def connect(self, password: str = "Right-1", **options: Any) -> Any:
        return self.emulator.connect(user=self.guest, password=password, **options)

    def login(self, password: str) -> int:
        try:
            self.connect(password).close()
        except dbapi.Error as error:
            return int(error.errorcode)
        return 0

    @property
    def counted(self) -> list[tuple[Any, ...]]:
        logins = "SELECT ATTEMPTS, FAILURES, IS_LOCKED FROM SYS.M_EMULATOR_LOGINS"
        return self.run(f"{logins} WHERE USER_NAME = '{self.guest}'")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with running("--data", str(tmp_path_factory.mktemp("house")), "--max-login-failures", "3") as emulator:
        yield emulator
        assert emulator.stop() == 0


_guests = itertools.count(1)


@pytest.fixture
def house(strict: Emulator) -> House:
    house = House(strict, f"GUEST{next(_guests)}")
    house.run(f'CREATE USER {house.guest} PASSWORD "Right-1" NO FORCE_FIRST_PASSWORD_CHANGE')
    return house


def test_too_many_wrong_passwords_lock_the_user(house: House) -> None:
    assert [house.login("wrong") for _ in range(4)] == [10, 10, 10, 416]
    assert house.login("Right-1") == 416
    assert house.counted == [(5, 5, "TRUE")]
    attempts = f"SELECT INVALID_CONNECT_ATTEMPTS FROM SYS.USERS WHERE USER_NAME = '{house.guest}'"
    assert house.run(attempts) == [(3,)]
    house.run(f"ALTER USER {house.guest} RESET CONNECT ATTEMPTS")
    assert house.login("Right-1") == 0
    assert house.counted == [(6, 5, "FALSE")]


def test_a_right_password_forgives_wrong_ones(house: House) -> None:
    assert [house.login(word) for word in ("w", "w", "Right-1", "w", "w", "Right-1")] == [10, 10, 0, 10, 10, 0]
    attempts = "SELECT SUCCESSFUL_CONNECTS, INVALID_CONNECT_ATTEMPTS FROM SYS.INVALID_CONNECT_ATTEMPTS"
    assert house.run(f"{attempts} WHERE USER_NAME = '{house.guest}'") == [(2, 0)]


def test_a_deactivated_user_stays_out(house: House) -> None:
    house.run(f"ALTER USER {house.guest} DEACTIVATE USER NOW")
    assert house.login("Right-1") == 415
    house.run(f"ALTER USER {house.guest} ACTIVATE USER NOW")
    assert house.login("Right-1") == 0


def test_a_user_changes_his_own_password(house: House) -> None:
    with closing(house.connect(autocommit=True)) as connection:
        connection.cursor().execute(f'ALTER USER {house.guest} PASSWORD "New-1"')
    assert (house.login("Right-1"), house.login("New-1")) == (10, 0)


@pytest.mark.slow
def test_without_a_limit_nobody_is_locked(tmp_path: Path) -> None:
    with running("--data", str(tmp_path), "--max-login-failures", "0") as emulator:
        house = House(emulator, "GUEST")
        house.run("CREATE USER GUEST PASSWORD x")
        assert {house.login("wrong") for _ in range(10)} == {10}
        assert emulator.stop() == 0


def test_a_guest_meets_258_through_the_driver(house: House) -> None:
    house.run('CREATE TABLE SAPDEMO."T x" (A INTEGER)')
    with closing(house.connect()) as connection:
        for statement, parameters in (
            ('SELECT * FROM SAPDEMO."T x"', ()),
            ('INSERT INTO SAPDEMO."T x" VALUES (?)', (1,)),
        ):
            with pytest.raises(dbapi.Error, match="insufficient privilege") as caught:
                connection.cursor().execute(statement, parameters)
            assert caught.value.errorcode == 258


@pytest.mark.parametrize(
    ("name", "iterations"),
    [
        (b"SCRAMPBKDF2SHA256", struct.pack(">I", 15_000)),
        pytest.param(b"SCRAMSHA256", b"", marks=pytest.mark.slow),
    ],
)
def test_the_driver_logs_in_by_the_method_the_server_chooses(house: House, name: bytes, iterations: bytes) -> None:
    """The emulator takes the best method offered; what hdbcli does with either shows on a line that listens in."""
    import socket
    import threading

    offered, chosen = bytearray(), bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pump() -> None:
            client, _ = listener.accept()
            server = socket.create_connection((house.emulator.host, house.emulator.port))
            with client, server:
                server.sendall(client.recv(14))
                client.sendall(server.recv(8))
                request = client.recv(1 << 16)
                offered.extend(request)
                if name == b"SCRAMSHA256":  # as a client without the better method
                    request = request.replace(b"SCRAMPBKDF2SHA256", b"SCRAMPBKDF2XXXXXX")
                server.sendall(request)
                reply = server.recv(1 << 16)
                chosen.extend(reply)
                client.sendall(reply)
                client.settimeout(5)
                with contextlib.suppress(ConnectionResetError):  # the driver may close before it has read all
                    for _ in range(20):
                        data = client.recv(1 << 16)
                        if not data:
                            return
                        server.sendall(data)
                        client.sendall(server.recv(1 << 16))

        thread = threading.Thread(target=pump)
        thread.start()
        connection = house.connect(port=listener.getsockname()[1])
        cursor = connection.cursor()
        cursor.execute("SELECT CURRENT_USER FROM DUMMY")
        assert cursor.fetchone()[0] == house.guest
        connection.close()
        thread.join(10)
    assert b"SCRAMPBKDF2SHA256" in offered
    assert name in chosen
    assert iterations in chosen
