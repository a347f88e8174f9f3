"""SIGKILL while a generation is built and in the middle of a switch: the collection is served by the old one or by the
new one, whole; the next sync goes on, and what was stored is not embedded again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.src.access.principal import OPERATOR
from app.src.service.service import Service
from app.src.service.sync import BuildReport
from app.src.settings import Settings
from connector.errors import GenerationRefused
from connector.hana.source import HanaSource
from connector.model import Generation
from connector.sync.run import SyncReport
from tests.adversity.proxy import COMMIT, EXECUTE, Fault, Proxy, Strike
from tests.adversity.scene import EMPTY, NAME, PAGE, ROWS, Content, Scene
from tests.slow import slow

STORED = ROWS - EMPTY
WIDE = {"OWL_SAP_EMBEDDING__MODEL": "hash:128"}


def killed(scene: Scene, message: int, nth: int, fault: Fault, *arguments: str) -> bool:
    """Whether `owl-sap ARGUMENTS` was killed before it could end by itself."""
    with Proxy(scene.emulator.port) as proxy:
        process = scene.spawn(*arguments, port=proxy.port, env=WIDE)
        proxy.strike(Strike(message, nth, fault, process.kill))
        with process:
            process.communicate(timeout=60)
        assert proxy.fired.is_set() or process.returncode == 0
    time.sleep(0.02)  # the emulator sees the dead line and rolls back
    return process.returncode == -signal.SIGKILL


def killed_at_point(scene: Scene, point: str, nth: int, *arguments: str) -> None:
    """`owl-sap ARGUMENTS` killed where it comes to a failpoint for the `nth` time."""
    code, _, errors = scene.cli(*arguments, env=WIDE | {"OWL_SAP_FAILPOINT": f"{point}:{nth}"})
    assert code == -signal.SIGKILL, errors
    time.sleep(0.02)


def generations(scene: Scene) -> list[Generation]:
    return scene.store().generations.all(NAME)


def states(scene: Scene) -> list[str]:
    return [each.state for each in generations(scene)]


@contextmanager
def service(scene: Scene) -> Iterator[Service]:
    """As the command line has it, with the other model, in here."""
    block = {"name": NAME, "source": f"{scene.schema}.ROWS", "template": "{TXT}", "metadata": ["GRP"]}
    settings = {
        "embedding": {"model": "hash:128"},
        "sync": {"page_rows": PAGE, "window": PAGE},
        "state": {"path": scene.folder / "state"},
        "collections": [block | {"chunk": {"max_tokens": 12, "overlap": 2}}],
    }
    made = Service(Settings.model_validate(settings), source=HanaSource(scene.pool()), store=scene.store())
    try:
        yield made
    finally:
        made.close()


def synced(scene: Scene) -> SyncReport:
    scene.expire_lease()
    with service(scene) as here:
        return here.sync.run(NAME)


def whole(scene: Scene, number: int) -> Content:
    """What is served is one generation, complete and sound, and found by queries of its own model."""
    with service(scene) as here:
        (status,) = here.status.collections()
        assert (status["generation"], status["rows"], status["dimension"]) == (number, STORED, 64 * number)
        assert [each.number for each in generations(scene) if each.state == "active"] == [number]
        assert here.search.run(NAME, "pump 12 of plant 5", 1, principal=OPERATOR).hits[0].key == {"K": 12}
    return scene.sound()


def goes_on(scene: Scene) -> None:
    """The next sync completes what was begun, and embeds only what is missing."""
    stored = sum(each.rows or 0 for each in generations(scene) if each.state == "building")
    report = synced(scene)
    assert isinstance(report, BuildReport)
    assert (report.generation, report.unchanged, report.upserted) == (2, stored, STORED - stored)
    assert states(scene) == ["active", "building"]
    with service(scene) as here:
        assert here.sync.verify(NAME, generation=2).ok


@pytest.fixture
def served(scene: Scene) -> Scene:
    scene.sync()
    return scene


def test_killed_in_the_middle_of_a_build(served: Scene) -> None:
    """What serves has nothing to write but its checkpoint, so the third batch is one of the other's."""
    killed_at_point(served, "after_apply", 3, "sync", "rows")
    _, building = generations(served)
    assert (building.state, building.complete) == ("building", False)
    assert 0 < (building.rows or 0) < STORED
    with service(served) as here, pytest.raises(GenerationRefused, match="not complete"):
        here.generations.switch(NAME)
    whole(served, 1)
    goes_on(served)


@pytest.fixture
def built(served: Scene) -> Scene:
    synced(served)
    return served


@pytest.mark.proves(1, 25)
def test_killed_between_the_two_halves_of_a_switch(built: Scene) -> None:
    killed_at_point(built, "mid_alias_swap", 1, "generations", "rows", "--switch")
    before = whole(built, 1)
    assert states(built) == ["active", "building"]
    assert synced(built).unchanged == STORED
    with service(built) as here:
        here.generations.switch(NAME)
    assert whole(built, 2).keys() == before.keys()
    assert states(built) == ["retired", "active"]


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize(("fault", "serving"), [(Fault.LOSE_REPLY, 2), *slow((Fault.LOSE_REQUEST, 1))])
@pytest.mark.proves(1, 25)
def test_killed_around_the_commit_of_a_switch(built: Scene, fault: Fault, serving: int) -> None:
    assert killed(built, COMMIT, 1, fault, "generations", "rows", "--switch")
    whole(built, serving)


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_a_switch_whose_reply_is_lost_is_not_made_twice(built: Scene) -> None:
    """The line breaks, the process lives: the transaction is run again and finds the work done."""
    with Proxy(built.emulator.port) as proxy:
        proxy.strike(Strike(COMMIT, 1, Fault.LOSE_REPLY))
        code, _, errors = built.cli("generations", "rows", "--switch", env=WIDE, port=proxy.port)
        assert proxy.fired.is_set()
    assert code == 0, errors
    whole(built, 2)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(12))
def test_killed_at_many_random_requests(served: Scene, turn: int) -> None:
    most = 90 if served.kind == "hana" else 20
    killed(served, EXECUTE, random.randint(1 + turn * most // 12, (turn + 1) * most // 12), Fault.LOSE_REQUEST,
           "sync", "rows")  # fmt: skip
    whole(served, 1)
    goes_on(served)
    killed(served, EXECUTE, random.randint(1, 12), random.choice([Fault.LOSE_REQUEST, Fault.LOSE_REPLY]),
           "generations", "rows", "--switch")  # fmt: skip
    (active,) = (each.number for each in generations(served) if each.state == "active")
    whole(served, active)
