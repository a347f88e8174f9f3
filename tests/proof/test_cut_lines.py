"""The line of a sync breaks or stalls at a random request, whatever the way to find changes: it rides over that or says
so, and store and checkpoint stay sound.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.adversity.proxy import ANY, Fault, Proxy, Strike
from tests.proof.cycles import EACH_METHOD, GROUNDS, NATIVE, Cycles, named
from tests.proof.ground import PAGE
from tests.slow import slow_but

FAULTS = [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.HALF_REPLY]


def cut(cycles: Cycles) -> None:
    ground = cycles.ground
    # A lease whose taking nobody heard of has to end by itself.
    ground.plan = replace(ground.plan, lease_seconds=5)
    ground.change()
    ground.rewrite(2 * PAGE)
    with Proxy(ground.emulator.port) as proxy:
        report = cycles.start(port=proxy.port).wait()
        assert report is not None
        assert "error" not in report
        requests = sum(proxy.requests.values())
    ground.rewrite(2 * PAGE)
    nth, fault = ground.chance.randint(1, requests), ground.chance.choice(FAULTS)
    with Proxy(ground.emulator.port, Strike(ANY, nth, fault)) as proxy:
        report = cycles.start(port=proxy.port).wait()
    assert report is not None
    assert report.get("error") in (None, "ConnectionLost", "Unreachable"), (report, nth, fault)
    ground.sound(f"request {nth}: {fault.value}; {cycles.saying}")
    cycles.converge()


@pytest.mark.parametrize("ground", slow_but([*EACH_METHOD, NATIVE], ("hana", "watermark")), ids=named, indirect=True)
@pytest.mark.proves(3)
def test_a_cut_at_a_random_request(cycles: Cycles) -> None:
    cut(cycles)


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS, ids=named, indirect=True)
@pytest.mark.proves(3)
def test_a_cut_at_many_random_requests(cycles: Cycles) -> None:
    for _ in range(20):
        cut(cycles)
