"""The emulator fails on order while a sync reads and writes: what HANA's codes and dropped lines make of it, and that
the store equals the source in the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from connector.errors import (
    ConnectionLost,
    ConnectorError,
    DatabaseError,
    Overloaded,
    PermissionRefused,
    TransactionRolledBack,
    Unavailable,
    Unreachable,
)
from connector.retry import RetryPolicy
from tests.adversity.scene import EMPTY, PERSISTENT, ROWS, Scene
from tests.slow import slow

READS = r'SELECT .* FROM "TEST_\d+"\."ROWS"'
WRITES = r"INSERT INTO .*OWL_ROWS_G1"


@pytest.fixture
def broken(scene: Scene) -> Iterator[Scene]:
    yield scene
    scene.run("ALTER SYSTEM CLEAR FAULTS")


def order(scene: Scene, **fault: Any) -> None:
    document = json.dumps(fault).replace("'", "''")
    scene.run(f"ALTER SYSTEM INJECT FAULT '{document}'")


def hits(scene: Scene) -> int:
    return int(scene.run("SELECT SUM(HITS) FROM SYS.M_EMULATOR_FAULTS")[0][0])


def whole(scene: Scene) -> None:
    """A sync that rides over what was ordered, and does its work all the same."""
    report = scene.sync()
    assert (report.read, report.upserted, report.quarantined) == (ROWS, ROWS - EMPTY, 0)
    assert hits(scene) > 0, "nothing was struck"
    scene.run("ALTER SYSTEM CLEAR FAULTS")
    assert scene.converges().unchanged == ROWS - EMPTY


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize("number", [133, *slow(129, 131, 138, 139, 145, 149)])
@pytest.mark.proves(4)
def test_a_write_that_hana_rolls_back_is_done_again(broken: Scene, number: int) -> None:
    order(broken, match=WRITES, action="error", code=number, skip=1, count=2)
    whole(broken)


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize("action", ["drop_after", *slow("drop_before")])
@pytest.mark.parametrize("match", ["^COMMIT$", *slow(WRITES)])
def test_a_line_dropped_while_writing(broken: Scene, action: str, match: str) -> None:
    """-10807, with and without the write behind it: it is done again, and doing it twice is the same as once."""
    order(broken, match=match, action=action, skip=2, count=2)
    whole(broken)


@pytest.mark.parametrize("action", ["drop_before", *slow("drop_after")])
def test_a_line_dropped_while_reading(broken: Scene, action: str) -> None:
    order(broken, match=READS, action=action, skip=1, count=2)
    whole(broken)


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.parametrize("number", [4, 1888, *slow(18, 131, 597, 613, 2048)])
@pytest.mark.proves(5, 6)
def test_a_page_that_fails_for_a_while(broken: Scene, number: int) -> None:
    order(broken, match=READS, action="error", code=number, text="Memory allocation failed", skip=1, count=2)
    whole(broken)


def test_refused_connects(broken: Scene) -> None:
    order(broken, action="refuse", count=2)
    with pytest.raises(Unreachable) as caught:
        broken.pool(retry=RetryPolicy(attempts=1)).read("SELECT 1 FROM DUMMY")
    assert caught.value.code == -10709
    whole_after(broken)


def whole_after(scene: Scene) -> None:
    report = scene.sync()
    assert report.upserted == ROWS - EMPTY
    scene.converges()


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["local"], indirect=True)
def test_slow_packets(broken: Scene) -> None:
    order(broken, match=READS, action="slow", bytes=500, seconds=0.01, count=3)
    whole(broken)


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.proves(3)
def test_a_statement_that_takes_longer_than_the_timeout(broken: Scene) -> None:
    order(broken, match=READS, action="delay", seconds=3, skip=1, count=1)
    report = broken.sync(broken.ends(communication_timeout=0.5, retry=PERSISTENT))
    assert (report.read, hits(broken)) == (ROWS, 1)
    broken.converges()


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (258, PermissionRefused),
        (1888, Unavailable),
        *slow((131, TransactionRolledBack), (133, TransactionRolledBack), (142, Overloaded), (597, ConnectionLost)),
    ],
)
@pytest.mark.proves(4, 6, 7)
def test_what_never_ends_is_reported_by_its_code(broken: Scene, number: int, kind: type[DatabaseError]) -> None:
    order(broken, match=WRITES, action="error", code=number, count=None)
    with pytest.raises(kind) as caught:
        broken.sync()
    assert caught.value.code == number
    attempts = hits(broken)
    assert attempts > 1 if kind.retryable else attempts == 1
    broken.run("ALTER SYSTEM CLEAR FAULTS")
    broken.converges()


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_a_dead_line_that_stays_dead(broken: Scene) -> None:
    order(broken, match=WRITES, action="drop_before", count=None)
    with pytest.raises(ConnectorError) as caught:
        broken.sync()
    assert isinstance(caught.value, ConnectionLost)
    assert caught.value.code == -10807
    broken.run("ALTER SYSTEM CLEAR FAULTS")
    broken.converges()


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "code", "word"),
    [
        ({"action": "error", "code": 258, "text": "insufficient privilege: x", "count": None}, 3, "privilege"),
        *slow(
            ({"action": "error", "code": 131, "count": 1}, 0, ""),
            ({"action": "drop_after", "count": 1}, 0, ""),
            ({"action": "error", "code": 7, "count": None}, 3, "feature"),
        ),
    ],
)
def test_the_command_line_says_how_it_ended(broken: Scene, fault: dict[str, Any], code: int, word: str) -> None:
    order(broken, match=WRITES, **fault)
    ended, _out, errors = broken.cli("sync", "rows", "--json")
    assert (ended, hits(broken) > 0) == (code, True), errors
    assert word in errors
    broken.run("ALTER SYSTEM CLEAR FAULTS")
    broken.converges()
