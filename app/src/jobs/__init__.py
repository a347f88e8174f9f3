"""Background jobs that outlive their process: records, events and progress in one SQLite file, one job at a time per
collection, cancellation and resumption by any process. Each job is handed to a callable."""

from app.src.jobs.journal import Limits
from app.src.jobs.record import (
    STATES,
    Event,
    Job,
    JobOver,
    JobRunning,
    Kind,
    QueueFull,
    State,
    StateUnusable,
    Tally,
    Turn,
    UnknownJob,
)
from app.src.jobs.runner import JobOptions, Jobs, Patience, Run, Unaccountable

__all__ = [
    "STATES",
    "Event",
    "Job",
    "JobOptions",
    "JobOver",
    "JobRunning",
    "Jobs",
    "Kind",
    "Limits",
    "Patience",
    "QueueFull",
    "Run",
    "State",
    "StateUnusable",
    "Tally",
    "Turn",
    "Unaccountable",
    "UnknownJob",
]
