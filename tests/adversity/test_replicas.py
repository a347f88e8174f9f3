"""Three services over one store in the emulator, behind a proxy, with job records in the store: one of them does each
job and each turn of a schedule, all see what one has written, and an update in turn loses no search.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from app.src.service.wiring import EngineEmbedder
from hana_emulator.testing import Emulator
from tests.adversity.balancer import Balancer
from tests.adversity.scene import EMPTY, NAME, ROWS, Scene

STORED = ROWS - EMPTY
KILLED_AT = 70
ROW_BY_ROW = {"OWL_SAP_SYNC__PAGE_ROWS": "1", "OWL_SAP_SYNC__WINDOW": "1"}


@dataclass
class Replica:
    process: subprocess.Popen[str]
    url: str

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=60, **more)

    def json(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        response = self.ask(method, path, **more)
        assert response.status_code == status, response.text
        return response.json()


class Replicas:
    """Services as on machines of their own: each has its own state folder, and they share HANA alone."""

    def __init__(self, scene: Scene, stack: ExitStack) -> None:
        self.scene = scene
        self._stack = stack
        self._made = 0

    def start(self, count: int, more: Mapping[str, str] | None = None) -> list[Replica]:
        """Start `count` of them at once and wait until they are ready."""
        processes = []
        for _ in range(count):
            self._made += 1
            env = {"OWL_SAP_STATE__RECORDS": "store", "OWL_SAP_STATE__PATH": f"state-{self._made}"} | dict(more or {})
            process = self.scene.spawn("serve", "--port", "0", env=env, stderr=subprocess.DEVNULL)
            processes.append(self._stack.enter_context(process))
            self._stack.callback(process.kill)
        found = []
        for process in processes:
            assert process.stdout is not None
            found.append(Replica(process, json.loads(process.stdout.readline())["url"]))
        for replica in found:
            until(lambda replica=replica: replica.ask("GET", "/health/ready").status_code == 200)  # type: ignore[misc]
        return found


@pytest.fixture
def scene(emulator: Emulator, hana_schema: str, hashing: EngineEmbedder, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(emulator, hana_schema, "hana", tmp_path / "scene", hashing)
    yield scene
    scene.close()


@pytest.fixture
def replicas(scene: Scene) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(scene, stack)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def over(replica: Replica, job: str) -> dict[str, Any]:
    """The record of the job once it is over, by the events as this replica tells them."""
    with (
        httpx.Client(base_url=replica.url, timeout=60) as client,
        connect_sse(client, "GET", f"/v1/jobs/{job}/events") as following,
    ):
        record: dict[str, Any] = json.loads(list(following.iter_sse())[-1].data)
    return record


def owner(scene: Scene, job: str) -> str:
    ((found,),) = scene.run(f'SELECT "OWNER" FROM "OWL_JOBS" WHERE "ID" = \'{job}\'')
    return str(found)


def expire_owner(scene: Scene) -> None:
    """As if 30 seconds had passed since the owner of a job was killed."""
    scene.run('UPDATE "OWL_JOBS" SET "OWNED_UNTIL" = ADD_SECONDS(CURRENT_UTCTIMESTAMP, -1) WHERE "OWNER" <> \'\'')


def found(replica: Replica, text: str) -> list[str]:
    body = {"query": text, "k": 3, "mode": "keyword"}
    return [hit["id"] for hit in replica.json("POST", f"/v1/collections/{NAME}/search", json=body)["hits"]]


@contextmanager
def searching(url: str) -> Iterator[list[str]]:
    """Search in three threads while it is open. Yields the failures; checks that some searches were answered."""
    failures, answered, ending = list[str](), [0], threading.Event()

    def search() -> None:
        with httpx.Client(timeout=60) as client:
            while not ending.is_set():
                body = {"query": "pump of plant", "k": 3}
                response = client.post(f"{url}/v1/collections/{NAME}/search", json=body)
                answered[0] += 1
                if response.status_code != 200 or len(response.json()["hits"]) != 3:
                    failures.append(f"{response.status_code} {response.text}")

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        ending.set()
        for thread in threads:
            thread.join(60)
    assert answered[0] > 10


@pytest.mark.slow
def test_a_job_is_done_by_one_and_followed_by_all(replicas: Replicas) -> None:
    scene, (one, two, three) = replicas.scene, replicas.start(3, ROW_BY_ROW)
    job = one.json("POST", f"/v1/collections/{NAME}/sync", 202)["job"]
    refused = [each.ask("POST", f"/v1/collections/{NAME}/sync") for each in (two, three)]
    assert [(answer.status_code, job in answer.text) for answer in refused] == [(409, True)] * 2
    record = over(two, job)
    assert (record["state"], record["attempts"], record["result"]["upserted"]) == ("succeeded", 1, STORED)
    assert three.json("GET", f"/v1/jobs/{job}") == one.json("GET", f"/v1/jobs/{job}") == record
    assert scene.run('SELECT COUNT(*) FROM "OWL_JOBS"') == [(1,)]
    again = three.json("POST", f"/v1/collections/{NAME}/sync", 202)["job"]
    assert over(one, again)["result"]["unchanged"] == STORED


@pytest.mark.proves(1)
def test_another_goes_on_with_the_job_of_one_that_was_killed(replicas: Replicas) -> None:
    """Each kills itself when it has stored KILLED_AT rows. Fewer are left for the second one, which succeeds."""
    scene = replicas.scene
    all_three = replicas.start(3, ROW_BY_ROW | {"OWL_SAP_FAILPOINT": f"after_apply:{KILLED_AT}:kill"})
    job = all_three[0].json("POST", f"/v1/collections/{NAME}/sync", 202)["job"]
    until(lambda: any(each.process.poll() is not None for each in all_three))
    killed = next(each for each in all_three if each.process.poll() is not None)
    assert killed.process.returncode == -signal.SIGKILL
    assert f"-{killed.process.pid}-" in owner(scene, job)
    left = next(each for each in all_three if each is not killed)
    time.sleep(1.5)
    assert left.json("GET", f"/v1/jobs/{job}")["attempts"] == 1, "its lease has not expired"
    scene.expire_lease()
    expire_owner(scene)
    record = over(left, job)
    assert (record["state"], record["attempts"]) == ("succeeded", 2)
    result = record["result"]
    assert (result["unchanged"], result["upserted"]) == (KILLED_AT, STORED - KILLED_AT), "what was stored is kept"
    assert scene.cli("verify", NAME)[0] == 0


@pytest.mark.slow
def test_one_takes_each_turn_of_a_schedule(replicas: Replicas) -> None:
    scene = replicas.scene
    with (scene.folder / "owl-sap.toml").open("a", encoding="utf-8") as file:
        file.write('schedule = { every = "1s" }\n')
    replicas.start(3)
    until(lambda: scene.run('SELECT COUNT(*) FROM "OWL_JOBS" WHERE "STATE" = \'succeeded\'')[0][0] >= 4)
    jobs = scene.run('SELECT "CREATED", "STATE", "ATTEMPTS" FROM "OWL_JOBS" ORDER BY "NUMBER"')
    pauses = [later[0] - earlier[0] for earlier, later in itertools.pairwise(jobs)]
    assert min(pauses) >= 0.999, "two of them took the same turn"
    assert {attempts for _, state, attempts in jobs if state == "succeeded"} == {1}


@pytest.mark.slow
def test_all_find_what_one_has_written_and_switched_to(replicas: Replicas) -> None:
    scene, (one, two, three) = replicas.scene, replicas.start(3)
    over(one, one.json("POST", f"/v1/collections/{NAME}/sync", 202)["job"])
    assert all(len(found(each, "pump 17")) == 3 for each in (one, two, three)), "their caches hold the collection"
    scene.run('UPDATE "ROWS" SET "TXT" = \'a zeppelin\' WHERE "K" = 5')
    over(one, two.json("POST", f"/v1/collections/{NAME}/sync", 202)["job"])
    assert all(found(each, "zeppelin") == ["[5]"] for each in (one, two, three))
    with searching(two.url) as second, searching(three.url) as third:
        over(one, one.json("POST", f"/v1/collections/{NAME}/generations", 202, json={"action": "build"})["job"])
        one.json("POST", f"/v1/collections/{NAME}/generations", json={"action": "switch"})
        one.json("POST", f"/v1/collections/{NAME}/generations", json={"action": "drop", "number": 1})
        until(lambda: two.json("GET", f"/v1/collections/{NAME}")["generation"] == 2)
        assert found(two, "zeppelin") == found(three, "zeppelin") == ["[5]"]
    assert second == third == []


@pytest.mark.proves(2)
def test_an_update_of_one_after_the_other_loses_no_search_and_no_job(replicas: Replicas) -> None:
    scene = replicas.scene
    with Balancer().running() as balancer:
        old = replicas.start(3, ROW_BY_ROW)
        balancer.backends = [each.url for each in old]
        over(old[0], old[0].json("POST", f"/v1/collections/{NAME}/sync", 202)["job"])
        with searching(balancer.url) as failures:
            response = httpx.post(f"{balancer.url}/v1/collections/{NAME}/sync", json={"full": True}, timeout=60)
            job = response.json()["job"]
            coming = old[0]
            for leaving in old:
                (coming,) = replicas.start(1, ROW_BY_ROW)
                balancer.backends = [*(url for url in balancer.backends if url != leaving.url), coming.url]
                leaving.process.terminate()
                assert leaving.process.wait(60) == 0
            record = over(coming, job)
        assert failures == []
        assert (record["state"], record["result"]["read"]) == ("succeeded", ROWS)
        assert record["note"] is None
    assert scene.cli("verify", NAME)[0] == 0


@pytest.mark.proves(6)
def test_a_service_starts_and_searches_are_refused_in_time_while_hana_is_away(scene: Scene) -> None:
    """Records in HANA need HANA for jobs only."""
    env = {"OWL_SAP_STATE__RECORDS": "store", "HANA_PORT": "1"}
    with scene.spawn("serve", "--port", "0", env=env, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            replica = Replica(process, json.loads(process.stdout.readline())["url"])
            assert replica.ask("POST", "/embed", json={"inputs": "steel"}).status_code == 200
            assert replica.ask("GET", "/metrics").status_code == 200
            assert replica.ask("POST", f"/v1/collections/{NAME}/sync").status_code == 503
            process.terminate()
            assert process.wait(60) == 0
        finally:
            with suppress(ProcessLookupError):
                process.kill()
