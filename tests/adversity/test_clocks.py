"""Clocks that jump: a lease of the HANA store goes by HANA's clock alone; one of the local store, which has no other
clock than the machine's, may be lost by a jump, and then its holder can write no more.
"""

from __future__ import annotations

import time

import pytest

from connector.errors import LeaseLost
from connector.model import ChangeSet
from connector.stores.state import LeaseTimes
from tests.adversity.scene import NAME, Scene
from tests.slow import slow

DAY = 86_400.0
LONG = LeaseTimes(ttl=30, renew=20, poll=0.02)


@pytest.mark.proves(15)
@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize("jump", [DAY, *slow(-DAY)])
def test_the_clock_of_the_client_does_not_matter(scene: Scene, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    store = scene.store(times=LONG)
    store.open(NAME, scene.embedder)
    now = time.time
    with store.lease(NAME, "one", 0) as lease:
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        with pytest.raises(LeaseLost, match="'one'"), scene.store(times=LONG).lease(NAME, "two", 0):
            pass
        store.apply(lease, ChangeSet(released=["[1]"]))
    assert scene.sync().read > 0
    scene.converges()


@pytest.mark.proves(15, 26)
@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.parametrize("jump", [DAY, *slow(-DAY)])
def test_a_jump_never_makes_two_owners_and_never_locks_anybody_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    store = scene.store(times=LONG)
    store.open(NAME, scene.embedder)
    now = time.time
    with store.lease(NAME, "one", 0) as lease:
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        with scene.store(times=LONG).lease(NAME, "two", 0), pytest.raises(LeaseLost):
            store.apply(lease, ChangeSet(deleted=["[1]"]))
    assert scene.sync().read > 0
    scene.converges()
