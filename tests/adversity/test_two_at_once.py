"""Two workers want one collection: one waits, or is told who has it. Workers that stood still past
their lease are those of tests/proof/test_fencing.py.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from connector.errors import LeaseLost
from connector.model import ChangeSet, Checkpoint
from connector.stores.state import LeaseTimes
from connector.sync.run import Ends
from tests.adversity.scene import EMPTY, NAME, ROWS, Scene, WatchedSource

FULL = ROWS - EMPTY
QUICK = LeaseTimes(ttl=3, renew=0.3, poll=0.02)


def test_two_syncs_of_one_collection_add_up(scene: Scene) -> None:
    """The second waits for the first and then finds nothing to do, whichever it is."""
    together = threading.Barrier(2)
    workers = []
    for _ in range(2):
        plain = scene.ends()
        source = WatchedSource(scene.pool(), lambda number: time.sleep(0.01))
        workers.append(Ends(source, plain.store, plain.embedder))

    def work(ends: Ends) -> tuple[int, int, int, int]:
        together.wait(60)
        report = scene.sync(ends)
        return report.upserted, report.unchanged, report.embedded_texts, report.empty

    with ThreadPoolExecutor(2) as threads:
        first, second = sorted(threads.map(work, workers))
    assert first == (0, FULL, 0, EMPTY)
    assert second[:2] == (FULL, 0)
    scene.converges()


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.proves(26)
def test_two_processes_at_once(scene: Scene) -> None:
    processes = [scene.spawn("sync", "rows", "--json") for _ in range(2)]
    reports = []
    for process in processes:
        with process:
            out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        reports += json.loads(out)
    assert sorted((report["upserted"], report["unchanged"]) for report in reports) == [(0, FULL), (FULL, 0)]
    scene.converges()


def test_who_waits_too_long_is_told_who_has_it(scene: Scene) -> None:
    ends = scene.ends()
    ends.store.open(NAME, ends.embedder)
    with ends.store.lease(NAME, "the night job", 0):
        with pytest.raises(LeaseLost, match=r"'rows'.*'the night job'"):
            scene.sync(lease_wait=0.2, owner="another")
        assert scene.content() == {}
    assert scene.sync().upserted == FULL


@pytest.mark.parametrize(
    "changes",
    [
        ChangeSet(deleted=["[1]"]),
        ChangeSet(checkpoint=Checkpoint(rows_read=1)),
        ChangeSet(released=["[1]"]),
    ],
    ids=["deletion", "checkpoint", "release"],
)
@pytest.mark.proves(26)
def test_every_kind_of_change_needs_the_lease(scene: Scene, changes: ChangeSet) -> None:
    scene.sync()
    still = LeaseTimes(ttl=30, renew=60, poll=0.02)  # as a worker that stands still, it renews nothing meanwhile
    stale, fresh = scene.store(times=still), scene.store()
    with stale.lease(NAME, "stale", 2) as lease:
        scene.expire_lease()
        with fresh.lease(NAME, "fresh", 2), pytest.raises(LeaseLost, match="taken over"):
            stale.apply(lease, changes)
    assert len(scene.content()) == FULL
    status = fresh.status(NAME)
    assert status is not None
    assert fresh.open(NAME, scene.embedder).rows_read == ROWS


@pytest.mark.slow
def test_a_slow_run_keeps_its_lease_beyond_the_ttl(scene: Scene) -> None:
    """The renewing thread, not the writes, keeps it: nothing is written for longer than the lease lasts."""
    slow = threading.Event()

    def before_page(number: int) -> None:
        if number == 2:
            slow.set()
            time.sleep(2 * QUICK.ttl)

    source, store = WatchedSource(scene.pool(), before_page), scene.store(times=QUICK)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(scene.sync, Ends(source, store, scene.embedder))
        assert slow.wait(30)
        time.sleep(1.2 * QUICK.ttl)
        with pytest.raises(LeaseLost):
            scene.sync(lease_wait=0)
        assert running.result(60).upserted == FULL
