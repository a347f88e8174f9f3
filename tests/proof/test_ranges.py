"""A comparison of every row, spread over workers by key ranges: it stores what one process would store, whoever is
killed; it counts, limits, quarantines and stops like one process. On the emulator.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.errors import ConfigurationError, ConnectionLost, ConnectorError, LeaseLost
from connector.hana.source import HanaSource
from connector.model import ChangeSpec, KeyRange
from connector.sync.options import Ends, SyncOptions, SyncReport
from connector.sync.ranges import ATTEMPTS, RangeReport, RangeTask, WorkerLost, Workers
from connector.sync.run import sync
from tests.proof.cycles import Cycles
from tests.proof.ground import NAME, PAGE, ROWS, Ground
from tests.proof.invariants import Stored, accounted, none, sound
from tests.proof.range_workers import Here, Processes
from tests.slow import slow

pytestmark = pytest.mark.parametrize("ground", [("hana", "full")], ids=["hana-full"], indirect=True)
OPTIONS = SyncOptions(page_rows=PAGE, window=PAGE, lease_wait=30, max_deletes=1.0, owner="driver")
RANGES = 8
"""Four for each of two workers."""


@pytest.fixture
def ends(ground: Ground) -> Iterator[Ends]:
    with closing(ground.plan.store(ground.pool)) as store:
        yield Ends(HanaSource(ground.pool), store, ground.embedder)


Run = Callable[..., SyncReport]


@pytest.fixture
def run(ground: Ground, ends: Ends) -> Run:
    def one(workers: Workers | None = None, options: SyncOptions = OPTIONS, **more: Any) -> SyncReport:
        ground.begin()
        return sync(ground.plan.spec, ends, options, workers=workers, **more)

    return one


def attempts(ends: Ends) -> dict[str, int]:
    return {entry.id: entry.attempts for entry in ends.store.quarantine(NAME)}


def poisoned(ground: Ground) -> set[str]:
    """At least one row that the engine refuses, and a blank one."""
    ground.run('UPDATE "ROWS" SET "TXT" = ? WHERE "K" = 5', "poison")
    ground.run('UPDATE "ROWS" SET "TXT" = ? WHERE "K" = 6', " ")
    ground.remember()
    return ground.truth().poison


def test_workers_store_and_count_what_one_process_does(ground: Ground, ends: Ends, run: Run, cycles: Cycles) -> None:
    poison = poisoned(ground)
    workers = Processes(ground.plan, 2)
    report = run(workers)
    ground.converged(report.as_dict(), cycles.saying)
    assert len(workers.tasks) == RANGES
    assert (report.read, report.loaded, report.unchanged, report.stopped) == (ROWS, ROWS, 0, False)
    assert (report.quarantined, report.upserted + report.empty) == (len(poison), ROWS - len(poison))
    assert report.embedded_texts > 0
    assert report.tokens > 0
    assert attempts(ends) == dict.fromkeys(poison, 1), "the driver tried again what a worker had tried"
    status = ends.store.status(NAME)
    assert status is not None
    assert (status.checkpoint.rows_read, status.checkpoint.empty) == (ROWS, report.empty)

    ground.change()
    ground.purge(3)
    poison = ground.truth().poison
    report = run(Here(ends))
    ground.converged(report.as_dict(), cycles.saying)
    again = run(Here(ends))
    assert (again.upserted, again.deleted) == (0, 0)
    assert again.unchanged == again.read - again.empty - len(poison)


@pytest.mark.proves(1)
@pytest.mark.parametrize("failpoint", ["mid_upsert", *slow("after_read", "after_embed:2", "after_apply")])
def test_another_worker_does_what_a_killed_one_leaves(
    ground: Ground, ends: Ends, run: Run, cycles: Cycles, failpoint: str
) -> None:
    ground.rewrite(ROWS)
    workers = Processes(ground.plan, 2, [failpoint, "", failpoint])
    report = run(workers)
    ground.converged(report.as_dict(), cycles.saying)
    assert len(workers.tasks) == RANGES + 2
    assert not report.notes


@pytest.mark.proves(1)
def test_the_driver_does_what_no_worker_survives(ground: Ground, ends: Ends, run: Run, cycles: Cycles) -> None:
    ground.rewrite(ROWS)

    def kill(task: RangeTask) -> None:
        if task.within.after is None:
            raise WorkerLost("killed")

    workers = Here(ends, kill)
    report = run(workers)
    ground.converged(report.as_dict(), cycles.saying)
    assert len(workers.tasks) == RANGES + ATTEMPTS - 1
    assert report.upserted == ROWS
    assert f"1 of {RANGES} key ranges lost their worker" in report.notes[0]


@pytest.mark.proves(10, 26)
@pytest.mark.parametrize("early", [False, True], ids=["after the other", "beside the other"])
def test_a_worker_writes_nothing_after_the_driver_lost_its_lease(
    ground: Ground, cycles: Cycles, run: Run, early: bool
) -> None:
    ground.rewrite(ROWS)
    workers = Processes(ground.plan, 1, ["after_embed:1:stop"])
    caught: list[ConnectorError] = []

    def drive() -> None:
        try:
            run(workers)
        except ConnectorError as error:
            caught.append(error)

    driver = threading.Thread(target=drive)
    driver.start()
    while not workers.processes or not stands_still(workers.processes[0]):
        driver.join(0.01)
        assert driver.is_alive()
    other = cycles.start(full=True)
    while ground.holder() == "driver":
        ground.expire_lease()  # the driver may renew it before the other takes it
    if early:
        wake(workers.processes[0])
    done = other.wait()
    assert done is not None
    ground.converged(done, cycles.saying)
    before = ground.content()
    if not early:
        wake(workers.processes[0])
    driver.join(60)
    assert [type(error) for error in caught] == [LeaseLost]
    assert len(workers.tasks) == 1
    assert ground.content() == before


@pytest.mark.proves(11)
def test_deletions_of_all_ranges_count_against_one_limit(ground: Ground, ends: Ends, run: Run, cycles: Cycles) -> None:
    ground.rewrite(ROWS)
    run()
    ground.purge(ROWS // 2)
    kept = len(ground.content()["documents"])
    report = run(Here(ends), replace(OPTIONS, max_deletes=0.2))
    assert (report.paused, report.deleted, report.to_delete) == ("max_deletes", 0, ROWS // 2)
    assert len(ground.content()["documents"]) == kept
    ground.run('UPDATE "ROWS" SET "TXT" = NULL')  # each range alone would be below the rows that are free to delete
    ground.remember()
    report = run(Here(ends), replace(OPTIONS, max_deletes=0.2))
    assert report.paused == "max_deletes"
    assert report.empty == report.read == ROWS - ROWS // 2
    assert len(ground.content()["documents"]) == kept
    ground.converged(run(Here(ends)).as_dict(), cycles.saying)


@pytest.mark.proves(11)
def test_rows_that_workers_add_do_not_raise_the_limit_of_deletions(ground: Ground, ends: Ends, run: Run) -> None:
    ground.rewrite(ROWS)
    run()
    ground.purge(10)
    for _ in range(3 * ROWS):
        ground._put(ground._new())
    ground.remember()
    report = run(Here(ends), replace(OPTIONS, max_deletes=0.2))
    assert (report.paused, report.deleted, report.to_delete) == ("max_deletes", 0, 10)


@pytest.mark.proves(11)
def test_rows_stored_before_their_key_changed_its_type_are_deleted(ground: Ground, ends: Ends, run: Run) -> None:
    ground.rewrite(ROWS)
    run(Here(ends))
    ground.run('DROP TABLE "ROWS"')
    ground.run(
        'CREATE COLUMN TABLE "ROWS" ("K" DATE PRIMARY KEY, "TXT" NVARCHAR(2000), "GRP" NVARCHAR(3), '
        '"CHANGED_AT" TIMESTAMP)'
    )
    for day in range(1, 13):
        ground.run('INSERT INTO "ROWS" VALUES (?, ?, NULL, NULL)', f"2026-01-{day:02}", "pump")
    few = replace(OPTIONS, max_deletes=0.2, accept_schema=True)
    for workers in (Here(ends), Here(ends)):  # the first one is not asked
        report = run(workers, few)
        assert (report.paused, report.to_delete) == ("max_deletes", ROWS)
    assert workers.tasks
    report = run(Here(ends))
    assert (report.deleted, report.unchanged, len(ground.content()["documents"])) == (ROWS, 12, 12)


@pytest.mark.proves(32)
def test_without_a_worker_left_the_driver_does_all_ranges(ground: Ground, run: Run, cycles: Cycles) -> None:
    class Leaving:
        count = 2

        def submit(self, task: RangeTask) -> Future[RangeReport]:
            self.count -= 1
            future = Future[RangeReport]()
            future.set_exception(WorkerLost("no worker starts"))
            return future

        def stop(self) -> None:
            pass

    report = run(Leaving())
    assert [note.split(" of ")[0] for note in report.notes] == [str(RANGES)]
    ground.converged(report.as_dict(), cycles.saying)


@pytest.mark.proves(2)
def test_a_stopped_run_keeps_what_was_done_and_the_next_one_continues(
    ground: Ground, ends: Ends, run: Run, cycles: Cycles
) -> None:
    ground.rewrite(ROWS)
    workers = Here(ends)
    report = run(workers, stop=lambda: len(workers.tasks) > 1)
    assert (report.stopped, len(workers.tasks)) == (True, 2)
    assert report.upserted == report.read == len(ground.content()["documents"]) == 2 * ROWS // RANGES
    status = ends.store.status(NAME)
    assert status is not None
    assert status.last_sync is None, "an unfinished run counts as a sync"
    again = run(Here(ends))
    ground.converged(again.as_dict(), cycles.saying)
    assert again.unchanged == report.upserted


def test_a_worker_ends_its_range_when_the_run_is_stopped(ground: Ground, ends: Ends, run: Run, cycles: Cycles) -> None:
    ground.rewrite(ROWS)
    workers = Processes(ground.plan, 2, ["after_embed:1:stop"])

    def stop() -> bool:
        """Once a worker stands still in its range; it goes on only after it was asked to stop."""
        if not workers.processes or not stands_still(workers.processes[0]):
            return False
        workers.stop()
        wake(workers.processes[0])
        return True

    report = run(workers, stop=stop)
    assert report.stopped
    assert report.read < ROWS
    ground.sound(cycles.saying)
    ground.converged(run().as_dict(), cycles.saying)


def test_a_row_that_fails_too_often_is_skipped_as_in_one_process(ground: Ground, ends: Ends, run: Run) -> None:
    poison, options = poisoned(ground), replace(OPTIONS, max_attempts=2)
    reports = []
    for expected in (1, 2, 2):
        reports.append(run(Here(ends), options))
        assert reports[-1].quarantined == len(poison)
        assert attempts(ends) == dict.fromkeys(poison, expected)
    assert [len(report.notes) for report in reports] == [0, 0, 1]
    assert f"{len(poison)} rows were skipped: they failed 2 times" in reports[-1].notes[0]


def test_a_range_that_runs_again_is_one_attempt(ground: Ground, ends: Ends, run: Run) -> None:
    poison = poisoned(ground)
    done: set[KeyRange] = set()

    class Losing(Here):
        """Loses each worker once, when it has done all its work."""

        def submit(self, task: RangeTask) -> Future[RangeReport]:
            future = super().submit(task)
            if task.within in done:
                return future
            done.add(task.within)
            lost: Future[RangeReport] = Future()
            lost.set_exception(WorkerLost("killed"))
            return lost

    report = run(Losing(ends))
    assert (report.quarantined, report.notes) == (len(poison), [])
    assert attempts(ends) == dict.fromkeys(poison, 1)


def test_rows_that_change_meanwhile_are_stored_as_they_were_then(
    ground: Ground, ends: Ends, run: Run, cycles: Cycles
) -> None:
    def change(task: RangeTask) -> None:
        ground.change()

    for _ in range(3):
        report = run(Here(ends, change)).as_dict()
        none([*sound(Stored.read(ends.store, NAME), ground.truth(), ends.embedder), *accounted(report)], cycles.saying)
        ground.converged(run(Here(ends)).as_dict(), cycles.saying)
        ground.refill()


def test_a_worker_with_another_model_is_refused(ground: Ground, ends: Ends, run: Run) -> None:
    other = EngineEmbedder(load_engine(EngineOptions(model="hash:32")))
    workers = Here(replace(ends, embedder=other))
    with pytest.raises(ConfigurationError, match=r"hash:32.*differ"):
        run(workers)
    assert len(workers.tasks) <= workers.count
    assert ground.content()["documents"] == {}


def test_an_error_that_may_pass_repeats_the_range_and_another_ends_the_run(
    ground: Ground, ends: Ends, run: Run, cycles: Cycles
) -> None:
    failures: list[Exception] = [ConnectionLost("the line is dead")]

    def fail(task: RangeTask) -> None:
        if failures:
            raise failures.pop()

    ground.converged(run(Here(ends, fail)).as_dict(), cycles.saying)
    failures += [ConnectionLost("the line is dead")] * RANGES * ATTEMPTS
    with pytest.raises(ConnectionLost):
        run(Here(ends, fail))


@pytest.mark.parametrize("changes", [ChangeSpec(hash="server"), ChangeSpec(method="rowid")], ids=["hash", "rowid"])
def test_comparisons_by_tokens_are_not_spread(ground: Ground, ends: Ends, changes: ChangeSpec) -> None:
    workers = Here(ends)
    sync(replace(ground.plan.spec, changes=changes), ends, OPTIONS, workers=workers)
    assert not workers.tasks


def kills(ground: Ground, ends: Ends, run: Run, cycles: Cycles, count: int) -> None:
    """Kill workers at random failpoints and moments in run after run."""
    killed = 0
    while killed < count:
        ground.change(20)
        names = [
            name for name in ground.method.passes if name not in ("after_lease", "mid_delete", "before_checkpoint")
        ]
        points = [f"{ground.chance.choice(names)}:{ground.chance.randint(1, 3)}" for _ in range(4)]
        workers = Processes(ground.plan, 2, points)
        report = run(workers)
        ground.converged(report.as_dict(), cycles.saying)
        killed += len(workers.tasks) - RANGES


@pytest.mark.proves(1)
def test_workers_killed_at_random(ground: Ground, ends: Ends, run: Run, cycles: Cycles) -> None:
    kills(ground, ends, run, cycles, 3)


@pytest.mark.slow
@pytest.mark.proves(1)
def test_many_workers_killed_at_random(ground: Ground, ends: Ends, run: Run, cycles: Cycles) -> None:
    kills(ground, ends, run, cycles, 40)


def stands_still(process: ForkServerProcess) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


def wake(process: ForkServerProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
