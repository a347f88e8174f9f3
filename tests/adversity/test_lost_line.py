"""The line to the emulator breaks, stalls and comes back while a sync reads and writes: no row lost, none doubled."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hdbcli import dbapi

from app.src.service.wiring import EngineEmbedder
from connector.errors import ConnectionLost, DatabaseError, Unreachable
from connector.hana.source import HanaSource
from connector.model import Query
from connector.retry import RetryPolicy
from connector.stores.state import LeaseTimes
from connector.sync.run import Ends
from hana_emulator.testing import running
from tests.adversity.proxy import ANY, COMMIT, CONNECT, EXECUTE, EXECUTE_DIRECT, PREPARE, Fault, Proxy, Strike
from tests.adversity.scene import EMPTY, PAGE, PERSISTENT, ROWS, Scene, WatchedSource
from tests.ports import free_port
from tests.slow import slow

SOON = LeaseTimes(ttl=4, renew=0.5, poll=0.02)
LOST = [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.HALF_REPLY]
pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.parametrize("fault", [Fault.HALF_REPLY, *slow(Fault.LOSE_REQUEST, Fault.LOSE_REPLY)])
@pytest.mark.proves(3)
def test_reading_goes_on_where_it_was_cut(scene: Scene, fault: Fault) -> None:
    """Every second page is cut once: each is read again, from the key where the one before it ended."""
    with Proxy(scene.emulator.port) as proxy:
        ends = scene.ends(proxy.port)
        table = ends.source.describe(scene.spec.source)
        assert table.primary_key == ("K",)
        proxy.strike(*(Strike(EXECUTE, nth, fault) for nth in (1, 3, 5, 8)))
        report = scene.sync(ends)
        assert proxy.fired.is_set()
    assert (report.read, report.upserted, report.superseded) == (ROWS, ROWS - EMPTY, 0)
    assert scene.converges().upserted == 0


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.parametrize("share", [0.35, *slow(0.1, 0.6, 0.9)])
@pytest.mark.proves(3)
def test_a_reset_after_so_many_bytes(scene: Scene, share: float) -> None:
    """Wherever in the stream of replies the reset falls, in the middle of a page too."""
    with Proxy(scene.emulator.port) as proxy:
        assert sum(len(page) for page in HanaSource(scene.pool(proxy.port)).pages(_query(scene), PAGE)) == ROWS
        whole = proxy.reply_bytes
    with Proxy(scene.emulator.port, cut_after=int(whole * share)) as proxy:
        keys = [row.key for page in HanaSource(scene.pool(proxy.port)).pages(_query(scene), PAGE) for row in page]
        assert proxy.fired.is_set()
    assert keys == [(number,) for number in range(ROWS)]


def _query(scene: Scene) -> Query:
    return Query(scene.spec.source, ("K",), ("TXT", "GRP"))


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, *slow(Fault.LOSE_REQUEST, Fault.HALF_REPLY)])
@pytest.mark.parametrize("nth", [6, *slow(2)])
@pytest.mark.proves(3)
def test_a_commit_of_which_nobody_knows_whether_it_happened(scene: Scene, fault: Fault, nth: int) -> None:
    """It is done again, and doing it twice is the same as once."""
    with Proxy(scene.emulator.port) as proxy:
        ends = scene.ends(proxy.port)
        proxy.strike(Strike(COMMIT, nth, fault))
        report = scene.sync(ends)
        assert proxy.fired.is_set()
    assert (report.read, report.upserted) == (ROWS, ROWS - EMPTY)
    assert scene.converges().unchanged == ROWS - EMPTY


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_a_cut_at_any_request(scene: Scene) -> None:
    _cut_at(scene, random.randint(1, 60), random.choice(LOST))


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize("nth", range(1, 80))
@pytest.mark.parametrize("fault", LOST)
@pytest.mark.proves(3)
def test_a_cut_at_every_request(scene: Scene, nth: int, fault: Fault) -> None:
    _cut_at(scene, nth, fault)


def _cut_at(scene: Scene, nth: int, fault: Fault) -> None:
    """Either the sync rides over it, or it says that the line is lost; the store is sound in both cases. Where the
    answer to taking the lease is lost, the lease that nobody knows of has to end first.
    """
    with Proxy(scene.emulator.port) as proxy:
        ends = Ends(HanaSource(scene.pool(proxy.port)), scene.store(proxy.port, SOON), scene.embedder)
        proxy.strike(Strike(ANY, nth, fault))
        try:
            report = scene.sync(ends, lease_wait=60.0)
            ended: object = (report.read, report.upserted)
        except DatabaseError as error:
            ended = error.retryable or error
        assert ended in (True, (ROWS, ROWS - EMPTY)), f"request {nth}, {fault.name}"
    scene.converges()


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize("message", [COMMIT])
@pytest.mark.proves(3)
def test_a_line_that_stalls_is_given_up_after_the_communication_timeout(scene: Scene, message: int) -> None:
    with Proxy(scene.emulator.port) as proxy:
        ends = scene.ends(proxy.port, communication_timeout=0.4, retry=PERSISTENT)
        proxy.strike(Strike(message, 5, Fault.STALL))
        start = time.monotonic()
        report = scene.sync(ends)
        assert proxy.fired.is_set()
    assert report.upserted == ROWS - EMPTY
    assert time.monotonic() - start < 30, "of the 60 s that a connection waits otherwise"
    scene.converges()


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.proves(3)
def test_a_line_that_stays_dead_ends_with_a_clear_error_after_the_retries(scene: Scene) -> None:
    with Proxy(scene.emulator.port) as proxy:
        ends = scene.ends(proxy.port, retry=RetryPolicy(attempts=3, first_wait=0.001, longest_wait=0.002))
        scene.sync(ends)
        before = scene.content(ends.store)
        proxy.strike(*(Strike(EXECUTE, nth, Fault.LOSE_REQUEST) for nth in range(2, 30)))
        with pytest.raises(ConnectionLost, match=r"ROWS") as caught:
            scene.sync(ends)
        assert proxy.requests[EXECUTE] == 1 + 3
    assert scene.emulator.password not in str(caught.value)
    assert scene.content() == before


# ----------------------------------------------------------------------------------- ended from the server's side


@pytest.mark.parametrize("scene", ["hana", *slow("local")], indirect=True)
@pytest.mark.parametrize("fault_at", ["page", *slow("between")])
def test_sessions_disconnected_by_an_administrator(scene: Scene, fault_at: str) -> None:
    """All sessions but the administrator's, before each page: while idle in the pool and while in use."""
    calls: list[int] = []

    def disconnect(number: int) -> None:
        calls.append(number)
        if fault_at == "page" or number == 3:
            _disconnect_all(scene)

    plain = scene.ends(retry=PERSISTENT)
    ends = Ends(WatchedSource(scene.pool(retry=PERSISTENT), disconnect), plain.store, plain.embedder)
    report = scene.sync(ends)
    assert (report.read, report.upserted, report.superseded) == (ROWS, ROWS - EMPTY, 0)
    assert calls[:6] == [1, 2, 3, 4, 5, 6]
    assert scene.converges().upserted == 0


def _disconnect_all(scene: Scene) -> None:
    connection = scene.emulator.connect(autocommit=True)
    cursor = connection.cursor()
    cursor.execute("SELECT CURRENT_CONNECTION FROM DUMMY")
    for id_ in range(scene.first_session, cursor.fetchone()[0]):
        with suppress(dbapi.Error):  # it has gone by itself
            cursor.execute(f"ALTER SYSTEM DISCONNECT SESSION '{id_}'")
    connection.close()


Mortal = tuple[Scene, Callable[[], None]]


@pytest.fixture
def mortal(tmp_path: Path, hashing: EngineEmbedder, request: pytest.FixtureRequest) -> Iterator[Mortal]:
    """A scene in an emulator of its own, which may be killed; `restart` brings it back at the same port."""
    with ExitStack() as stack:
        data = ("--data", str(tmp_path / "data"))
        emulator = stack.enter_context(running(*data))
        scene = Scene(emulator, "SAPDEMO", request.param, tmp_path / "scene", hashing)
        stack.callback(scene.close)

        def restart() -> None:
            emulator.process.kill()
            emulator.process.wait(60)
            scene.disconnect()
            stack.enter_context(running("--port", str(emulator.port), *data))

        yield scene, restart


@pytest.mark.parametrize("mortal", ["hana", *slow("local")], indirect=True)
@pytest.mark.proves(3, 6)
def test_the_emulator_is_killed_and_restarted_in_the_middle_of_a_sync(mortal: Mortal) -> None:
    """The reader restarts it; meanwhile the writer tries, and is refused, as long as that takes."""
    scene, restart = mortal
    patient = RetryPolicy(attempts=200, first_wait=0.1, longest_wait=0.3)
    pool, plain = scene.pool(retry=patient), scene.ends(retry=patient)
    source = WatchedSource(pool, lambda number: restart() if number == 4 else None)
    report = scene.sync(Ends(source, plain.store, plain.embedder))
    assert (report.read, report.upserted) == (ROWS, ROWS - EMPTY)
    assert scene.converges().unchanged == ROWS - EMPTY


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.proves(6)
def test_a_sync_into_an_emulator_that_stays_away_exits_with_3(scene: Scene) -> None:
    scene.sync()
    closed_port, start = free_port(), time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((scene.emulator.host, closed_port), timeout=30)
    code, _, errors = scene.cli("sync", "rows", port=closed_port)
    assert code == 3, errors
    assert f"{scene.emulator.host}:{closed_port}" in errors
    assert time.monotonic() - start < 50
    scene.converges()


# -------------------------------------------------------------------------------------------------------- logging in


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize("arguments", [["sync", "--all"], *slow(["search", "rows", "pump"], ["doctor"])])
@pytest.mark.proves(7)
def test_a_wrong_password_is_sent_exactly_once(scene: Scene, arguments: list[str]) -> None:
    """HANA locks a user after a few failures, so neither retries nor the second collection may send it again."""
    with (scene.folder / "owl-sap.toml").open("a") as file:
        file.write(f'\n[[collections]]\nname = "more"\nsource = "{scene.schema}.ROWS"\ntemplate = "{{TXT}}"\n')
    with Proxy(scene.emulator.port) as proxy:
        code, out, errors = scene.cli(*arguments, port=proxy.port, env={"HANA_PASSWORD": "canary-4711"})
        assert proxy.requests[CONNECT] == 1, (proxy.requests, out, errors)
    assert code == (1 if arguments == ["doctor"] else 3), errors
    assert "login refused" in out + errors
    assert "canary" not in out + errors


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_a_line_cut_during_login_is_tried_again(scene: Scene) -> None:
    with Proxy(scene.emulator.port, Strike(CONNECT, 1, Fault.LOSE_REPLY)) as proxy:
        assert scene.pool(proxy.port).read("SELECT 1 FROM DUMMY") == [(1,)]
        assert proxy.requests[CONNECT] == 2
    with (
        Proxy(scene.emulator.port, Strike(CONNECT, 1, Fault.LOSE_REQUEST)) as proxy,
        pytest.raises(Unreachable, match=str(proxy.port)),
    ):
        scene.pool(proxy.port, retry=RetryPolicy(attempts=1)).read("SELECT 1 FROM DUMMY")


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_what_changes_data_outside_a_transaction_is_not_sent_twice(scene: Scene) -> None:
    """A plain `execute` may not be repeatable, so it is the caller who decides."""
    with Proxy(scene.emulator.port) as proxy:
        pool = scene.pool(proxy.port)
        pool.read("SELECT 1 FROM DUMMY")
        proxy.strike(Strike(EXECUTE_DIRECT, 1, Fault.LOSE_REPLY), Strike(PREPARE, 1, Fault.LOSE_REPLY))
        with pytest.raises(ConnectionLost):
            pool.execute(f"""INSERT INTO "{scene.schema}"."ROWS" VALUES (9999, 'x', 'G')""")
        assert proxy.requests[EXECUTE_DIRECT] == 1
        assert pool.read(f'SELECT COUNT(*) FROM "{scene.schema}"."ROWS" WHERE "K" = 9999') == [(1,)]
