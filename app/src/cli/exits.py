"""Exit codes: the table from error class to code, and the message for an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from app.src.jobs.journal import JobOver, JobRunning, QueueFull, StateUnusable, UnknownJob
from app.src.service.explaining import UnknownCode
from app.src.settings import SettingsError
from connector import errors

OK, FAILED, USAGE, UNAVAILABLE, UNEXPECTED = 0, 1, 2, 3, 4
INTERRUPTED, TERMINATED = 130, 143


class UsageFault(Exception):
    """The command line is invalid; the message says what to do instead."""


CODES: tuple[tuple[type[Exception], int], ...] = (
    # The first match counts.
    (UsageFault, USAGE),
    (SettingsError, USAGE),
    (UnknownCode, USAGE),
    (errors.ConfigurationError, USAGE),
    (errors.DatabaseError, UNAVAILABLE),
    (errors.StoreCorrupt, UNAVAILABLE),
    (errors.LeaseLost, UNAVAILABLE),
    (errors.GenerationChanged, UNAVAILABLE),
    (errors.GenerationRefused, FAILED),
    (errors.SyncPaused, FAILED),
    (errors.RowRejected, FAILED),
    (errors.TextsNotEmbeddable, FAILED),
    (JobRunning, UNAVAILABLE),
    (QueueFull, UNAVAILABLE),
    (UnknownJob, USAGE),
    (JobOver, FAILED),
    (StateUnusable, USAGE),
)
ENGINE_CODES = {
    # By name: importing the engine's module just to compare classes would slow down every `--help`.
    "ModelNotFound": USAGE,
    "ModelUnsupported": USAGE,
    "WeightsMismatch": USAGE,
    "DeviceUnavailable": USAGE,
    "NotAsGraph": USAGE,
    "NonFinite": FAILED,
    "TooFewTexts": FAILED,
    "TrainingFailed": FAILED,
}


def exit_code(error: BaseException) -> int:
    for kind, code in CODES:
        if isinstance(error, kind):
            return code
    return ENGINE_CODES.get(type(error).__name__, UNEXPECTED)


def message(error: BaseException) -> str:
    """Return the message for an error. An unexpected error's text may hold row data, so only its class is named."""
    of_engine = any(kind.__name__ == "EngineError" for kind in type(error).__mro__)
    if exit_code(error) == UNEXPECTED and not isinstance(error, errors.ConnectorError) and not of_engine:
        what = type(error).__name__
        if isinstance(error, OSError) and error.errno:
            what += f": {os.strerror(error.errno)}"
        return f"unexpected error ({what}); owl-sap --debug ... shows where it happened"
    return str(error)


@contextmanager
def refusals(subject: str = "") -> Iterator[None]:
    """Turn a ValueError into a usage error."""
    try:
        yield
    except ValueError as error:
        raise UsageFault(f"{subject}{error}") from None
