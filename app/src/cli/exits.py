"""Exit codes, and the message for an error. service/explaining/errors.toml maps errors to exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from app.src.service.explaining import explained_as
from connector.errors import ConnectorError

OK, FAILED, USAGE, UNAVAILABLE, UNEXPECTED = 0, 1, 2, 3, 4
INTERRUPTED, TERMINATED = 130, 143


class UsageFault(Exception):
    """The command line is invalid; the message says what to do instead."""


def exit_code(error: BaseException) -> int:
    return explained_as(error).exit


def message(error: BaseException) -> str:
    """Return the message for an error. An unexpected error's text may hold row data, so the message omits it."""
    of_engine = any(kind.__name__ == "EngineError" for kind in type(error).__mro__)
    if exit_code(error) == UNEXPECTED and not isinstance(error, ConnectorError) and not of_engine:
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
