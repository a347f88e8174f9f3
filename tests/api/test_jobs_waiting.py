"""Jobs whose source or store is away: they wait and are tried again, hours long by an injected clock, and search says
that it is stale meanwhile. What waiting does not mend fails at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from httpx import Client

from app.src.jobs import runner
from app.src.jobs.journal import Job, JobOptions
from app.src.jobs.runner import FIRST_WAIT, Run, pause
from app.src.service import background
from app.src.service.service import Service
from app.src.settings import Settings
from connector.errors import (
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    ConnectorError,
    LeaseLost,
    LoginRefused,
    Overloaded,
    PermissionRefused,
    StatementFailed,
    TransactionRolledBack,
    Unavailable,
)
from tests.api.conftest import TableSource, settings_in
from tests.api.test_job_routes import begun, events_of
from tests.api.test_jobs import Given, until, until_stopped, wait_for
from tests.api.test_routes import finished

DOWN = "reading S.MARA: the instance is down for maintenance or starting (code 1888)"


class Clock:
    def __init__(self) -> None:
        self.now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


class Hana:
    """A source that is away until it is back. Counts who comes."""

    def __init__(self) -> None:
        self.failure: ConnectorError | None = Unavailable(DOWN, code=1888)
        self.visits = 0

    def __call__(self, run: Run) -> dict[str, Any]:
        self.visits += 1
        if self.failure is not None:
            raise self.failure
        return {"rows": 1}


Make = Callable[..., Given]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Make]:
    made: list[Given] = []

    def new(longest: float = 300, give_up: float = 86_400, workers: int = 2) -> Given:
        options = JobOptions(
            workers,
            (ConnectorError,),
            background.passing,
            look_seconds=0.005,
            longest_wait=longest,
            give_up_after=give_up,
        )
        made.append(Given(tmp_path / "state", options, clock))
        return made[-1]

    yield new
    for jobs in made:
        jobs.close(2)


def until_waiting(jobs: Given, job: Job, attempt: int = 1) -> Job:
    until(lambda: (found := jobs.get(job.id)).over or (found.state == "waiting" and found.attempts == attempt))
    return jobs.get(job.id)


# ------------------------------------------------------------------------------------------------------------ patience


def test_waits_grow_from_five_seconds_to_the_longest() -> None:
    for failures in range(1, 50):
        waits = [pause(failures, 300) for _ in range(50)]
        assert min(waits) >= FIRST_WAIT
        assert max(waits) <= min(300, 10 * 2 ** (failures - 1))
        assert len(set(waits)) > 10, "by chance, so that many do not come back together"
    assert max(pause(9, 300) for _ in range(200)) > 200
    assert all(0 <= pause(number, 0.5) <= 0.5 for number in (1, 5, 5000))


# ------------------------------------------------------------------------------------------------------------- waiting


def test_a_job_waits_through_a_night_of_maintenance(make: Make, clock: Clock) -> None:
    jobs, hana = make(), Hana()
    began = clock.now
    job = jobs.begin("a", hana)
    attempt, waits = 1, []
    while clock.now - began < 3600:
        waiting = until_waiting(jobs, job, attempt)
        assert (waiting.state, waiting.note, waiting.error) == ("waiting", DOWN, None)
        assert waiting.next_try is not None
        waits.append(waiting.next_try - clock.now)
        clock.now = waiting.next_try - 0.5
        time.sleep(0.02)
        assert jobs.get(job.id).attempts == attempt, "not before its time"
        clock.now = waiting.next_try
        attempt += 1
    assert FIRST_WAIT <= waits[0] <= 2 * FIRST_WAIT
    assert all(FIRST_WAIT <= wait <= 300 for wait in waits)
    until_waiting(jobs, job, attempt)
    hana.failure = None
    clock.now += 300
    over = wait_for(jobs, job)
    assert (over.state, over.result, over.note, over.next_try) == ("succeeded", {"rows": 1}, None, None)
    assert over.attempts == hana.visits == attempt + 1
    events = [event.data for event in jobs.events(job.id) if event.name == "state"]
    assert [event["state"] for event in events[:4]] == ["queued", "running", "waiting", "running"]
    assert events[2]["note"] == DOWN


def test_some_day_it_gives_up(make: Make, clock: Clock) -> None:
    jobs, began = make(give_up=3600), clock.now
    job = jobs.begin("a", Hana())
    attempt = 1
    while not (found := until_waiting(jobs, job, attempt)).over:
        clock.now, attempt = found.next_try or 0.0, attempt + 1
    assert found.state == "failed"
    assert found.error == f"gave up after {attempt} attempts in {(clock.now - began) / 3600:.1f} h: {DOWN}"
    assert 3600 <= clock.now - began <= 3900
    assert jobs.begin("a", lambda run: {}).state == "queued", "and the collection is free"


@pytest.mark.parametrize("error", [Unavailable, ConnectionLost, Overloaded, TransactionRolledBack])
def test_what_passes_is_waited_for(make: Make, error: type[ConnectorError]) -> None:
    jobs, hana = make(), Hana()
    hana.failure = error("away for a while")
    assert until_waiting(jobs, jobs.begin("a", hana)).state == "waiting"


@pytest.mark.parametrize(
    "error",
    [LoginRefused, PermissionRefused, ConnectFailed, ConfigurationError, StatementFailed, LeaseLost],
)
def test_what_waiting_does_not_mend_is_tried_once(make: Make, clock: Clock, error: type[ConnectorError]) -> None:
    jobs, hana = make(), Hana()
    hana.failure = error("somebody has to do something")
    job = wait_for(jobs, jobs.begin("a", hana))
    assert (job.state, job.error, job.attempts) == ("failed", "somebody has to do something", 1)
    clock.now += 7200
    time.sleep(0.05)
    assert hana.visits == 1


def test_a_job_that_waits_keeps_no_other_from_working(make: Make) -> None:
    """One collection's failure never stops another's: with one thread, and the first collection's HANA away."""
    jobs = make(workers=1)
    away = until_waiting(jobs, jobs.begin("a", Hana()))
    assert wait_for(jobs, jobs.begin("b", lambda run: {"rows": 2})).result == {"rows": 2}
    assert jobs.get(away.id).state == "waiting"


def test_a_waiting_job_is_cancelled_at_once(make: Make, clock: Clock) -> None:
    jobs, hana = make(), Hana()
    job = until_waiting(jobs, jobs.begin("a", hana))
    assert jobs.cancel(job.id).state == "cancelled"
    clock.now += 7200
    time.sleep(0.05)
    assert hana.visits == 1


def test_one_that_was_cancelled_while_it_failed_does_not_wait(make: Make) -> None:
    jobs = make()

    def work(run: Run) -> dict[str, int]:
        until_stopped(run)
        raise Unavailable(DOWN)

    job = jobs.begin("a", work)
    until(lambda: jobs.get(job.id).state == "running")
    jobs.cancel(job.id)
    assert wait_for(jobs, job).state == "cancelled"


def test_the_wait_outlives_the_process(make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "pause", lambda failures, longest: 3600.0)
    first, hana = make(), Hana()
    job = until_waiting(first, first.begin("a", hana))
    start = time.monotonic()
    first.close(120)
    assert time.monotonic() - start < 60, "nothing sleeps"
    second, hana.failure = make(), None
    second.works["a"] = hana
    second.run()
    time.sleep(0.05)
    assert second.get(job.id) == job, "not before its time"
    clock.now = job.next_try or 0.0
    assert wait_for(second, job).attempts == 2


# -------------------------------------------------------------------------------------------------------- the service


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = settings_in(tmp_path)
    return made.model_copy(update={"sync": made.sync.model_copy(update={"longest_wait": 0.05})})


@pytest.fixture
def service(make_service: Callable[[], Service]) -> Service:
    service = make_service()
    service.jobs._options = replace(service.jobs._options, look_seconds=0.02)
    return service


def until_state(client: Client, job: str, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (shown := client.get(f"/v1/jobs/{job}").json())["state"] != state:
        assert time.monotonic() < deadline, shown
        time.sleep(0.005)
    return dict(shown)


def test_search_goes_on_and_says_since_when_it_is_stale(
    client: Client, synced: Service, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_STALE_SECONDS", 0.0)

    def stale() -> tuple[Any, Any]:
        found = client.post("/v1/collections/materials/search", json={"query": "pump"})
        assert (found.status_code, len(found.json()["hits"])) == (200, 4)
        return found.json()["stale_since"], client.get("/v1/collections/materials").json()["stale_since"]

    complete = client.get("/v1/collections/materials").json()["last_sync"]
    assert stale() == (None, None)
    source.failure = Unavailable(DOWN, code=1888)
    job = begun(client)
    assert until_state(client, job, "waiting")["note"] == DOWN
    assert stale() == (complete, complete)
    source.failure = None
    assert finished(client, job)["state"] == "succeeded"
    assert stale() == (None, None)
    states = [event.data for event in events_of(client, job) if event.event == "state"]
    assert any(DOWN in state for state in states)


def test_what_another_has_synced_meanwhile_is_not_stale(
    client: Client, synced: Service, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_STALE_SECONDS", 0.0)
    monkeypatch.setattr(runner, "pause", lambda failures, longest: 3600.0)
    source.failure = Unavailable(DOWN, code=1888)
    until_state(client, begun(client), "waiting")
    source.failure = None
    assert client.get("/v1/collections/materials").json()["stale_since"] is not None
    synced.sync.run("materials")
    assert client.get("/v1/collections/materials").json()["stale_since"] is None


def test_a_verify_waits_too(client: Client, synced: Service, source: TableSource) -> None:
    source.failure = ConnectionLost("the connection to HANA is gone", code=-10807)
    job = begun(client, "verify", repair=True)
    until_state(client, job, "waiting")
    source.failure = None
    del source.rows_by_key["1"]
    over = finished(client, job)
    assert (over["kind"], over["result"]["repaired"]) == ("verify", 1), "as it was asked for"


# ---------------------------------------------------------------------------------------------------------- accounting


@pytest.mark.parametrize(
    ("verb", "field"), [("sync", "superseded"), pytest.param("quarantine/retry", "gone", marks=pytest.mark.slow)]
)
def test_a_report_that_does_not_add_up_is_no_success(
    client: Client, synced: Service, monkeypatch: pytest.MonkeyPatch, verb: str, field: str
) -> None:
    doer, doing = (synced.sync, "run") if verb == "sync" else (synced.quarantine, "retry")
    right = getattr(doer, doing)

    def wrong(*values: Any) -> Any:
        report = right(*values)
        setattr(report, field, 3)
        return report

    monkeypatch.setattr(doer, doing, wrong)
    job = finished(client, begun(client, verb))
    assert job["state"] == "failed"
    assert "does not add up" in job["error"]
    assert "owl-sap verify materials" in job["error"]
    assert job["result"][field] == 3, "the report is kept"
    monkeypatch.setattr(doer, doing, right)
    assert finished(client, begun(client, verb))["state"] == "succeeded"
