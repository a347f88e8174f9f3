"""Statements that would never end, or take all there is: each ends by itself in a clean error or is ended by a cancel
and by its client's leaving, and other sessions are answered meanwhile."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emulator_sql import USER, Sql, open_database
from emulator_wire import WireClient
from tests.fuzz.packets import EXECUTE_DIRECT
from tests.fuzz.recordings import create_tables
from tests.fuzz.served import Target, attacked

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads and memory under /proc")
NEIGHBOUR_SECONDS = 15.0
"""The longest that another session may wait; some steps of Python cannot be divided, and test machines are busy."""
CANCELLED_SECONDS = 15.0
OWN_END_SECONDS = 60.0
MEGABYTE = "a" * 1_000_000


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with attacked(tmp_path_factory.mktemp("endless")) as running:
        create_tables(running.emulator)
        running.rests()
        yield running


def doubled(expression: str, times: int) -> str:
    for _ in range(times):
        expression = f"REPLACE({expression}, 'a', 'aaaaaaaaaa')"
    return expression


def nested_entries(count: int) -> str:
    entries = ["A0 AS (SELECT 1 AS N FROM DUMMY)"]
    entries += [f"A{number} AS (SELECT X.N FROM A{number - 1} X, A{number - 1} Y)" for number in range(1, count)]
    return f"WITH {', '.join(entries)} SELECT COUNT(*) FROM A{count - 1}"


def in_dummy(expression: str) -> str:
    return f"SELECT {expression} FROM DUMMY"


ENDING = {
    "alternatives": (in_dummy(f"REPLACE_REGEXPR('(a|aa)+$' IN '{'a' * 60}b')"), 306),
    "like_regexpr": (f"SELECT 1 FROM DUMMY WHERE '{'a' * 60}b' LIKE_REGEXPR '^(a|a)*$'", 306),
    "a long expression": (in_dummy(f"REPLACE_REGEXPR('{'|'.join(map(str, range(20_000)))}' IN 'a')"), 306),
    "more matches than fit": (in_dummy(f"REPLACE_REGEXPR('' IN '{MEGABYTE}a')"), 4),
    "replacements": (in_dummy(f"REPLACE_REGEXPR('a' IN '{MEGABYTE[:9000]}' WITH '{MEGABYTE[:9000]}')"), 4),
    "replace": (in_dummy(f"LENGTH({doubled(repr('aaaa'), 9)})"), 4),
    "pad": (in_dummy("LPAD('a', 2000000000)"), 306),
    "entries that double": (nested_entries(30), 2048),
    "an entry of itself": ("WITH X AS (SELECT 1 AS N FROM DUMMY UNION ALL SELECT N FROM X) SELECT 1 FROM X", 259),
    "recursive": ("WITH RECURSIVE X AS (SELECT 1 AS N FROM DUMMY UNION ALL SELECT N FROM X) SELECT N FROM X", 7),
    "nested json": (in_dummy(f"JSON_QUERY('{'[' * 900}{']' * 900}', '$[0]')"), 306),
    "a huge vector": (in_dummy(f"TO_REAL_VECTOR('[{','.join('1' * 70_000)}]')"), 8),
    "a nested vector": (in_dummy(f"TO_REAL_VECTOR('{'[' * 100_000}')"), 306),
    "exponent": (in_dummy("TO_DECIMAL('1E+999999999')"), 314),
    "negative exponent": (in_dummy("CAST('1E-999999999' AS DECIMAL(9,2))"), 0),
    "digits": (in_dummy("9" * 100_000), 314),
    "deep": (in_dummy("(" * 5_000 + "1" + ")" * 5_000), 257),
    "a long sum": (in_dummy("1" + "+1" * 20_000), 257),
    "columns": (in_dummy(",".join(f"{number} AS C{number}" for number in range(10_000))), 2048),
    "columns of a table": (f"CREATE TABLE WIDE ({','.join(f'C{number} INTEGER' for number in range(10_000))})", 2048),
    "joins": (f"SELECT COUNT(*) FROM {', '.join(f'DUMMY D{number}' for number in range(100))}", 2048),
    "list": (f"SELECT 1 FROM DUMMY WHERE 1 IN ({','.join(map(str, range(50_000)))})", 0),
    "parameters": (f"SELECT 1 FROM DUMMY WHERE 1 IN ({','.join('?' * 40_000)})", 2048),
    "signs": (";" * 1_100_000, 2048),
    "a megabyte of text": (in_dummy(f"LENGTH('{MEGABYTE}')"), 0),
    "hash": (in_dummy(f"HASH_SHA256(TO_BINARY('{MEGABYTE * 5}'))"), 0),
    "safe?": (in_dummy(f"IS_SQL_INJECTION_SAFE('{'a ' * 500_000}', 1000000)"), 0),
    "blanks after a command": ("ALTER SYSTEM CANCEL SESSION '1'" + " " * 300_000 + "x", 257),
    "a session number": (f"ALTER SYSTEM CANCEL SESSION '{'9' * 5_000}'", 1093),
    "like": (f"SELECT 1 FROM DUMMY WHERE '{'a' * 50_000}' LIKE '{'%a_' * 500}%b'", 0),
    "a long pattern": (f"SELECT 1 FROM DUMMY WHERE 'a' LIKE '{'%a' * 100_000}'", 306),
    "format": (in_dummy(f"TO_DATE('2020', '{'YYYY' * 1_000}')"), 306),
}  # fmt: skip
CROSSED = ", ".join(f"NUMBERS N{number}" for number in range(9))
ENDLESS = {
    "count": f"SELECT COUNT(*) FROM {CROSSED}",
    "strings": f"SELECT MAX(LENGTH(N1.N || N2.N)) FROM {CROSSED}",
    "expressions": f"SELECT COUNT(*) FROM {CROSSED} WHERE TO_NVARCHAR(N1.N) LIKE_REGEXPR '^x$'",
    "windows": f"SELECT SUM(N1.N) OVER (PARTITION BY N2.N ORDER BY N3.N) FROM {CROSSED}",
    "not in": f"SELECT COUNT(*) FROM NUMBERS WHERE N NOT IN (SELECT N1.N + 1000 FROM {CROSSED})",
    "insert": f"INSERT INTO NUMBERS SELECT COUNT(*) FROM {CROSSED}",
    "update": f"UPDATE NUMBERS SET N = (SELECT COUNT(*) FROM {CROSSED})",
    "create": f"CREATE TABLE BIG AS (SELECT COUNT(*) AS C FROM {CROSSED})",
    "for update": f"SELECT * FROM NUMBERS WHERE N IN (SELECT COUNT(*) FROM {CROSSED}) FOR UPDATE",
}


def is_answered(client: WireClient, seconds: float) -> bool:
    return bool(select.select([client.socket], [], [], seconds)[0])


def ask_neighbour(neighbour: Any) -> None:
    began = time.monotonic()
    cursor = neighbour.cursor()
    cursor.execute("SELECT K FROM FUZZED WHERE K = -1")
    assert cursor.fetchone() is not None
    assert time.monotonic() - began < NEIGHBOUR_SECONDS


OFTEN = (
    *("alternatives", "an entry of itself", "recursive", "a nested vector", "digits", "a megabyte of text"),
    *("blanks after a command", "a long pattern"),
)
"""Of each kind one that takes little time."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in ENDING]
)
def test_it_ends_by_itself(target: Target, name: str) -> None:
    statement, code = ENDING[name]
    client = target.login()
    with client.socket:
        client.send(EXECUTE_DIRECT, (3, 1, statement.encode()), commit=1)
        until = time.monotonic() + OWN_END_SECONDS
        while not is_answered(client, 0.1):
            assert time.monotonic() < until, "it does not end"
            ask_neighbour(target.neighbour)
        answer = client.answer()
        # On a busy machine the limit of a regular expression's time (306) may come before that of memory (4).
        allowed = {code, 306} if name == "more matches than fit" else {code}
        assert (answer.error()[0] if answer.kind == 5 else 0) in allowed, answer.error()
        assert client.execute("SELECT 1 FROM DUMMY").kind != 5
    assert target.rss() - target.memory < 900 << 20


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("count", "strings", "update") else [pytest.mark.slow])
        for name in ENDLESS
    ],
)
def test_it_is_cancelled(target: Target, name: str) -> None:
    client = target.login()
    with client.socket:
        client.send(EXECUTE_DIRECT, (3, 1, ENDLESS[name].encode()), commit=1)
        assert not is_answered(client, 0.3)
        ask_neighbour(target.neighbour)
        target.neighbour.cursor().execute(f"ALTER SYSTEM CANCEL SESSION '{client.session_id}'")
        assert is_answered(client, CANCELLED_SECONDS), "a cancel does not end it"
        assert client.answer().error()[0] == 139
        assert client.execute("SELECT COUNT(*) FROM NUMBERS").kind != 5


def test_all_end_when_their_clients_leave(target: Target) -> None:
    with contextlib.ExitStack() as stack:
        for statement in ENDLESS.values():
            client = target.login()
            stack.enter_context(client.socket)
            client.send(EXECUTE_DIRECT, (3, 1, statement.encode()))
        time.sleep(0.3)
        ask_neighbour(target.neighbour)
    target.check_settled()
    target.check_alive()


@pytest.mark.not_fast
@pytest.mark.parametrize(
    "statement",
    [
        f"SELECT N1.N FROM {CROSSED} ORDER BY N2.N, N3.N",
        pytest.param(f"SELECT STRING_AGG(N1.N, ',') FROM {CROSSED}", marks=pytest.mark.slow),
        pytest.param(f"SELECT DISTINCT N5.N, N6.N, N7.N, N8.N FROM {CROSSED}", marks=pytest.mark.slow),
        pytest.param(
            f"SELECT N1.N, N2.N, N3.N, COUNT(*) FROM {CROSSED} GROUP BY N1.N, N2.N, N3.N, N4.N", marks=pytest.mark.slow
        ),
        pytest.param(f"SELECT MEDIAN(N1.N) FROM {CROSSED}", marks=pytest.mark.slow),
        pytest.param(f"SELECT N1.N FROM {CROSSED} FOR UPDATE", marks=pytest.mark.slow),
        pytest.param(f"INSERT INTO OTHER SELECT N1.N FROM {CROSSED} ORDER BY N2.N", marks=pytest.mark.slow),
    ],
)
def test_a_statement_that_takes_too_much_memory_ends(statement: str) -> None:
    """With a bound of 100 MB: the rule is the same, only reached sooner."""
    database = open_database()
    database.statement_memory = 100 << 20
    try:
        sql = Sql(database.connect(USER))
        for text in ("CREATE TABLE NUMBERS (N INTEGER)", "CREATE TABLE OTHER (N INTEGER)"):
            sql.run(text)
        sql.many("INSERT INTO NUMBERS VALUES (?)", [(number,) for number in range(300)])
        assert sql.code(statement) == 4
        assert sql.value("SELECT COUNT(*) FROM NUMBERS") == 300
        assert sql.value("SELECT COUNT(*) FROM OTHER") == 0
    finally:
        database.close()
