"""What a model is told when a tool cannot do what was asked: a sentence that says what to do instead. Knows no
protocol; never shows the message of an error that is not meant for people.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from app.src.access.rates import RateExceeded
from app.src.access.rows import RowsRefused
from app.src.jobs import JobRunning, QueueFull, StateUnusable

UNEXPECTED = "unexpected error; the log of the service has it"
_MOST_FAULTS = 5
_log = logging.getLogger(__name__)


class Refused(Exception):
    """The message is for the model."""


class ScopeMissing(Refused):
    """There is such a tool, and who asks may not use it."""


EXPECTED: tuple[type[Exception], ...] = (Refused, RateExceeded, RowsRefused, JobRunning, QueueFull, StateUnusable)
"""Beside those of the service and of the transport: errors whose message is meant for who asks."""


def told(error: Exception, expected: tuple[type[Exception], ...]) -> str:
    """The sentence. What nobody expected goes to the log, where it happened and its class, without its text."""
    if isinstance(error, EXPECTED + expected):
        return str(error) or type(error).__name__
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("a tool failed: %s\n%s", type(error).__name__, frames)
    return UNEXPECTED


def faults(error: ValidationError, given: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Of arguments that do not fit; their values are not repeated."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    told = [f"{'.'.join(str(part) for part in each['loc'][:3])}: {_what(each)}" for each in found[:_MOST_FAULTS]]
    unknown = sorted(set(given) - set(known))
    if unknown:
        told.append(f"the arguments are: {', '.join(known) or 'none'}")
    return "; ".join(told)


def _what(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        return "there is no such argument"
    if fault["type"] == "missing":
        return "is missing"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
