"""Background jobs: states, one per collection, bounded workers, what is told of an error."""

from __future__ import annotations

import threading
import time

import pytest

from app.src.jobs import Job, JobRunning, Jobs, UnknownJob


class Known(Exception):
    pass


def wait_for(job: Job) -> Job:
    deadline = time.monotonic() + 10
    while not job.over:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return job


def test_a_job_reports_and_succeeds() -> None:
    def work(job: Job) -> dict[str, int]:
        assert job.state == "running"
        job.report(1, 2)
        return {"rows": 2}

    jobs = Jobs()
    job = wait_for(jobs.start("a", work))
    assert job.as_dict() | {"created": 0, "finished": 0} == {
        "id": job.id,
        "collection": "a",
        "state": "succeeded",
        "progress": {"done": 1, "total": 2},
        "result": {"rows": 2},
        "error": None,
        "created": 0,
        "finished": 0,
    }
    assert jobs.get(job.id) is job


def test_messages_of_known_errors_are_told_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    jobs = Jobs(expected=(Known,))

    def known(job: Job) -> dict[str, int]:
        raise Known("the table is gone")

    def unknown(job: Job) -> dict[str, int]:
        raise KeyError("row text")

    assert wait_for(jobs.start("a", known)).error == "the table is gone"
    error = wait_for(jobs.start("b", unknown)).error
    assert error is not None
    assert "KeyError" in error
    assert "row text" not in error


def test_one_job_per_collection_and_a_bound_on_all() -> None:
    go = threading.Event()

    def work(job: Job) -> dict[str, int]:
        assert go.wait(10)
        return {}

    jobs = Jobs(workers=1)
    first, second = jobs.start("a", work), jobs.start("b", work)
    with pytest.raises(JobRunning) as caught:
        jobs.start("a", work)
    assert caught.value.job in str(caught.value)
    assert {first.state, second.state} <= {"running", "queued"}
    assert [first.state, second.state].count("running") <= 1
    go.set()
    assert wait_for(first).state == wait_for(second).state == "succeeded"
    assert jobs.current("a") is None
    wait_for(jobs.start("a", work))


def test_cancelling_before_and_during_the_work() -> None:
    started = threading.Event()

    def work(job: Job) -> dict[str, int]:
        started.set()
        while not job.stopping():
            time.sleep(0.005)
        return {"rows": 1}

    jobs = Jobs(workers=1)
    running, queued = jobs.start("a", work), jobs.start("b", work)
    assert started.wait(10)
    for job in (queued, running):
        job.cancel()
    assert wait_for(running).state == wait_for(queued).state == "cancelled"


def test_closing_stops_jobs_in_bounded_time() -> None:
    def work(job: Job) -> dict[str, int]:
        while not job.stopping():
            time.sleep(0.005)
        return {}

    jobs = Jobs()
    job = jobs.start("a", work)
    jobs.close(5)
    assert job.state == "cancelled"


def test_closing_does_not_wait_for_work_that_does_not_listen() -> None:
    go = threading.Event()
    jobs = Jobs()
    jobs.start("a", lambda job: {"done": go.wait(10)})
    start = time.monotonic()
    jobs.close(0.05)
    assert time.monotonic() - start < 2
    go.set()


def test_old_records_are_forgotten_and_newest_come_first() -> None:
    jobs = Jobs()
    made = [wait_for(jobs.start("a", lambda job: {})) for _ in range(205)]
    kept = jobs.all()
    assert len(kept) == 200
    assert kept[0] is made[-1]
    with pytest.raises(UnknownJob):
        jobs.get(made[0].id)
