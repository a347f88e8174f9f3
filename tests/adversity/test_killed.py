"""SIGKILL of `owl-sap sync`, at chosen requests and at random moments: the next run is right, whatever was cut off."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from tests.adversity.proxy import ANY, COMMIT, EXECUTE, Fault, Proxy, Strike
from tests.adversity.scene import EMPTY, ROWS, Scene
from tests.slow import slow


def killed_at(scene: Scene, message: int, nth: int, fault: Fault, delay: float = 0.0) -> bool:
    """Whether the sync was killed before it could end by itself."""
    with Proxy(scene.emulator.port) as proxy:
        process = scene.spawn("sync", "rows", port=proxy.port)

        def kill() -> None:
            if delay:
                threading.Timer(delay, process.kill).start()
            else:
                process.kill()

        proxy.strike(Strike(message, nth, fault, kill))
        with process:
            process.communicate(timeout=60)
        assert proxy.fired.is_set() or process.returncode == 0
    time.sleep(0.02)  # the emulator sees the dead line and rolls back
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("message", "nth", "fault"), [(EXECUTE, 12, Fault.LOSE_REQUEST)])
def test_killed_at_a_chosen_request(scene: Scene, message: int, nth: int, fault: Fault) -> None:
    killed_at(scene, message, nth, fault)
    report = scene.converges()
    assert (report.read, report.empty) == (ROWS, EMPTY)


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize(
    ("nth", "fault", "stored"),
    [(2, Fault.LOSE_REPLY, 38), *slow((2, Fault.LOSE_REQUEST, 0), (4, Fault.LOSE_REPLY, 96))],
)
@pytest.mark.proves(1)
def test_killed_around_a_commit(scene: Scene, nth: int, fault: Fault, stored: int) -> None:
    """Commit 1 takes the lease, each later one stores pages until 20 rows are together: two pages of 19 (one row of
    each is empty), one of 20, two of 19. Exactly those whose commit the server heard are there."""
    assert killed_at(scene, COMMIT, nth, fault)
    assert len(scene.sound()) == stored
    assert scene.converges().unchanged == stored


@pytest.mark.slow
def test_killed_at_a_random_moment(scene: Scene) -> None:
    killed_at(scene, EXECUTE, 4, Fault.NOTHING, delay=random.uniform(0.0, 0.12))
    scene.converges()


@pytest.mark.proves(1, 11)
def test_killed_while_it_deletes_and_changes(scene: Scene) -> None:
    """Deletions come last, so a run that is cut off has deleted nothing that a complete scan did not miss."""
    scene.converges()
    scene.run('DELETE FROM "ROWS" WHERE "K" BETWEEN 40 AND 50')
    scene.run("""UPDATE "ROWS" SET "TXT" = 'vacuum pump ' || "K" WHERE "K" < 10 AND "TXT" IS NOT NULL""")
    assert killed_at(scene, EXECUTE, 6, Fault.LOSE_REQUEST)
    assert {f"[{key}]" for key in range(40, 51)} - scene.content().keys() == set()
    scene.expire_lease()
    report = scene.sync()
    assert report.deleted == 11
    assert scene.converges().unchanged == ROWS - EMPTY - 11


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(15))
@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.LOSE_REPLY])
def test_killed_at_many_random_requests(scene: Scene, turn: int, fault: Fault) -> None:
    most = 100 if scene.kind == "hana" else 20
    killed_at(scene, ANY, random.randint(1 + turn * most // 15, (turn + 1) * most // 15), fault)
    scene.converges()


@pytest.mark.slow
@pytest.mark.proves(1)
def test_a_run_right_after_a_kill_waits_for_the_lease_and_succeeds(scene: Scene) -> None:
    """Nothing expires the lease here: it lasts at most 30 s by itself."""
    assert killed_at(scene, EXECUTE, 8, Fault.LOSE_REQUEST)
    start = time.monotonic()
    code, _, errors = scene.cli("sync", "rows")
    assert (code, time.monotonic() - start < 45) == (0, True), errors
    scene.converges()
