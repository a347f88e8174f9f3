"""Background jobs that outlive their process: records, events and progress in a SQLite file or in HANA, one job at a
time per collection, cancellation and resumption by any process. Each job is handed to a callable."""

from typing import Literal

State = Literal["queued", "running", "waiting", "succeeded", "failed", "cancelled"]
