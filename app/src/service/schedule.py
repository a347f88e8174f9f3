"""When collections are synced by themselves: the next start after a schedule, and the thread that queues the job then.
Who gets a turn is decided in the records of jobs, so several processes may run the same schedules.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from cronsim import CronSim

from app.src.jobs import JobRunning, Jobs, QueueFull, StateUnusable, Turn
from app.src.settings import ScheduleSettings
from connector.errors import ConnectorError

LOOK_SECONDS = 30.0
"""Turns are looked at so often at least: clocks are set, machines sleep, others take turns."""
_BUSY_SECONDS = 1.0
"""And so often while one is due and cannot begin, because the job before it has not ended."""
_log = logging.getLogger(__name__)


def next_start(schedule: ScheduleSettings, turn: Turn | None, now: float) -> float:
    """POSIX seconds of the start that follows `turn` (None: nobody has looked yet); in the past when it is overdue.

    However many turns were missed, one is due: the next is counted from the start of that one. A turn in the future,
    as it stands there after the clock was set back, counts as now.
    """
    since = now if turn is None else min(turn.since, now)
    last = None if turn is None or turn.last is None else min(turn.last, now)
    if schedule.every is not None:
        start = since if last is None else last + schedule.every
    else:
        zone = UTC if schedule.timezone == "UTC" else ZoneInfo(schedule.timezone)
        after = datetime.fromtimestamp(since if last is None else max(since, last), zone)
        start = next(CronSim(schedule.cron or "", after)).timestamp()
    # By chance, and yet the same for every process that asks.
    return start + random.Random(f"{turn}{start}").uniform(0, schedule.jitter)


def as_text(schedule: ScheduleSettings | None) -> str | None:
    """What changes when the operator changes the schedule."""
    return None if schedule is None else schedule.model_dump_json()


class Scheduler:
    """Queues the syncs of `schedules` (by collection; None: it has none) when they are due. Thread-safe."""

    def __init__(
        self,
        jobs: Jobs,
        schedules: Mapping[str, ScheduleSettings | None],
        request: Mapping[str, Any],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._jobs = jobs
        self._every = schedules
        self._schedules = {name: schedule for name, schedule in schedules.items() if schedule is not None}
        self._request = request
        self._clock = clock
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def next_start(self, collection: str) -> float | None:
        """None for a collection without a schedule. Raises StateUnusable."""
        schedule = self._schedules.get(collection)
        if schedule is None:
            return None
        return next_start(schedule, self._jobs.turn(collection), self._clock())

    def run(self) -> None:
        """Look from now on, in a thread. Raises StateUnusable."""
        self.register()
        if self._schedules and self._thread is None:
            self._thread = threading.Thread(target=self._looking, name="schedules", daemon=True)
            self._thread.start()

    def register(self) -> None:
        """From now on these are the schedules."""
        for name, schedule in self._every.items():
            if schedule is not None or self._jobs.turn(name) is not None:
                self._jobs.register(name, as_text(schedule))

    def stop(self) -> None:
        """Start nothing more. Returns at once."""
        self._ending.set()

    def close(self, timeout: float = 1.0) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)

    def _looking(self) -> None:
        wait = 0.0
        while not self._ending.wait(wait):
            wait = self.look()

    def look(self) -> float:
        """Queue what is due; how many seconds later to look again. What goes wrong with one stops no other."""
        now = self._clock()
        soonest = now + LOOK_SECONDS
        for name, schedule in self._schedules.items():
            try:
                soonest = min(soonest, self._look_at(name, schedule, now))
            except Exception as error:  # whatever it is: without this thread nothing would ever be due again
                why = error if isinstance(error, ConnectorError | StateUnusable) else type(error).__name__
                if not self._ending.is_set():
                    _log.error('the schedule of "%s" cannot be kept at the moment: %s', name, why)
        return max(0.01, soonest - now)

    def _look_at(self, name: str, schedule: ScheduleSettings, now: float) -> float:
        """When to look again."""
        turn = self._jobs.turn(name)
        if turn is None:  # the folder of the records was cleared
            self._jobs.register(name, as_text(schedule))
            return now
        start = next_start(schedule, turn, now)
        if start > now:
            return start
        before = self._jobs.last(name)
        if before is not None and not before.over:
            self._jobs.get(before.id)  # puts it back if its process has died
            return now + _BUSY_SECONDS
        try:
            taken = self._jobs.start_turn(name, turn, self._request)
        except (JobRunning, QueueFull):
            return now + _BUSY_SECONDS
        return now if taken is None else next_start(schedule, Turn(turn.since, now), now)
