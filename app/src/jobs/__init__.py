"""Background jobs that outlive their process: records, events and progress in one SQLite file, one job at a time per
collection, cancellation from anywhere. Runs a callable it is given and knows nothing about it.
"""

from app.src.jobs.journal import Retention
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
    UnknownJob,
)
from app.src.jobs.runner import JobOptions, Jobs, Run

__all__ = [
    "STATES",
    "Event",
    "Job",
    "JobOptions",
    "JobOver",
    "JobRunning",
    "Jobs",
    "Kind",
    "QueueFull",
    "Retention",
    "Run",
    "State",
    "StateUnusable",
    "UnknownJob",
]
