"""Faults on order: what each action does to the real hdbcli, how they are counted, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator_background import wait_until
from hana_emulator.faults import ACCEPT, Action, Fault, FaultList, FaultRefused
from hana_emulator.testing import Emulator, launch, running

dbapi = pytest.importorskip("hdbcli.dbapi")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """An emulator of this file's own: a fault that strikes the wrong client would be a riddle elsewhere."""
    with running("--data", str(tmp_path_factory.mktemp("faulty"))) as emulator:
        yield emulator
        assert emulator.stop() == 0
        assert emulator.process.stderr is not None
        assert emulator.process.stderr.read() == ""


@pytest.fixture
def admin(faulty: Emulator) -> Iterator[Any]:
    """A connection with autocommit and an empty table T; no faults are left behind."""
    connection = faulty.connect(autocommit=True)
    connection.cursor().execute("CREATE TABLE T (A INTEGER PRIMARY KEY)")
    yield connection
    connection.cursor().execute("ALTER SYSTEM CLEAR FAULTS")
    connection.cursor().execute("DROP TABLE T")
    connection.close()


@pytest.fixture
def client(faulty: Emulator, admin: Any) -> Iterator[Any]:
    connection = faulty.connect()
    yield connection
    connection.close()


def inject(connection: Any, **fault: Any) -> None:
    document = json.dumps(fault).replace("'", "''")
    connection.cursor().execute(f"ALTER SYSTEM INJECT FAULT '{document}'")


def stored(admin: Any) -> list[int]:
    cursor = admin.cursor()
    cursor.execute("SELECT A FROM T ORDER BY A")
    return [row[0] for row in cursor.fetchall()]


def code(connection: Any, sql: str, *parameters: Any) -> int:
    cursor = connection.cursor()
    with pytest.raises(dbapi.Error) as caught:
        cursor.execute(sql, *parameters)
    return int(caught.value.errorcode)


# --- the actions


@pytest.mark.parametrize(
    "number", [131, 139, *(pytest.param(number, marks=pytest.mark.slow) for number in (129, 133, 138, 145, 149))]
)
def test_a_code_that_ends_the_transaction_undoes_it_all(admin: Any, client: Any, number: int) -> None:
    client.cursor().execute("INSERT INTO T VALUES (1)")
    inject(admin, match="INSERT INTO T", action="error", code=number, text="said so")
    with pytest.raises(dbapi.Error, match="said so") as caught:
        client.cursor().execute("INSERT INTO T VALUES (2)")
    assert caught.value.errorcode == number
    client.cursor().execute("INSERT INTO T VALUES (3)")
    client.commit()
    assert stored(admin) == [3]


@pytest.mark.parametrize("number", [301, *(pytest.param(n, marks=pytest.mark.slow) for n in (258, 613, 2048))])
def test_any_other_code_undoes_the_statement_only(admin: Any, client: Any, number: int) -> None:
    client.cursor().execute("INSERT INTO T VALUES (1)")
    inject(admin, match="INSERT INTO T", action="error", code=number)
    assert code(client, "INSERT INTO T VALUES (2)") == number
    client.commit()
    assert stored(admin) == [1]


def test_executions_of_a_prepared_statement_are_matched_by_its_text(admin: Any, client: Any) -> None:
    cursor = client.cursor()
    cursor.execute("INSERT INTO T VALUES (?)", (1,))
    inject(admin, match=r"insert into t values \(\?\)", action="error", code=131, skip=1)
    cursor.execute("INSERT INTO T VALUES (?)", (2,))
    with pytest.raises(dbapi.Error) as caught:
        cursor.execute("INSERT INTO T VALUES (?)", (3,))
    assert caught.value.errorcode == 131


def test_dropped_before_nothing_has_happened(admin: Any, client: Any) -> None:
    client.setautocommit(True)
    inject(admin, match="INSERT INTO T", action="drop_before")
    assert code(client, "INSERT INTO T VALUES (1)") == -10807
    assert stored(admin) == []


def test_dropped_after_it_has_happened(admin: Any, client: Any) -> None:
    client.setautocommit(True)
    inject(admin, match="INSERT INTO T", action="drop_after")
    assert code(client, "INSERT INTO T VALUES (1)") == -10807
    assert stored(admin) == [1]


def test_dropped_after_an_uncommitted_write_leaves_nothing(admin: Any, client: Any) -> None:
    inject(admin, match="INSERT INTO T", action="drop_after")
    assert code(client, "INSERT INTO T VALUES (1)") == -10807
    admin.cursor().execute("INSERT INTO T VALUES (1)")
    assert stored(admin) == [1]


@pytest.mark.parametrize(("action", "kept"), [("drop_before", []), ("drop_after", [1])])
def test_a_commit_is_lost_or_only_its_reply(admin: Any, client: Any, action: str, kept: list[int]) -> None:
    client.cursor().execute("INSERT INTO T VALUES (1)")
    inject(admin, match="^COMMIT$", action=action)
    with pytest.raises(dbapi.Error) as caught:
        client.commit()
    assert caught.value.errorcode == -10807
    assert stored(admin) == kept


def test_a_commit_may_fail_with_a_code(admin: Any, client: Any) -> None:
    client.cursor().execute("INSERT INTO T VALUES (1)")
    inject(admin, match="^COMMIT$", action="error", code=149)
    with pytest.raises(dbapi.Error) as caught:
        client.commit()
    assert caught.value.errorcode == 149
    client.commit()
    assert stored(admin) == []


def test_a_drop_between_two_pages_of_a_result(admin: Any, client: Any) -> None:
    admin.cursor().executemany("INSERT INTO T VALUES (?)", [(number,) for number in range(50_000)])
    inject(admin, match="^FETCH$", action="drop_before", skip=1)
    cursor = client.cursor()
    cursor.execute("SELECT A FROM T ORDER BY A")
    with pytest.raises(dbapi.Error) as caught:
        cursor.fetchall()
    assert caught.value.errorcode in (-10807, -10108)


def test_a_long_lob_is_struck_when_its_statement_runs(admin: Any, client: Any) -> None:
    admin.cursor().execute("CREATE TABLE L (T NCLOB)")
    inject(admin, match="INSERT INTO L", action="error", code=131)
    assert code(client, "INSERT INTO L VALUES (?)", ("x" * 3_000_000,)) == 131
    client.cursor().execute("INSERT INTO L VALUES (?)", ("x" * 3_000_000,))
    client.commit()
    admin.cursor().execute("DROP TABLE L")


def test_a_delay_delays(admin: Any, client: Any) -> None:
    inject(admin, match="FROM T", action="delay", seconds=0.4)
    started = time.monotonic()
    client.cursor().execute("SELECT * FROM T")
    assert 0.4 <= time.monotonic() - started < 20


def test_the_communication_timeout_ends_a_delay(faulty: Emulator, admin: Any) -> None:
    inject(admin, match="FROM T", action="delay", seconds=30)
    with closing(faulty.connect(communicationTimeout=300)) as client:
        started = time.monotonic()
        assert code(client, "SELECT * FROM T") == -10807
        assert time.monotonic() - started < 20


def test_cancel_ends_a_delay(admin: Any, client: Any) -> None:
    inject(admin, match="FROM T", action="delay", seconds=30)
    cursor = admin.cursor()

    def struck() -> bool:
        cursor.execute("SELECT 1 FROM SYS.M_EMULATOR_FAULTS WHERE HITS > 0")
        return bool(cursor.fetchall())

    def cancel() -> None:
        wait_until(struck)
        client.cancel()

    thread = threading.Thread(target=cancel, daemon=True)
    thread.start()
    assert code(client, "SELECT * FROM T") == 139
    thread.join(60)


def test_a_slow_reply_comes_whole(admin: Any, client: Any) -> None:
    admin.cursor().executemany("INSERT INTO T VALUES (?)", [(number,) for number in range(50)])
    inject(admin, match="FROM T", action="slow", bytes=16, seconds=0.02)
    started = time.monotonic()
    cursor = client.cursor()
    cursor.execute("SELECT A FROM T ORDER BY A")
    assert [row[0] for row in cursor.fetchall()] == list(range(50))
    assert time.monotonic() - started > 0.1


def test_a_client_that_leaves_a_slow_reply_is_let_go(faulty: Emulator, admin: Any) -> None:
    inject(admin, match="FROM T", action="slow", bytes=1, seconds=5)
    with closing(faulty.connect(communicationTimeout=300)) as client:
        assert code(client, "SELECT * FROM T") == -10807
    cursor = admin.cursor()
    cursor.execute("SELECT 1 FROM DUMMY")
    assert cursor.fetchone()[0] == 1


def test_connects_are_refused_as_often_as_asked(faulty: Emulator, admin: Any) -> None:
    inject(admin, action="refuse", count=2)
    for _ in range(2):
        with pytest.raises(dbapi.Error) as caught:
            faulty.connect()
        assert caught.value.errorcode == -10709
    faulty.connect().close()


@pytest.mark.parametrize(
    ("fault", "number"),
    [({"action": "refuse"}, -10709), ({"action": "error", "code": 1888}, 1888), ({"action": "drop_after"}, -10709)],
)
def test_a_login_is_struck_by_its_word(faulty: Emulator, admin: Any, fault: dict[str, Any], number: int) -> None:
    inject(admin, match="^CONNECT$", **fault)
    with pytest.raises(dbapi.Error) as caught:
        faulty.connect()
    assert caught.value.errorcode == number
    faulty.connect().close()


# --- counting


def test_the_view_tells_what_has_happened(admin: Any, client: Any) -> None:
    inject(admin, match="INSERT INTO T", action="error", code=301, skip=1, count=1)
    inject(admin, match="nothing like it", action="drop_after", count=None)
    for value in range(4):
        try:
            client.cursor().execute(f"INSERT INTO T VALUES ({value})")
        except dbapi.Error:
            assert value == 1
    client.commit()
    assert stored(admin) == [0, 2, 3]
    cursor = admin.cursor()
    cursor.execute('SELECT "MATCH", ACTION, "SKIP", "COUNT", ERROR_CODE, MATCHES, HITS FROM SYS.M_EMULATOR_FAULTS')
    assert [tuple(row) for row in cursor.fetchall()] == [
        ("INSERT INTO T", "error", 1, 1, 301, 2, 1),
        ("nothing like it", "drop_after", 0, None, 0, 0, 0),
    ]
    admin.cursor().execute("alter system clear faults")
    cursor.execute("SELECT COUNT(*) FROM M_EMULATOR_FAULTS")
    assert cursor.fetchone()[0] == 0


def test_an_order_without_count_strikes_every_time(admin: Any, client: Any) -> None:
    inject(admin, match="INSERT INTO T", action="error", code=301, count=None)
    for _ in range(5):
        assert code(client, "INSERT INTO T VALUES (1)") == 301


@given(skip=st.integers(0, 5), count=st.none() | st.integers(1, 5), tries=st.integers(0, 20))
def test_skip_and_count(skip: int, count: int | None, tries: int) -> None:
    faults = FaultList([Fault("x", Action.DROP_BEFORE, skip=skip, count=count)])
    struck = [faults.strike("an X") is not None for _ in range(tries)]
    last = tries if count is None else skip + count
    assert struck == [skip <= number < last for number in range(tries)]
    assert faults.strike("y") is None


def test_only_refusals_strike_a_new_connection() -> None:
    faults = FaultList([Fault(".", Action.DROP_BEFORE), Fault.parse('{"action": "refuse"}')])
    struck = faults.strike(ACCEPT)
    assert struck is not None
    assert struck.action is Action.REFUSE
    assert faults.strike(ACCEPT) is None


def test_many_threads_get_no_more_than_was_ordered() -> None:
    faults = FaultList([Fault("x", Action.DROP_BEFORE, count=100)])
    hits: list[bool] = []

    def work() -> None:
        hits.extend(faults.strike("x") is not None for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(hits) == 100


# --- refused orders


BAD = [
    ("", "not JSON"),
    ("[1]", "JSON object"),
    ("{}", '"action" must be one of'),
    ('{"action": ["error"], "match": "x"}', '"action" must be one of'),
    ('{"action": "explode", "match": "x"}', '"action" must be one of'),
    ('{"action": "error", "match": "x"}', 'needs "code"'),
    ('{"action": "delay", "match": "x"}', 'needs "seconds"'),
    ('{"action": "slow", "match": "x", "bytes": 1}', 'needs "seconds"'),
    ('{"action": "drop_after"}', '"match" is missing'),
    ('{"action": "drop_after", "match": "("}', "not a regular expression"),
    ('{"action": "drop_after", "match": 7}', "not a regular expression"),
    ('{"action": "drop_after", "match": "x", "cuont": 1}', '"cuont" is not a key'),
    ('{"action": "drop_after", "match": "x", "code": 1}', '"code" is not a key of the action drop_after'),
    ('{"action": "error", "match": "x", "code": true}', '"code" must be'),
    ('{"action": "error", "match": "x", "code": 0}', '"code" must be'),
    ('{"action": "error", "match": "x", "code": 1, "text": 1}', '"text" must be'),
    ('{"action": "drop_after", "match": "x", "count": 0}', '"count" must be'),
    ('{"action": "drop_after", "match": "x", "skip": -1}', '"skip" must be'),
    ('{"action": "delay", "match": "x", "seconds": 0}', '"seconds" must be'),
    ('{"action": "delay", "match": "x", "seconds": NaN}', '"seconds" must be'),
    ('{"action": "slow", "match": "x", "seconds": 1, "bytes": 0}', '"bytes" must be'),
]


@pytest.mark.parametrize(("document", "reason"), BAD)
def test_what_is_wrong_with_an_order_is_said(document: str, reason: str) -> None:
    with pytest.raises(FaultRefused) as caught:
        Fault.parse(document)
    assert reason in str(caught.value)


@given(st.text())
def test_no_text_at_all_breaks_the_reader(text: str) -> None:
    with pytest.raises(FaultRefused):
        Fault.parse(text)


def test_a_bad_order_is_a_syntax_error(admin: Any) -> None:
    with pytest.raises(dbapi.ProgrammingError, match='"action" must be one of') as caught:
        inject(admin, match="x", action="explode")
    assert caught.value.errorcode == 257


def test_a_bad_order_on_the_command_line_ends_it() -> None:
    with launch("--port", "0", "--fault", '{"action": "explode"}') as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert '"action" must be one of' in err


def test_faults_from_the_command_line() -> None:
    orders = ['{"match": "INSERT", "action": "drop_after"}', '{"match": "DELETE", "action": "error", "code": 133}']
    with running(*[part for order in orders for part in ("--fault", order)]) as emulator:
        with closing(emulator.connect(autocommit=True)) as first:
            first.cursor().execute("CREATE TABLE T (A INTEGER)")
            assert code(first, "INSERT INTO T VALUES (1)") == -10807
        with closing(emulator.connect(autocommit=True)) as second:
            assert code(second, "DELETE FROM T") == 133
            second.cursor().execute("DELETE FROM T WHERE A = 1")
        assert emulator.stop() == 0
