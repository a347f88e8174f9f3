"""Syncs on schedule: when the next one is due, who gets the turn, and what became of turns that were missed. By an
injected clock; nothing sleeps for an hour.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.jobs.journal import JobOptions, Turn
from app.src.jobs.records import FileRecords
from app.src.jobs.runner import Jobs, Run
from app.src.service.background import Scheduler, next_start
from app.src.settings.collections import ScheduleSettings
from connector.errors import DatabaseError
from tests.api.conftest import Place
from tests.api.test_jobs import Given, until, wait_for
from tests.api.test_jobs_waiting import Clock

ROOT = Path(__file__).parents[2]


def every(text: str, **more: Any) -> ScheduleSettings:
    return ScheduleSettings.model_validate({"every": text} | more)


def cron(line: str, timezone: str = "UTC", **more: Any) -> ScheduleSettings:
    return ScheduleSettings.model_validate({"cron": line, "timezone": timezone} | more)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def shown(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


# ---------------------------------------------------------------------------------------------------------- when it is


@pytest.mark.parametrize(
    ("schedule", "since", "last", "now", "start"),
    [
        # The first turn is due when the schedule is first seen, the next counts from the start of the last.
        (every("5m"), "2026-11-22 10:00", None, "2026-11-22 10:00", "2026-11-22 10:00:00"),
        (every("5m"), "2026-11-22 10:00", "2026-11-22 10:07", "2026-11-22 10:08", "2026-11-22 10:12:00"),
        (every("5m"), "2026-11-22 10:00", "2026-11-22 10:07", "2026-11-22 23:00", "2026-11-22 10:12:00"),
        # The clock was set back by a day.
        (every("5m"), "2026-11-22 10:00", "2026-11-22 10:07", "2026-11-21 10:00", "2026-11-21 10:05:00"),
        (cron("15 2 * * *"), "2026-11-22 10:00", None, "2026-11-22 10:00", "2026-11-23 02:15:00"),
        (cron("15 2 * * *"), "2026-11-22 10:00", "2026-11-23 02:15", "2026-11-23 02:16", "2026-11-24 02:15:00"),
        (cron("15 2 * * *"), "2026-11-22 10:00", "2026-11-23 02:15", "2026-11-30 00:00", "2026-11-24 02:15:00"),
        (cron("0 8 * * MON-FRI"), "2026-11-20 09:00", None, "2026-11-20 09:00", "2026-11-23 08:00:00"),
        # The schedule was changed after the last turn.
        (cron("15 2 * * *"), "2026-11-25 10:00", "2026-11-23 02:15", "2026-11-25 11:00", "2026-11-26 02:15:00"),
        (cron("15 2 * * *", "Europe/Berlin"), "2026-11-22 10:00", None, "2026-11-22 10:00", "2026-11-23 01:15:00"),
        (cron("15 2 * * *", "Europe/Berlin"), "2026-07-22 10:00", None, "2026-07-22 10:00", "2026-07-23 00:15:00"),
        # 28 March 2027: there is no 02:30 in Berlin; it runs when the clock has been put forward.
        (cron("30 2 * * *", "Europe/Berlin"), "2027-03-27 12:00", None, "2027-03-27 12:00", "2027-03-28 01:00:00"),
        (cron("30 2 * * *", "Europe/Berlin"), "2027-03-28 12:00", None, "2027-03-28 12:00", "2027-03-29 00:30:00"),
        # 31 October 2027: 02:30 is there twice, and one run is enough.
        (cron("30 2 * * *", "Europe/Berlin"), "2027-10-30 12:00", None, "2027-10-30 12:00", "2027-10-31 00:30:00"),
        (
            cron("30 2 * * *", "Europe/Berlin"),
            "2027-10-30 12:00",
            "2027-10-31 00:30",
            "2027-10-31 00:31",
            "2027-11-01 01:30:00",
        ),
    ],
)
def test_the_next_start(schedule: ScheduleSettings, since: str, last: str | None, now: str, start: str) -> None:
    turn = at(since), None if last is None else at(last)
    assert shown(next_start(schedule, turn, at(now))) == start


@given(st.integers(0, 10**9), st.floats(0, 600))
def test_jitter_is_within_its_bounds_and_the_same_for_all(last: int, jitter: float) -> None:
    turn = 0.0, float(last)
    schedule = every("10m", jitter=jitter)
    start = next_start(schedule, turn, 2e9)
    assert last + 600 <= start <= last + 600 + jitter
    assert next_start(schedule, turn, 2e9) == start
    if jitter > 1:
        others = {next_start(schedule, (0.0, float(last + other)), 2e9) - other for other in range(20)}
        assert len(others) > 10


# ------------------------------------------------------------------------------------------------------ who gets it


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., tuple[Given, Scheduler]]


@pytest.fixture
def make(place: Place, clock: Clock) -> Iterator[Make]:
    """Each as a process of its own that shares the records: its jobs, and its schedules."""
    made: list[tuple[Given, Scheduler]] = []

    def new(**schedules: ScheduleSettings | None) -> tuple[Given, Scheduler]:
        jobs = Given(place(), JobOptions(2, look_seconds=0.01), clock)
        for name in schedules:
            jobs.works[name] = lambda run: {"request": dict(run.job.request)}
        made.append((jobs, Scheduler(jobs, schedules, clock)))
        made[-1][1].register()
        jobs.run()
        return made[-1]

    yield new
    for jobs, _ in made:
        jobs.close(2)


def over(jobs: Jobs) -> None:
    until(lambda: all(job.over for job in jobs.all()))


def test_turns_come_at_their_times(make: Make, clock: Clock) -> None:
    clock.now = start = at("2026-11-22 10:30")
    jobs, scheduler = make(a=every("5m"), b=cron("0 * * * *"), c=None)
    for _ in range(3600 // 20):
        scheduler.look()
        over(jobs)
        clock.now += 20
    found = {name: [job.created - start for job in reversed(jobs.all(name))] for name in "abc"}
    assert found == {"a": [300.0 * number for number in range(12)], "b": [1800.0], "c": []}
    assert all(job.result == {"request": {"owner": "schedule"}} for job in jobs.all())
    assert scheduler.next_start("c") is None
    assert shown(scheduler.next_start("b") or 0) == "2026-11-22 12:00:00"


def test_it_looks_again_when_the_next_is_due(make: Make, clock: Clock) -> None:
    _, scheduler = make(a=every("12s"), b=every("1d"))
    assert scheduler.look() == pytest.approx(12)
    clock.now += 5
    assert scheduler.look() == pytest.approx(7)
    _, slow = make(c=every("1d"))
    slow.look()
    assert slow.look() == 30, "clocks are set, and machines sleep"


def test_missed_turns_run_once(make: Make, clock: Clock) -> None:
    jobs, scheduler = make(a=every("5m"), b=cron("*/5 * * * *"))
    scheduler.look()
    over(jobs)
    jobs.close(2)
    clock.now += 7 * 3600  # the machine was off
    jobs, scheduler = make(a=every("5m"), b=cron("*/5 * * * *"))
    for _ in range(20):
        scheduler.look()
        over(jobs)
        clock.now += 1
    assert [len(jobs.all(name)) for name in "ab"] == [2, 1]


def test_a_run_that_is_under_way_is_not_started_again(make: Make, clock: Clock) -> None:
    jobs, scheduler = make(a=every("5m"))
    go = threading.Event()
    jobs.works["a"] = lambda run: {"done": go.wait(30)}
    scheduler.look()
    for _ in range(3):
        clock.now += 300
        assert scheduler.look() == pytest.approx(1, abs=0.01)
    assert len(jobs.all()) == 1
    go.set()
    over(jobs)
    scheduler.look()
    over(jobs)
    clock.now += 1
    scheduler.look()
    assert len(jobs.all()) == 2, "what was missed meanwhile runs once"


def test_a_job_asked_for_by_hand_does_not_shift_the_turns(make: Make, clock: Clock) -> None:
    jobs, scheduler = make(a=every("5m"))
    scheduler.look()
    over(jobs)
    clock.now += 200
    wait_for(jobs, jobs.begin("a", lambda run: {}))
    clock.now += 100
    scheduler.look()
    assert len(jobs.all()) == 3


def test_two_processes_never_start_the_same_turn(make: Make, clock: Clock) -> None:
    (jobs, first), (_, second) = make(a=every("5m")), make(a=every("5m"))
    for number in range(1, 6):
        looks = [threading.Thread(target=scheduler.look) for scheduler in (first, second)]
        for look in looks:
            look.start()
        for look in looks:
            look.join()
        over(jobs)
        first.look()
        second.look()
        assert len(jobs.all()) == number
        clock.now += 300


def test_of_two_who_see_the_same_turn_one_takes_it(make: Make, clock: Clock) -> None:
    (jobs, _), (other, _) = make(a=every("5m")), make(a=every("5m"))
    turn = jobs.turn("a")
    assert turn is not None
    job = jobs.add("a", "sync", {}, turn)
    assert job is not None
    wait_for(jobs, job)
    assert other.add("a", "sync", {}, turn) is None, "although nothing runs any more"


def test_clocks_of_two_machines_that_differ_start_no_turn_twice(place: Place, clock: Clock) -> None:
    clock.now = at("2026-11-22 10:01")
    schedules: dict[str, ScheduleSettings | None] = {"a": cron("*/5 * * * *"), "b": every("5m")}
    with ExitStack() as stack:
        schedulers, last = [], stack.enter_context(closing(Given(place())))
        for ahead in (0.0, 20.0):
            own = Clock()
            own.now = ahead
            jobs = stack.enter_context(
                closing(Given(place(), JobOptions(2, look_seconds=0.01), lambda own=own: clock() + own()))  # type: ignore[misc]
            )
            jobs.works = dict.fromkeys("ab", lambda run: {})
            schedulers.append(Scheduler(jobs, schedules, lambda own=own: clock() + own()))  # type: ignore[misc]
            schedulers[-1].register()
            jobs.run()
        for _ in range(15 * 6):
            for scheduler in schedulers:
                scheduler.look()
                over(last)
            clock.now += 10
        assert len(last.all("a")) == 3
        created = sorted(job.created for job in last.all("b"))
        assert len(created) in (3, 4)
        assert min(later - earlier for earlier, later in itertools.pairwise(created)) >= 280


def test_a_full_queue_is_no_end_of_the_schedule(tmp_path: Path, clock: Clock) -> None:
    with closing(Given(tmp_path / "state", JobOptions(0, max_queued=1), clock)) as jobs:
        scheduler = Scheduler(jobs, {"a": every("5m"), "b": every("5m")}, clock)
        scheduler.register()
        scheduler.look()
        assert [job.collection for job in jobs.all()] == ["a"]
        jobs.cancel(jobs.all()[0].id)
        scheduler.look()
        assert [job.collection for job in jobs.all()] == ["b", "a"]


@pytest.mark.parametrize(
    ("error", "said"),
    [(DatabaseError("no space left on the disk"), "no space left"), (KeyError("a row's text"), "KeyError")],
)
def test_one_that_cannot_be_looked_at_stops_no_other(
    make: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    said: str,
) -> None:
    jobs, scheduler = make(a=every("5m"), b=every("5m"))
    turn = Jobs.turn

    def failing(self: Jobs, collection: str) -> Turn | None:
        if collection == "a":
            raise error
        return turn(self, collection)

    monkeypatch.setattr(Jobs, "turn", failing)
    scheduler.look()
    assert [job.collection for job in jobs.all()] == ["b"]
    assert f'the schedule of "a" cannot be kept at the moment: {said}' in caplog.text
    assert "a row's text" not in caplog.text


def test_a_new_schedule_counts_from_when_it_is_seen(make: Make, clock: Clock) -> None:
    clock.now = at("2026-11-22 10:30")
    jobs, scheduler = make(a=every("1h"))
    scheduler.look()
    over(jobs)
    clock.now += 86_400
    _, scheduler = make(a=cron("15 2 * * *"))
    assert shown(scheduler.next_start("a") or 0) == "2026-11-24 02:15:00", "not at once, in the middle of the day"
    clock.now += 86_400
    _, scheduler = make(a=cron("15 2 * * *"))
    assert shown(scheduler.next_start("a") or 0) == "2026-11-24 02:15:00", "overdue: nobody was there"
    make(a=None)
    assert jobs.turn("a") is None, "and forgotten with the schedule"


def test_looking_before_anybody_ran_them_makes_no_folder(tmp_path: Path, clock: Clock) -> None:
    with closing(Given(tmp_path / "state", clock=clock)) as jobs:
        scheduler = Scheduler(jobs, {"a": cron("0 0 1 1 *"), "b": None}, clock)
        assert shown(scheduler.next_start("a") or 0) == "2027-01-01 00:00:00"
        assert scheduler.next_start("b") is None
        assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_it_runs_beside_the_jobs_and_ends(tmp_path: Path) -> None:
    """With the real clock."""
    with closing(Given(tmp_path / "state", JobOptions(look_seconds=0.01))) as jobs:
        jobs.works["a"] = lambda run: {}
        scheduler = Scheduler(jobs, {"a": every("1s")})
        scheduler.register()
        jobs.run(look=scheduler.look)
        until(lambda: len(jobs.all()) >= 2)
        second, first = jobs.all()[:2]
        assert 1.0 <= second.created - first.created < 30
        dispatcher = jobs._dispatcher
    assert dispatcher is not None
    assert not dispatcher.is_alive()


def test_jobs_begin_although_due_ones_cannot_be_queued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Given(tmp_path / "state", JobOptions(look_seconds=0.01))) as jobs:
        jobs.run(look=lambda: 1 / 0)
        assert wait_for(jobs, jobs.begin("a", lambda run: {})).state == "succeeded"
    assert caplog.text.count("ZeroDivisionError") == 1


# -------------------------------------------------------------------------------------- several processes, one file

TAKES = """
import sys, time
from pathlib import Path
from app.src.jobs.journal import JobOptions
from app.src.jobs.records import FileRecords
from app.src.jobs.runner import Jobs
with open(sys.argv[2], "a") as file:
    def work(run):
        print(run.id, file=file, flush=True)
        return {}
    jobs = Jobs(FileRecords(Path(sys.argv[1])), work, JobOptions(4, look_seconds=0.005))
    jobs.run()
    print("ready", flush=True)
    sys.stdin.read()
    jobs.close()
"""


def test_each_job_is_taken_once_by_processes_that_compete(tmp_path: Path) -> None:
    """And each once only: a claim is one transaction."""
    command = [sys.executable, "-c", TAKES, str(tmp_path / "state")]
    files = [tmp_path / f"taken-{number}" for number in range(3)]
    with closing(Given(tmp_path / "state", JobOptions(0))) as jobs:
        jobs.open()
        processes = [
            subprocess.Popen([*command, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            for file in files
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            started = [jobs.start(f"c{number}").id for number in range(60)]
            until(lambda: all(job.over for job in jobs.all(limit=1000)))
            deadline = time.monotonic() + 60
            while not sum(bool(file.read_text()) for file in files) > 1 and time.monotonic() < deadline:
                started.append(jobs.start(f"c{len(started)}").id)  # as long as the others come to nothing
                until(lambda: all(job.over for job in jobs.all(limit=1000)))
        finally:
            for process in processes:
                process.communicate("", timeout=60)
        taken = [line for file in files for line in file.read_text().split()]
        assert sorted(taken) == sorted(started)
        assert sum(bool(file.read_text()) for file in files) > 1, "they did compete"
        assert {(job.state, job.attempts) for job in jobs.all(limit=1000)} == {("succeeded", 1)}


def test_a_process_takes_only_what_it_knows(tmp_path: Path) -> None:
    done: list[str] = []

    def work(run: Run) -> dict[str, int]:
        done.append(run.collection)
        return {}

    options = JobOptions(1, collections=("b", "c"), look_seconds=0.01)
    with closing(Jobs(FileRecords(tmp_path), work, options)) as jobs:
        for name in "abc":
            jobs.start(name)
        until(lambda: len(done) == 2)
        time.sleep(0.1)
        assert done == ["b", "c"], "and the oldest first"
        assert [job.collection for job in jobs.all(state="queued")] == ["a"]
