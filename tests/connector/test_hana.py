"""Options, pool, retries, cursor rules and quoting, against a scripted driver; a few against the emulator."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.cancellation import Cancellation
from connector.errors import (
    Cancelled,
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    ConnectorError,
    DatabaseError,
    LoginRefused,
    Overloaded,
    RowRejected,
    TransactionRolledBack,
    Unreachable,
)
from connector.extras import install_command
from connector.hana import connection as hana
from connector.hana.connection import ConnectionOptions, HanaFeatures, HanaPool, quote
from connector.retry import RetryPolicy

RETRYABLE = [-10807, -10108, -10735, 18, 597, 1888, 131, 133, 138, 143, 146, 129, 145, 149, 139, 4, 142, 613]
LOST = [-10807, -10108, -10735, 18, 597, 1888]
PERMANENT = [10, 258, 259, 260, 257, 7, 301, 274, -10104, 663, 12345]


class ScriptedDriver:
    """A DB-API driver that remembers every call and fails as told: `fail[call]` is a list of codes, used up in order.

    Calls: connect, cursor, execute, executemany, fetchall, commit, rollback, setautocommit, close.
    """

    class Error(Exception):
        def __init__(self, errorcode: int, errortext: str) -> None:
            super().__init__(errorcode, errortext)
            self.errorcode, self.errortext = errorcode, errortext

    def __init__(self, **fail: list[int]) -> None:
        self.fail = fail
        self.calls: list[str] = []
        self.properties: list[dict[str, object]] = []
        self.threads: dict[int, set[int]] = {}
        self.answers: dict[str, list[tuple[object, ...]]] = {}
        self.before: Callable[[str], None] = lambda call: None

    def did(self, call: str, detail: str = "") -> None:
        self.calls.append(f"{call} {detail}".strip())
        self.before(call)
        if self.fail.get(call):
            code = self.fail[call].pop(0)
            if code:
                raise self.Error(code, "scripted, with row text Geheim")

    def count(self, call: str) -> int:
        return sum(made.split()[0] == call for made in self.calls)

    def connect(self, **properties: object) -> ScriptedConnection:
        self.properties.append(properties)
        self.did("connect")
        return ScriptedConnection(self)


class ScriptedConnection:
    def __init__(self, driver: ScriptedDriver) -> None:
        self.driver = driver
        self.closed = False
        self.busy = threading.Lock()

    def _did(self, call: str, detail: str = "") -> None:
        assert self.busy.acquire(blocking=False), "two threads in one connection"
        try:
            self.driver.threads.setdefault(id(self), set()).add(threading.get_ident())
            self.driver.did(call, detail)
        finally:
            self.busy.release()

    def cursor(self) -> ScriptedCursor:
        self._did("cursor")
        return ScriptedCursor(self)

    def setautocommit(self, auto: bool) -> None:
        self._did("setautocommit", str(auto))

    def commit(self) -> None:
        self._did("commit")

    def rollback(self) -> None:
        self._did("rollback")

    def close(self) -> None:
        self._did("close")
        self.closed = True


class ScriptedCursor:
    def __init__(self, connection: ScriptedConnection) -> None:
        self.connection = connection
        self.rowcount = 7
        self.rows: list[tuple[object, ...]] = []

    def __del__(self) -> None:
        if not self.connection.closed:
            self.connection.driver.calls.append("cursor-dropped-before-close")

    def execute(self, sql: str, parameters: tuple[object, ...] = ()) -> None:
        self.connection._did("execute", sql)
        self.rows = self.connection.driver.answers.get(sql, [(1, "x")])

    def executemany(self, sql: str, rows: object) -> None:
        if not isinstance(rows, list):
            raise TypeError("rows must be a list")
        self.connection._did("executemany", sql)

    def fetchall(self) -> list[tuple[object, ...]]:
        self.connection._did("fetchall")
        return self.rows


OPTIONS = ConnectionOptions(host="h", port=30015, user="U", password="Geheim-1", encrypt=False)
QUICK = RetryPolicy(sleep=lambda seconds: None)


def pool_over(driver: ScriptedDriver, **arguments: object) -> HanaPool:
    return HanaPool(OPTIONS, **{"retry": QUICK, "driver": driver, **arguments})


# ------------------------------------------------------------------------------------------------------- options


def test_properties_are_spelled_exactly_as_the_driver_knows_them():
    options = ConnectionOptions(
        host="db.example",
        user="U",
        password="P",
        trust_store="ca.pem",
        host_name_in_certificate="db.internal",
        connect_timeout=1.5,
        communication_timeout=60,
        application="owl",
    )
    assert options.properties() == {
        "address": "db.example",
        "port": 443,
        "user": "U",
        "password": "P",
        "encrypt": "true",
        "sslValidateCertificate": "true",
        "sslTrustStore": "ca.pem",
        "sslHostNameInCertificate": "db.internal",
        "connectTimeout": "1500",
        "communicationTimeout": "60000",
        "reconnect": "false",
        "vectoroutputtype": "memoryview",
        "sessionVariable:APPLICATION": "owl",
    }


@pytest.mark.proves(8)
def test_encryption_is_stated_even_when_it_is_off():
    properties = ConnectionOptions(host="h", encrypt=False, validate_certificate=False).properties()
    assert properties["encrypt"] == properties["sslValidateCertificate"] == "false"


def test_a_user_store_key_replaces_host_and_password():
    properties = ConnectionOptions(userkey="OWL", host="h", user="U", password="P").properties()
    assert properties["userkey"] == "OWL"
    assert not {"address", "port", "user", "password"} & properties.keys()


@given(st.booleans(), st.floats(0.001, 86_400), st.sampled_from(["", "KEY"]))
def test_no_options_leave_out_timeouts_or_encryption(encrypt, timeout, userkey):
    options = ConnectionOptions(
        host="h", userkey=userkey, encrypt=encrypt, connect_timeout=timeout, communication_timeout=timeout
    )
    properties = options.properties()
    assert properties["reconnect"] == "false"
    assert properties["encrypt"] == ("true" if encrypt else "false")
    assert int(properties["connectTimeout"]) > 0
    assert int(properties["communicationTimeout"]) > 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({}, "`host`"),
        ({"host": "h", "port": 0}, "`port`"),
        ({"host": "h", "port": 70000}, "`port`"),
        ({"host": "h", "connect_timeout": 0}, "`connect_timeout`"),
        ({"host": "h", "communication_timeout": float("nan")}, "`communication_timeout`"),
    ],
)
def test_impossible_options_are_refused_by_name(wrong, named):
    with pytest.raises(ConfigurationError, match=named):
        ConnectionOptions(**wrong)


def test_the_options_are_closed_and_hide_the_password():
    with pytest.raises(TypeError):
        ConnectionOptions(host="h", encrpyt=True)
    assert "Geheim" not in repr(OPTIONS)
    assert [field.name for field in fields(ConnectionOptions) if not field.repr] == ["password"]


def test_a_missing_trust_store_file_is_named_before_connecting(tmp_path):
    driver = ScriptedDriver()
    options = ConnectionOptions(host="h", trust_store=str(tmp_path / "ca.pem"))
    with (
        HanaPool(options, retry=QUICK, driver=driver) as pool,
        pytest.raises(ConnectFailed, match=r"trust_store.*ca\.pem"),
    ):
        pool.read("S")
    assert driver.calls == []


@pytest.mark.parametrize("trust_store", ["-----BEGIN CERTIFICATE-----\n...", ""])
def test_a_pem_text_is_no_file(trust_store):
    ConnectionOptions(host="h", trust_store=trust_store).check_trust_store()


def test_without_the_driver_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hdbcli", None)
    monkeypatch.setitem(__import__("sys").modules, "hdbcli.dbapi", None)
    with pytest.raises(ConfigurationError, match=re.escape(install_command("hana"))):
        hana.load_driver()


# ------------------------------------------------------------------------------------------------------- quoting


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=127))
def test_quoting_round_trips(name):
    quoted = quote(name)
    assert quoted[0] == quoted[-1] == '"'
    inside = quoted[1:-1]
    assert '"' not in inside.replace('""', "")
    assert inside.replace('""', '"') == name


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 128, "\ud800"])
def test_what_can_be_no_name_is_refused(name):
    with pytest.raises(ConfigurationError):
        quote(name)


@pytest.mark.parametrize(("name", "quoted"), [('a"b', '"a""b"'), ("/BIC/AZD", '"/BIC/AZD"'), ("a.b c", '"a.b c"')])
def test_odd_names(name, quoted):
    assert quote(name) == quoted


# ------------------------------------------------------------------------------------------- retries by error code


@pytest.mark.parametrize("code", RETRYABLE)
@pytest.mark.parametrize("call", ["execute", "fetchall", "cursor"])
@pytest.mark.proves(4)
def test_a_read_survives_every_retryable_code_at_every_call(code, call):
    driver = ScriptedDriver(**{call: [code, code]})
    with pool_over(driver) as pool:
        assert pool.read("SELECT 1 FROM T WHERE A = ?", (1,)) == [(1, "x")]
    assert driver.count("connect") == (3 if code in LOST else 1)


@pytest.mark.parametrize("code", RETRYABLE)
@pytest.mark.parametrize("call", ["execute", "executemany", "commit", "cursor", "setautocommit"])
@pytest.mark.proves(4)
def test_a_transaction_is_run_again_as_a_whole(code, call):
    driver = ScriptedDriver(**{call: [code]})
    begun: list[int] = []

    def work(session):
        begun.append(1)
        session.execute("DELETE", (1,))
        session.execute_many("INSERT", [(1,)])
        return "done"

    with pool_over(driver) as pool:
        assert pool.in_transaction(work) == "done"
    reached = [name for name in driver.calls if name in {"execute DELETE", "executemany INSERT", "commit"}]
    assert reached[-3:] == ["execute DELETE", "executemany INSERT", "commit"]
    assert len(begun) == (1 if call == "setautocommit" else 2)
    assert "cursor-dropped-before-close" not in driver.calls


@pytest.mark.parametrize("code", PERMANENT)
@pytest.mark.parametrize("call", ["connect", "execute", "fetchall"])
def test_nothing_else_is_tried_twice(code, call):
    driver = ScriptedDriver(**{call: [code]})
    with pool_over(driver) as pool, pytest.raises(ConnectorError) as caught:
        pool.read("SELECT", (1,), doing="reading S.T")
    assert driver.count(call) == 1
    assert "Geheim" not in str(caught.value) or code in {258, 259, 260, 257, 7, -10104}
    assert caught.value.__cause__ is None


@pytest.mark.proves(4)
def test_attempts_are_bounded():
    driver = ScriptedDriver(execute=[131] * 50)
    policy = RetryPolicy(attempts=5, sleep=lambda seconds: None)
    with pool_over(driver, retry=policy) as pool, pytest.raises(TransactionRolledBack):
        pool.read("SELECT")
    assert driver.count("execute") == 5


def test_waits_are_jittered_grow_and_stay_bounded():
    waits: list[float] = []
    driver = ScriptedDriver(execute=[131] * 400)
    policy = RetryPolicy(attempts=200, seconds=1e9, first_wait=0.1, longest_wait=2.0, sleep=waits.append)
    with pool_over(driver, retry=policy) as pool, pytest.raises(TransactionRolledBack):
        pool.read("SELECT")
    assert len(waits) == 199
    assert min(waits) >= 0
    assert max(waits) <= 2.0
    assert waits[0] <= 0.1
    assert len({round(wait, 6) for wait in waits}) > 100


def test_a_pause_ends_at_once_when_the_call_is_cancelled():
    call = Cancellation()
    patient = RetryPolicy(attempts=3, first_wait=3600, longest_wait=3600, seconds=1e9)

    def leaves_and_fails() -> None:
        call.cancel()
        raise ConnectionLost("the connection to HANA is gone")

    with pytest.raises(Cancelled):
        patient.call(leaves_and_fails, cancellation=call)


def test_time_is_bounded_too():
    driver = ScriptedDriver(execute=[131] * 1000)
    policy = RetryPolicy(attempts=10**6, seconds=0.05, first_wait=0.01, longest_wait=0.01)
    with pool_over(driver, retry=policy) as pool, pytest.raises(TransactionRolledBack):
        pool.read("SELECT")
    assert driver.count("execute") < 200


@pytest.mark.parametrize(
    ("codes", "attempts"),
    [
        ([4] * 9, 2),
        ([131] * 9, 5),
        ([131, 4, 4], 2),  # the second ends in Overloaded
        ([4, 131, 131, 131, 131, 131], 5),
    ],
)
def test_who_can_do_with_less_need_not_wait_for_memory(codes, attempts):
    waits: list[float] = []
    driver = ScriptedDriver(execute=list(codes))
    policy = RetryPolicy(attempts=5, sleep=waits.append)
    with pool_over(driver, retry=policy) as pool, pytest.raises(DatabaseError) as caught:
        pool.in_transaction(lambda session: session.execute("INSERT"), overloaded=2)
    assert caught.value.code == codes[attempts - 1]
    assert (driver.count("execute"), len(waits)) == (attempts, attempts - 1), "it waits in between, all the same"


def test_a_statement_outside_read_and_in_transaction_is_not_retried():
    driver = ScriptedDriver(execute=[131])
    with pool_over(driver) as pool, pytest.raises(TransactionRolledBack):
        pool.execute("CREATE TABLE T")
    assert driver.count("execute") == 1


# --------------------------------------------------------------------------------------------------------- login


@pytest.mark.proves(7)
def test_a_wrong_password_is_sent_exactly_once_ever():
    driver = ScriptedDriver(connect=[10])
    with pool_over(driver) as pool:
        for _ in range(3):
            with pytest.raises(LoginRefused, match="`password`"):
                pool.read("SELECT")
        assert driver.count("connect") == 1
        pool.allow_login()
        assert pool.read("SELECT")
    assert driver.count("connect") == 2


@pytest.mark.proves(7)
def test_many_threads_with_a_wrong_password_make_one_attempt():
    driver = ScriptedDriver(connect=[10] * 100)
    driver.before = lambda call: time.sleep(0.02) if call == "connect" else None
    refused: list[Exception] = []
    with pool_over(driver, size=8) as pool:

        def work():
            try:
                pool.read("SELECT")
            except LoginRefused as error:
                refused.append(error)

        run_threads(8, work)
    assert driver.count("connect") == 1
    assert len(refused) == 8
    assert len(set(map(id, refused))) == 8, "one exception object must not be raised in two threads"


def test_threads_that_waited_for_a_failing_connect_share_its_failure():
    driver = ScriptedDriver(connect=[-10709] * 100)
    here = threading.Barrier(8, timeout=30)

    def before(call: str) -> None:
        if call == "connect":
            time.sleep(0.1)  # for those that are about to ask

    driver.before = before
    with pool_over(driver, size=8, retry=RetryPolicy(attempts=1)) as pool:

        def work():
            here.wait()
            with pytest.raises(Unreachable):
                pool.read("SELECT")

        run_threads(8, work)
    assert driver.count("connect") <= 2


def test_an_unreachable_host_is_tried_again_and_named():
    driver = ScriptedDriver(connect=[-10709] * 9)
    with pool_over(driver) as pool, pytest.raises(Unreachable, match=r"connecting to h:30015"):
        pool.read("SELECT")
    assert driver.count("connect") == QUICK.attempts


def test_a_schema_that_cannot_be_set_closes_the_connection():
    driver = ScriptedDriver(execute=[362])
    options = ConnectionOptions(host="h", schema='my "s"')
    with HanaPool(options, retry=QUICK, driver=driver) as pool, pytest.raises(ConnectorError, match="`schema`"):
        pool.read("SELECT")
    assert driver.calls[-2:] == ['execute SET SCHEMA "my ""s"""', "close"]


# ------------------------------------------------------------------------------------------------ pool and cursors


def run_threads(count: int, work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors


def test_connections_are_bounded_reused_and_never_shared_at_once():
    driver = ScriptedDriver()
    driver.before = lambda call: time.sleep(0.001)

    def work():
        for _ in range(10):
            pool.read("SELECT", (1,))

    with pool_over(driver, size=3) as pool:
        run_threads(8, work)
        assert 1 <= driver.count("connect") <= 3
    assert driver.count("close") == driver.count("connect")


def test_one_thread_uses_one_connection_again_and_again():
    driver = ScriptedDriver()
    with pool_over(driver) as pool:
        for _ in range(20):
            pool.read("SELECT")
    assert driver.count("connect") == 1


def test_a_second_connection_in_the_same_thread_is_refused():
    with pool_over(ScriptedDriver()) as pool, pool.session(), pytest.raises(RuntimeError, match="already holds"):
        pool.read("SELECT")


def test_an_exhausted_pool_says_which_setting_helps():
    options = ConnectionOptions(host="h", communication_timeout=0.05)
    with HanaPool(options, 1, retry=RetryPolicy(attempts=1), driver=ScriptedDriver()) as pool, pool.session():
        caught: list[Exception] = []

        def work():
            try:
                pool.read("SELECT")
            except Overloaded as error:
                caught.append(error)

        run_threads(1, work)
    assert "`pool_size`" in str(caught[0])


def test_the_same_statement_keeps_its_cursor():
    driver = ScriptedDriver()
    with pool_over(driver) as pool:
        for _ in range(5):
            pool.read("SELECT A WHERE K = ?", (1,))
            pool.read("SELECT B WHERE K = ?", (1,))
            pool.read("SELECT 1 FROM DUMMY")
            pool.read("SELECT 2 FROM DUMMY")
    assert driver.count("cursor") == 3


def test_connections_are_replaced_once_a_table_has_other_types():
    driver = ScriptedDriver()
    with pool_over(driver) as pool:
        for types, connections in ((["INTEGER"], 1), (["INTEGER"], 1), (["NVARCHAR"], 2), (["NVARCHAR"], 2)):
            pool.note_types("S.T", types)
            pool.note_types("S.OTHER", [])
            pool.read("SELECT A WHERE K = ?", (1,))
            assert (driver.count("connect"), driver.count("close")) == (connections, connections - 1)
    assert "cursor-dropped-before-close" not in driver.calls


def test_cursors_are_bounded_and_never_dropped_before_the_connection_is_closed():
    driver = ScriptedDriver()
    with pool_over(driver) as pool:
        for number in range(200):
            pool.read(f"SELECT {number} WHERE K = ?", (1,))
        assert driver.count("cursor") == hana.Session.CURSORS
        gc.collect()
        assert "cursor-dropped-before-close" not in driver.calls
    gc.collect()
    assert "cursor-dropped-before-close" not in driver.calls


@pytest.mark.parametrize("code", LOST)
def test_a_dead_connection_is_closed_before_its_cursors_go(code):
    driver = ScriptedDriver(execute=[0, code], close=[-10807])
    with pool_over(driver) as pool:
        pool.read("SELECT A WHERE K = ?", (1,))
        pool.read("SELECT B WHERE K = ?", (1,))
        gc.collect()
    assert driver.count("connect") == 2
    dropped = [i for i, call in enumerate(driver.calls) if call == "cursor-dropped-before-close"]
    assert all(i > driver.calls.index("close") for i in dropped)


def test_an_idle_connection_is_asked_for_a_sign_of_life():
    driver = ScriptedDriver()
    with pool_over(driver, idle_check=0.0) as pool:
        pool.read("SELECT A")
        pool.read("SELECT B")
    assert [call for call in driver.calls if call.startswith("execute")] == [
        "execute SELECT A",
        "execute SELECT 1 FROM DUMMY",
        "execute SELECT B",
    ]


def test_a_connection_that_died_while_idle_is_replaced_unseen():
    driver = ScriptedDriver(execute=[0, -10807])
    with pool_over(driver, idle_check=0.0, retry=RetryPolicy(attempts=1)) as pool:
        pool.read("SELECT A")
        assert pool.read("SELECT B") == [(1, "x")]
    assert driver.count("connect") == 2


def test_a_connection_in_use_is_not_asked():
    driver = ScriptedDriver()
    with pool_over(driver, idle_check=60.0) as pool:
        pool.read("SELECT A")
        pool.read("SELECT B")
    assert "execute SELECT 1 FROM DUMMY" not in driver.calls


def test_a_closed_pool_is_closed():
    driver = ScriptedDriver()
    pool = pool_over(driver)
    with pool.session():
        pool.close()
        assert driver.count("close") == 0
    assert driver.count("close") == 1
    pool.close()
    with pytest.raises(ConnectionLost, match="closed"):
        pool.read("SELECT")


def test_after_ctrl_c_the_connection_is_not_used_again():
    driver = ScriptedDriver()
    with pool_over(driver) as pool:
        with pytest.raises(KeyboardInterrupt), pool.session():
            raise KeyboardInterrupt
        assert driver.count("close") == 1
        pool.read("SELECT")
    assert driver.count("connect") == 2


# --------------------------------------------------------------------------------------------------- transactions


def test_a_transaction_commits():
    driver = ScriptedDriver()
    with pool_over(driver) as pool, pool.transaction() as session:
        session.execute("INSERT", (1,))
    assert driver.calls[1:] == [
        "setautocommit False",
        "cursor",
        "execute INSERT",
        "commit",
        "setautocommit True",
        "close",
    ]


def test_any_exception_rolls_back_and_the_connection_stays():
    driver = ScriptedDriver()
    with pool_over(driver) as pool:
        with pytest.raises(ZeroDivisionError), pool.transaction() as session:
            session.execute("INSERT", (1 / 0,))
        assert driver.calls[-2:] == ["rollback", "setautocommit True"]
        pool.read("SELECT")
    assert driver.count("connect") == 1
    assert driver.count("commit") == 0


def test_a_rollback_that_fails_costs_the_connection_not_the_error():
    driver = ScriptedDriver(execute=[301], rollback=[-10807])
    with pool_over(driver) as pool:
        with pytest.raises(RowRejected), pool.transaction() as session:
            session.execute("INSERT", (1,))
        pool.read("SELECT")
    assert driver.count("connect") == 2


def test_a_failed_commit_is_rolled_back_and_raised():
    driver = ScriptedDriver(commit=[131])
    with (
        pool_over(driver) as pool,
        pytest.raises(TransactionRolledBack, match="commit"),
        pool.transaction(doing="writing T"),
    ):
        pass
    assert driver.calls[-3:] == ["rollback", "setautocommit True", "close"]


def test_what_is_committed_is_not_done_twice_when_autocommit_cannot_be_restored():
    driver = ScriptedDriver(setautocommit=[0, 131])
    with pool_over(driver) as pool:
        pool.in_transaction(lambda session: session.execute("INSERT", (1,)))
        pool.read("SELECT")
    assert driver.count("commit") == 1
    assert driver.count("connect") == 2


def test_writing_no_rows_sends_nothing():
    driver = ScriptedDriver()
    with pool_over(driver) as pool, pool.session() as session:
        session.execute_many("INSERT", [])
    assert driver.count("executemany") == 0


def test_the_number_of_affected_rows_comes_back():
    with pool_over(ScriptedDriver()) as pool:
        assert pool.execute("UPDATE") == 7


def test_a_value_the_driver_cannot_convert_is_a_rejected_row_without_its_text():
    with (
        pool_over(ScriptedDriver()) as pool,
        pool.session() as session,
        pytest.raises(RowRejected, match="TypeError") as caught,
    ):
        session.execute_many("INSERT", ("Geheim",))
    assert "Geheim" not in str(caught.value)


def test_every_statement_is_told_and_no_parameter():
    told: list[str] = []
    with pool_over(ScriptedDriver(), on_statement=told.append) as pool:
        pool.read("SELECT A WHERE K = ?", ("Geheim",))
        with pool.transaction() as session:
            session.execute_many("INSERT (?)", [("Geheim",)])
    assert told == ["SELECT A WHERE K = ?", "INSERT (?)"]


# ------------------------------------------------------------------------------------------------------- features


def test_features_are_what_the_server_states():
    driver = ScriptedDriver()
    driver.answers = {
        "SELECT TYPE_NAME FROM SYS.DATA_TYPES": [("INTEGER",), ("REAL_VECTOR",)],
        "SELECT VERSION FROM SYS.M_DATABASE": [("4.00.000.00",)],
        "SELECT CLOUD_VERSION FROM SYS.M_DATABASE": [("2024.40.0",)],
    }
    with pool_over(driver) as pool:
        assert HanaFeatures.probe(pool) == HanaFeatures(True, False, "2024.40.0")


def test_on_premise_has_no_cloud_version_column():
    driver = ScriptedDriver(execute=[0, 260, 258])
    with pool_over(driver) as pool:
        assert HanaFeatures.probe(pool) == HanaFeatures(False, False, "")
