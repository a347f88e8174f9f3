"""What holds the event loop up is measured."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from app.src.api.server import watch_loop_lag


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_callback_that_does_not_end_makes_the_loop_late(run) -> None:  # type: ignore[no-untyped-def]
    told: list[float] = []

    async def held_up() -> None:
        watch = asyncio.create_task(watch_loop_lag(told.append, every=0.02))
        await asyncio.sleep(0)
        time.sleep(0.15)  # what must not happen
        while len(told) < 2:
            await asyncio.sleep(0.02)
        watch.cancel()

    run(held_up())
    assert max(told) > 0.1
    assert min(told) >= 0.0
