"""Background jobs and their records: states, bounds, cancellation, events, what outlives a process."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from app.src.api.errors import retry_after
from app.src.jobs import journal as journal_module
from app.src.jobs.journal import (
    Job,
    JobOptions,
    JobOver,
    JobRunning,
    Journal,
    Kind,
    QueueFull,
    StateUnusable,
    UnknownJob,
)
from app.src.jobs.records import FileRecords, Records, is_alive
from app.src.jobs.runner import Jobs, Run
from app.src.jobs.store_records import StoreRecords
from connector.errors import ConnectorError, DatabaseError, PermissionRefused
from connector.stores.state import Session
from tests.api.conftest import Place

ROOT = Path(__file__).parents[2]
Make = Callable[..., "Given"]


class Given(Jobs):
    """Jobs whose work is given when they are started, by collection: only the one who was given it can do it."""

    def __init__(
        self, records: Path | Records, options: JobOptions | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """`records`: a folder for a file of records, or the records."""
        self.works: dict[str, Callable[[Run], Any]] = {}
        records = FileRecords(records) if isinstance(records, Path) else records
        super().__init__(records, lambda run: self.works[run.collection](run), options, clock)

    def begin(self, collection: str, work: Callable[[Run], Any], kind: Kind = "sync") -> Job:
        self.works[collection] = work
        return self.start(collection, kind)


class Known(Exception):
    pass


@pytest.fixture
def make(place: Place) -> Iterator[Make]:
    """Several share the records, as processes do."""
    made: list[Given] = []

    def new(workers: int = 2, expected: tuple[type[Exception], ...] = (), **limits: Any) -> Given:
        made.append(Given(place(), JobOptions(workers, expected, **limits)))
        return made[-1]

    yield new
    for jobs in made:
        jobs.close(2)


@pytest.fixture
def jobs(make: Make) -> Given:
    return make()


def wait_for(jobs: Jobs, job: Job) -> Job:
    deadline = time.monotonic() + 60
    while not (now := jobs.get(job.id)).over:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return now


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def until_stopped(run: Run) -> dict[str, int]:
    while not run.stopping():
        time.sleep(0.005)
    return {"rows": 1}


# -------------------------------------------------------------------------------------------------------------- states


def test_a_job_reports_and_succeeds(jobs: Given) -> None:
    def work(run: Run) -> dict[str, int]:
        assert jobs.get(run.id).state == "running"
        run.progress(1, 2)
        return {"rows": 2}

    job = wait_for(jobs, jobs.begin("a", work, "verify"))
    assert job.started is not None
    assert job.finished is not None
    assert job.created <= job.started <= job.finished <= time.time()
    assert job.as_dict() | {"created": 0, "started": 0, "finished": 0} == {
        "id": job.id,
        "collection": "a",
        "kind": "verify",
        "state": "succeeded",
        "progress": {"done": 1, "total": 2},
        "result": {"rows": 2},
        "error": None,
        "created": 0,
        "started": 0,
        "finished": 0,
        "attempts": 1,
        "note": None,
        "next_try": None,
    }


def test_messages_of_known_errors_are_told_and_others_are_not(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    jobs = make(expected=(Known,))

    def known(run: Run) -> dict[str, int]:
        raise Known("the table is gone")

    def unknown(run: Run) -> dict[str, int]:
        raise KeyError("row text")

    assert wait_for(jobs, jobs.begin("a", known)).error == "the table is gone"
    error = wait_for(jobs, jobs.begin("b", unknown)).error
    assert error is not None
    assert "KeyError" in error
    assert "row text" not in error
    assert "row text" not in "".join(record.getMessage() for record in caplog.records).replace('"row text"', "")


def test_one_job_per_collection_and_a_bound_on_all(make: Make) -> None:
    go = threading.Event()

    def work(run: Run) -> dict[str, int]:
        assert go.wait(60)
        return {}

    jobs = make(workers=1)
    first, second = jobs.begin("a", work), jobs.begin("b", work)
    until(lambda: "running" in {jobs.get(first.id).state, jobs.get(second.id).state})
    with pytest.raises(JobRunning) as caught:
        jobs.begin("a", work)
    assert caught.value.job == first.id
    assert first.id in str(caught.value)
    assert sorted(job.state for job in jobs.all()) == ["queued", "running"]
    go.set()
    assert wait_for(jobs, first).state == wait_for(jobs, second).state == "succeeded"
    assert jobs.current("a") is None
    wait_for(jobs, jobs.begin("a", work))


@pytest.mark.proves(27)
def test_the_queue_is_bounded(make: Make) -> None:
    jobs = make(workers=1, max_queued=2)
    first = jobs.begin("a", until_stopped)
    until(lambda: jobs.get(first.id).state == "running")
    jobs.begin("b", until_stopped)
    jobs.begin("c", until_stopped)
    with pytest.raises(QueueFull, match="wait for their turn") as full:
        jobs.begin("d", until_stopped)
    assert retry_after(full.value) == "60"


def test_waiting_for_another_worker_shows(jobs: Given) -> None:
    seen: list[str] = []

    def work(run: Run) -> dict[str, int]:
        for waiting in (True, False):
            run.event("waiting" if waiting else "owned")
            seen.append(jobs.get(run.id).state)
        return {}

    job = wait_for(jobs, jobs.begin("a", work))
    assert seen == ["waiting", "running"]
    states = [event.data["state"] for event in jobs.events(job.id) if event.name == "state"]
    assert states == ["queued", "running", "waiting", "running", "succeeded"]


# --------------------------------------------------------------------------------------------------------- cancelling


def test_cancelling_before_and_during_the_work(make: Make) -> None:
    jobs, begun = make(workers=1), []

    def work(run: Run) -> dict[str, int]:
        begun.append(run.collection)
        return until_stopped(run)

    running = jobs.begin("a", work)
    until(lambda: jobs.get(running.id).state == "running")
    queued = jobs.begin("b", work)
    assert jobs.cancel(queued.id).state == "cancelled", "at once"
    assert jobs.cancel(running.id).cancelling
    jobs.cancel(running.id)  # again: nothing more
    over = wait_for(jobs, running)
    assert (over.state, over.result, over.error) == ("cancelled", {"rows": 1}, None)
    assert jobs.cancel(running.id).state == "cancelled", "and once more"
    time.sleep(0.3)
    assert begun == ["a"], "a queued job that was cancelled never starts"
    with pytest.raises(UnknownJob):
        jobs.cancel("nope")


def test_what_is_over_cannot_be_cancelled(jobs: Given) -> None:
    job = wait_for(jobs, jobs.begin("a", lambda run: {}))
    with pytest.raises(JobOver, match="succeeded"):
        jobs.cancel(job.id)


def test_a_result_that_came_to_its_end_is_no_cancelled_one(jobs: Given) -> None:
    def work(run: Run) -> dict[str, bool]:
        until_stopped(run)
        return {"stopped": False}

    job = jobs.begin("a", work)
    until(lambda: jobs.get(job.id).state == "running")
    jobs.cancel(job.id)
    assert wait_for(jobs, job).state == "succeeded"


def test_another_process_sees_and_cancels_the_job(make: Make) -> None:
    here, there = make(), make()
    job = here.begin("a", until_stopped)
    until(lambda: there.get(job.id).state == "running")
    with pytest.raises(JobRunning):
        there.begin("a", until_stopped)
    there.cancel(job.id)
    assert wait_for(there, job).state == "cancelled"
    names = [event.name for event in there.events(job.id)]
    assert (names[0], names[-1]) == ("state", "result")


# ------------------------------------------------------------------------------------------------------------- closing


def test_closing_stops_jobs_in_bounded_time(make: Make) -> None:
    jobs, later = make(), make()
    job = jobs.begin("a", until_stopped)
    until(lambda: later.get(job.id).state == "running")
    jobs.close(5)
    ended = later.get(job.id)
    assert (ended.state, ended.error) == ("queued", None)
    assert "the service ended" in (ended.note or "")
    with pytest.raises(StateUnusable):
        jobs.begin("b", until_stopped)
    later.works["a"] = lambda run: {"rows": 2}
    later.run()
    over = wait_for(later, job)
    assert (over.state, over.result, over.attempts) == ("succeeded", {"rows": 2}, 2)


@pytest.mark.proves(29)
def test_closing_does_not_wait_for_work_that_does_not_listen(make: Make) -> None:
    go = threading.Event()
    jobs, later = make(), make()
    job = jobs.begin("a", lambda run: {"done": go.wait(60)})
    until(lambda: later.get(job.id).state == "running")
    start = time.monotonic()
    jobs.close(0.05)
    assert time.monotonic() - start < 30
    ended = later.get(job.id)
    assert ended.state == "queued"
    assert "the service ended" in (ended.note or "")
    assert later.cancel(job.id).state == "cancelled"
    go.set()
    time.sleep(0.1)
    assert later.get(job.id).result is None, "what it does now is nobody's business"


def test_the_records_outlive_the_one_who_wrote_them(make: Make) -> None:
    first = make()
    job = wait_for(first, first.begin("a", lambda run: {"rows": 3}))
    first.close()
    again = make()
    assert again.get(job.id) == job
    assert [found.id for found in again.all()] == [job.id]
    assert again.events(job.id)[-1].data["result"] == {"rows": 3}


# ------------------------------------------------------------------------------------------------ a process that dies

DIES = """
import os, sys, time
from pathlib import Path
from typing import Any
from app.src.jobs.records import FileRecords
from app.src.jobs.runner import Jobs
jobs = Jobs(FileRecords(Path(sys.argv[1])), lambda run: time.sleep(60) or {})
job = jobs.start("a", "verify", {"repair": True})
while jobs.get(job.id).state != "running":
    time.sleep(0.005)
print(job.id, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_killed_process_leaves_its_job_to_others(make: Make, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES, str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        id_ = process.stdout.readline().strip()
        jobs, looking = make(), make()
        jobs.run()
        time.sleep(0.2)
        assert jobs.get(id_).state == "running", "its process is alive"
        with pytest.raises(JobRunning):
            jobs.begin("a", until_stopped)
        jobs.close()
        process.kill()
    left = looking.get(id_)
    assert (left.state, left.attempts, left.error) == ("queued", 1, None)
    assert left.note is not None
    assert left.note.startswith("interrupted: its process died")
    assert list((tmp_path / "state").glob(f"{process.pid}-*")) == [], "and nothing lies about"
    with pytest.raises(JobRunning):
        looking.begin("a", until_stopped)
    looking.works["a"] = lambda run: {"asked": dict(run.job.request), "kind": run.job.kind}
    looking.run()
    job = wait_for(looking, left)
    assert (job.id, job.state, job.attempts, job.note) == (id_, "succeeded", 2, None)
    assert job.result == {"asked": {"repair": True}, "kind": "verify"}
    events = looking.events(id_)
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    states = [event.data["state"] for event in events if event.name == "state"]
    assert states == ["queued", "running", "queued", "running", "succeeded"]
    assert events[2].data["note"] == left.note


def test_deaths_are_counted_and_clean_ends_are_not(tmp_path: Path) -> None:
    """A job that kills its process must not come back for ever; one that outlives many deployments may."""
    records = FileRecords(tmp_path)
    with closing(Journal(records, JobOptions(max_attempts=3))) as journal:
        job = journal.add("a")
        assert job is not None
        for number in range(10):
            records.owner = f"1-ended-{number}"
            assert journal.claim(None) is not None
            journal.finish(job.id, "queued", error="the service ended")
        states = []
        for number in range(3):
            records.owner = f"1-gone-{number}"
            assert journal.claim(None) is not None
            states.append(journal.get(job.id).state)
        assert states == ["queued", "queued", "failed"]
        assert "3 processes died" in (journal.get(job.id).error or "")
        assert journal.claim(None) is None
        journal.finish(job.id, "succeeded")
        assert journal.get(job.id).state == "failed", "who has lost a job has no say in it"


def test_who_may_only_read_the_records_sees_the_jobs_of_dead_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = FileRecords(tmp_path)
    with closing(Journal(records)) as journal:
        job = journal.add("a")
        assert job is not None
        records.owner = "1-gone"
        assert journal.claim(None) is not None

        def refused(_work: object) -> None:
            raise PermissionRefused("insufficient privilege")

        monkeypatch.setattr(records, "write", refused)
        assert [each.state for each in journal.all()] == ["running"]
        monkeypatch.undo()
        assert [each.state for each in journal.all()] == ["queued"]


def test_a_process_that_lost_its_gpu_leaves_its_jobs_to_others(make: Make) -> None:
    """The job is not failed, whatever error it met, and this process takes no other one; but not for ever."""
    lost = ""

    def lose(_run: Run) -> dict[str, int]:
        nonlocal lost
        lost = "the GPU is gone"
        raise Known("no vector")

    unable = make(expected=(Known,), unable=lambda: lost, max_attempts=2)
    first = unable.begin("a", lose)
    until(lambda: unable.get(first.id).note is not None)
    left = unable.get(first.id)
    assert (left.state, left.attempts, left.error) == ("queued", 1, None)
    assert (
        left.note == "interrupted: the GPU is gone; it goes on from what is stored as soon as a service or worker runs"
    )
    second = unable.begin("b", lambda _run: {})
    assert unable._dispatcher is not None
    looked = unable._looked
    until(lambda: unable._looked > looked)
    assert (unable.get(first.id).attempts, unable.get(second.id).state) == (1, "queued")
    able = make(workers=1)
    able.works["a"] = able.works["b"] = lambda _run: {}
    able.run()
    assert [wait_for(able, job).state for job in (first, second)] == ["succeeded", "succeeded"]
    again, lost = unable.add("c"), ""
    assert again is not None
    able.close(2)
    for state in ("queued", "failed"):
        lost, unable.works["c"] = "", lose
        unable._dispatch()
        until(lambda state=state: unable.get(again.id).state == state and unable.get(again.id).attempts > 0)  # type: ignore[misc]
        until(lambda: not unable._runs)
    assert "2 processes died or lost their GPU" in (unable.get(again.id).error or "")


def test_a_job_that_is_cancelled_while_its_gpu_fails_is_cancelled(make: Make) -> None:
    lost = ""

    def lose(run: Run) -> dict[str, int]:
        nonlocal lost
        own.cancel(run.id)
        lost = "the GPU is gone"
        raise Known("no vector")

    own = make(expected=(Known,), unable=lambda: lost)
    assert wait_for(own, own.begin("a", lose)).state == "cancelled"


def test_presence_is_seen_from_inside_and_outside(tmp_path: Path) -> None:
    with closing(Journal(FileRecords(tmp_path))) as journal:
        journal.register("a", None)
        assert is_alive(tmp_path, journal.owner)
    assert not is_alive(tmp_path, journal.owner)
    assert not is_alive(tmp_path, "never")


# ------------------------------------------------------------------------------------- leases on jobs, and lost answers


@pytest.mark.proves(26)
@pytest.mark.parametrize("place", ["hana"], indirect=True)
def test_a_job_is_kept_while_its_lease_is_renewed_and_taken_over_when_it_is_not(place: Place) -> None:
    """As when a process hangs: what it says later counts no more."""
    records, done = place(), threading.Event()
    assert isinstance(records, StoreRecords)

    def lease() -> Any:
        return records.read(f'SELECT "OWNED_UNTIL", "OWNER" FROM {records.jobs}')[0][0]

    with closing(Given(records)) as first, closing(Given(place(), JobOptions(1, look_seconds=0.05))) as second:
        job = first.begin("a", lambda _run: {"by": done.wait(60) and "first"})
        second.works["a"] = lambda _run: {"by": "second"}
        second.run()
        until(lambda: first.get(job.id).state == "running")
        taken = lease()
        until(lambda: (lease() - taken).total_seconds() > 1)
        assert (second.get(job.id).state, second.get(job.id).attempts) == ("running", 1)
        records.drop(job.id)  # its thread does not come to renew it
        expired = f'UPDATE {records.jobs} SET "OWNED_UNTIL" = ADD_SECONDS("OWNED_UNTIL", -60) WHERE "OWNER" = ?'
        until(
            lambda: (
                records.write(lambda session: session.execute(expired, (records.owner,))) == 0
                and second.get(job.id).over
            )
        )
        done.set()
        until(lambda: not first._runs)
        over = second.get(job.id)
        assert (over.state, over.result, over.attempts) == ("succeeded", {"by": "second"}, 2)
        assert [event.data["state"] for event in first.events(job.id) if event.name == "state"] == [
            *("queued", "running", "queued", "running", "succeeded")
        ]


@pytest.mark.proves(26)
@pytest.mark.parametrize("place", ["hana"], indirect=True)
def test_a_process_does_not_take_over_its_own_job(place: Place) -> None:
    """As when HANA was away for longer than a lease lasts."""
    records, another, done = place(), place(), threading.Event()
    assert isinstance(records, StoreRecords)
    expired = f'UPDATE {records.jobs} SET "OWNED_UNTIL" = ADD_SECONDS("OWNED_UNTIL", -60)'

    def left(session: Session) -> list[list[tuple[str, bool]]]:
        session.execute(expired)
        return [each.left(session.query) for each in (records, another)]

    with closing(Given(records)) as only:
        job = only.begin("a", lambda _run: {"by": done.wait(60) and "only"})
        until(lambda: only.get(job.id).state == "running")
        assert records.write(left) == [[], [(job.id, False)]]
        done.set()
        until(lambda: only.get(job.id).over)
        assert only.get(job.id).attempts == 1


def test_of_many_who_add_and_claim_at_once_each_job_has_one(place: Place) -> None:
    """One unfinished job for each collection, and one owner for each job."""
    journals, names = [Journal(place(), JobOptions(max_queued=1000)) for _ in range(4)], [f"c{n}" for n in range(15)]
    added, claimed = list[str](), list[str]()
    together = threading.Barrier(len(journals), timeout=30)

    def work(journal: Journal) -> None:
        together.wait()
        for name in names:
            with suppress(JobRunning):
                job = journal.add(name)
                assert job is not None
                added.append(job.collection)
        together.wait()
        while (job := journal.claim(None)) is not None:
            claimed.append(job.collection)

    journals[0].register("a", None)  # makes the tables
    threads = [threading.Thread(target=work, args=(journal,)) for journal in journals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(added) == sorted(names) == sorted(claimed)
    for journal in journals:
        journal.close()


@pytest.mark.proves(3)
def test_a_write_whose_answer_was_lost_may_be_repeated(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool repeats a transaction when the line breaks during its commit, which may have succeeded."""
    records = place()
    once = records.write

    def twice(work: Callable[[Any], Any]) -> Any:
        once(work)
        return once(work)

    monkeypatch.setattr(records, "write", twice)
    with closing(Journal(records)) as journal:
        journal.register("a", "every minute")
        turn = journal.turn("a")
        added, other = journal.add("a", turn=turn), journal.add("b")
        assert added is not None
        assert other is not None
        taken = journal.claim(None)
        assert taken is not None
        assert (taken.id, taken.attempts) == (added.id, 1)
        assert journal.get(other.id).state == "queued", "the second attempt takes no second job"
        journal.wait(added.id, True)
        journal.wait(added.id, False)
        journal.progress(added.id, 1, 2)
        journal.finish(added.id, "waiting", error="HANA is away", away=True, next_try=0.0)
        assert journal.get(added.id).waits == 1
        assert journal.claim(["a"]) is not None
        journal.finish(added.id, "succeeded", result={})
        assert journal.cancel(other.id).state == "cancelled"
        states = [event.data["state"] for event in journal.events(added.id) if event.name == "state"]
        assert states == ["queued", "running", "waiting", "running", "waiting", "running", "succeeded"]
        assert [event.id for event in journal.events(added.id)] == list(range(1, 10))
        assert len(journal.all()) == 2


# -------------------------------------------------------------------------------------------------- events and records


def test_events_count_from_one_without_gaps_and_end_with_the_record(
    jobs: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.src.jobs.runner.PROGRESS_SECONDS", 0.0)

    def work(run: Run) -> dict[str, int]:
        for done in range(1, 4):
            run.progress(done, 3)
        return {"rows": 3}

    job = wait_for(jobs, jobs.begin("a", work))
    events = jobs.events(job.id)
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert [event.data["done"] for event in events if event.name == "progress"] == [1, 2, 3]
    assert events[-1].name == "result"
    assert events[-1].data == job.as_dict()
    assert jobs.events(job.id, events[-3].id) == events[-2:]
    assert jobs.events(job.id, events[-1].id) == []


def test_progress_is_written_now_and_then(jobs: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.src.jobs.runner.PROGRESS_SECONDS", 60.0)  # however long the machine takes for it

    def work(run: Run) -> dict[str, int]:
        for done in range(500):
            run.progress(done, 500)
        return {}

    job = wait_for(jobs, jobs.begin("a", work))
    assert job.progress == {"done": 499, "total": 500}
    assert sum(event.name == "progress" for event in jobs.events(job.id)) <= 3


def test_old_progress_is_forgotten_and_the_rest_stays(jobs: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.src.jobs.runner.PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(journal_module, "EVENTS_KEPT", 5)

    def work(run: Run) -> dict[str, int]:
        for done in range(1, 31):
            run.progress(done, 30)
        return {}

    events = jobs.events(wait_for(jobs, jobs.begin("a", work)).id)
    progress = [event.data["done"] for event in events if event.name == "progress"]
    assert progress == list(range(26, 31))
    assert [event.data["state"] for event in events if event.name == "state"] == ["queued", "running", "succeeded"]


def test_old_records_are_forgotten_and_newest_come_first(make: Make) -> None:
    jobs = make(keep_jobs=5)
    made = [wait_for(jobs, jobs.begin("a", lambda run: {})) for _ in range(8)]
    assert [job.id for job in jobs.all()] == [job.id for job in reversed(made[-5:])]
    with pytest.raises(UnknownJob):
        jobs.get(made[0].id)
    assert jobs.events(made[0].id) == []


def test_records_are_forgotten_by_age_too(place: Place) -> None:
    now = time.time()
    with closing(Given(place(), JobOptions(keep_days=1), lambda: now)) as jobs:
        old = wait_for(jobs, jobs.begin("a", lambda run: {}))
        now += 86_401
        new = wait_for(jobs, jobs.begin("a", lambda run: {}))
        assert [job.id for job in jobs.all()] == [new.id]
        with pytest.raises(UnknownJob):
            jobs.get(old.id)


def test_a_running_job_is_never_forgotten(make: Make) -> None:
    jobs = make(keep_jobs=1)
    running = jobs.begin("a", until_stopped)
    for _ in range(3):
        wait_for(jobs, jobs.begin("b", lambda run: {}))
    assert jobs.get(running.id).id == running.id


def test_records_are_chosen_by_collection_state_and_number(jobs: Given) -> None:
    for name in ("a", "b", "a"):
        wait_for(jobs, jobs.begin(name, lambda run: {}))
    running = jobs.begin("c", until_stopped)
    until(lambda: jobs.get(running.id).state == "running")
    assert [job.collection for job in jobs.all("a")] == ["a", "a"]
    assert [job.collection for job in jobs.all(state="succeeded")] == ["a", "b", "a"]
    assert [job.id for job in jobs.all(state="running")] == [running.id]
    assert len(jobs.all(limit=2)) == 2


# ---------------------------------------------------------------------------------------------------------- the folder


def test_looking_makes_no_folder_and_the_first_job_makes_it_for_its_owner(tmp_path: Path) -> None:
    jobs, folder = Given(tmp_path / "state"), tmp_path / "state"
    assert jobs.all() == []
    assert jobs.current("a") is None
    with pytest.raises(UnknownJob):
        jobs.get("nope")
    assert not folder.exists()
    wait_for(jobs, jobs.begin("a", lambda run: {}))
    jobs.close(2)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateUnusable, match=r"\[state\] path"):
        Given(tmp_path / "file" / "state").open()


def test_a_damaged_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_text("not a database at all")
    jobs = Given(tmp_path)
    with pytest.raises(StateUnusable, match="job records"):
        jobs.all()


def test_records_of_an_earlier_commit_are_refused_with_the_remedy(tmp_path: Path) -> None:
    given = Given(tmp_path)
    given.open()
    given.close()
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(
        StateUnusable, match=r"layout of an earlier commit .* delete it .* start again: it holds"
    ) as told:
        Given(tmp_path).all()
    assert "later version" not in str(told.value)
    assert "[state] path" not in str(told.value)


@pytest.mark.proves(16, 31)
def test_a_full_disk_under_the_records_does_not_end_the_work(
    jobs: Given, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Progress is dropped, the end is written as soon as that is possible again."""
    full = DatabaseError("no space left on the disk")
    finish = Journal.finish
    broken, ended = threading.Event(), threading.Event()

    def failing(journal: Journal, *values: Any, **outcome: Any) -> None:
        if broken.is_set():
            raise full
        finish(journal, *values, **outcome)

    def progress(*values: object) -> None:
        raise full

    monkeypatch.setattr(Journal, "finish", failing)
    monkeypatch.setattr(Journal, "progress", progress)
    broken.set()

    def work(run: Run) -> dict[str, int]:
        run.progress(1, 2)
        ended.set()
        return {"rows": 2}

    job = jobs.begin("a", work)
    assert ended.wait(60)
    until(lambda: "cannot record the end of job" in caplog.text)
    assert jobs.get(job.id).state == "running"
    broken.clear()
    assert jobs.get(job.id).state == "succeeded"
    assert isinstance(full, ConnectorError)


def test_what_could_not_be_recorded_is_recorded_at_the_end(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next process would do it again."""
    finish, broken = Journal.finish, threading.Event()
    jobs, later = make(), make()

    def failing(journal: Journal, *values: Any, **outcome: Any) -> None:
        if broken.is_set():
            raise DatabaseError("no space left on the disk")
        finish(journal, *values, **outcome)

    monkeypatch.setattr(Journal, "finish", failing)
    broken.set()
    job = jobs.begin("a", lambda run: {"rows": 2})
    until(lambda: job.id in jobs._unrecorded)
    jobs.stop()
    broken.clear()
    jobs.close(2)
    assert later.get(job.id).result == {"rows": 2}


def test_nothing_ends_the_thread_that_begins_jobs(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs, start = make(look_seconds=0.05), threading.Thread.start
    failures = [RuntimeError("can't start new thread"), RuntimeError("can't start new thread")]

    def starting(thread: threading.Thread) -> None:
        if thread.name == "job-a" and failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    job = wait_for(jobs, jobs.begin("a", lambda run: {"rows": 2}))
    assert (job.state, job.attempts) == ("succeeded", 3)
    assert "cannot start jobs at the moment: RuntimeError" in caplog.text


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_work_that_ends_its_thread_does_not_run_for_ever(make: Make, kind: type[BaseException]) -> None:
    """In the records, that is: nobody else takes a job whose process lives."""
    jobs = make()

    def dying(_: Run) -> Any:
        raise kind

    job = wait_for(jobs, jobs.begin("a", dying))
    assert (job.state, kind.__name__ in (job.error or "")) == ("failed", True)
    assert wait_for(jobs, jobs.begin("a", lambda run: {"rows": 2})).state == "succeeded"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dispatcher_that_died_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, begin = make(), Jobs._begin_one

    def dying(_: Jobs) -> bool:
        monkeypatch.setattr(Jobs, "_begin_one", begin)
        raise SystemExit

    monkeypatch.setattr(Jobs, "_begin_one", dying)
    first = jobs.begin("a", lambda run: {"rows": 1})
    assert jobs._dispatcher is not None
    jobs._dispatcher.join(60)
    assert wait_for(jobs, jobs.begin("b", lambda run: {"rows": 2})).state == "succeeded"
    assert wait_for(jobs, first).state == "succeeded"


def test_a_folder_that_cannot_be_looked_into_is_said(tmp_path: Path) -> None:
    """And is not taken for one without jobs."""
    with closing(Given(tmp_path / ("x" * 300))) as jobs:
        for ask in (jobs.all, lambda: jobs.current("materials"), lambda: jobs.get("x"), lambda: jobs.cancel("x")):
            with pytest.raises(StateUnusable, match=r"\[state\] path"):
                ask()


def test_after_so_many_jobs_no_more_begin_and_those_in_hand_come_to_their_end(make: Make) -> None:
    """`worker.max_jobs`: nothing is lost, the others stay for whoever comes next."""
    asking, working, next_one = make(0), make(2), make(2)
    go_on = threading.Event()
    records = [asking.start(f"c{number}") for number in range(5)]
    for jobs in (working, next_one):
        jobs.works = {f"c{number}": lambda _run: {"waited": go_on.wait(60)} for number in range(5)}
    working.run(2, most=3)
    until(lambda: sum(asking.get(job.id).state == "running" for job in records) == 2)
    assert not working.wait_spent(0.05), "jobs are in hand"
    go_on.set()
    assert working.wait_spent(60)
    states = sorted(asking.get(job.id).state for job in records)
    assert states == ["queued", "queued", "succeeded", "succeeded", "succeeded"]
    working.close()
    next_one.run(2)
    assert all(wait_for(next_one, job).attempts == 1 for job in records)


def test_a_bound_of_one_job_holds_however_many_threads_there_are(make: Make) -> None:
    asking, working = make(0), make(8)
    records = [asking.start(f"c{number}") for number in range(8)]
    working.works = {f"c{number}": lambda _run: {} for number in range(8)}
    working.run(8, most=1)
    assert working.wait_spent(60)
    time.sleep(0.05)
    assert sum(asking.get(job.id).over for job in records) == 1


def test_who_cannot_read_the_records_has_not_looked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker's heartbeat goes by."""
    jobs = make(1)
    jobs._options = JobOptions(1, look_seconds=0.01)
    jobs.run()
    until(lambda: jobs.looked_ago < 0.05)
    monkeypatch.setattr(Journal, "settle", lambda _self: (_ for _ in ()).throw(DatabaseError("locked")))
    until(lambda: jobs.looked_ago > 0.1)
