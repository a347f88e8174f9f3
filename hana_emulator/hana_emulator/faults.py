"""Injected faults: their actions, the requests that they match, and how often they occur."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import regex

from hana_emulator.errors import HanaError

ACCEPT, CONNECT, FETCH, COMMIT, ROLLBACK = "ACCEPT", "CONNECT", "FETCH", "COMMIT", "ROLLBACK"
# Texts that faults match for requests without a statement: a new connection, a login, the next page of a result, and
# the driver's commit and rollback.


class Action(StrEnum):
    """The actions of faults. `_KEYS` lists the keys of each besides `match`, `skip` and `count`."""

    ERROR = "error"  # Not executed; the client gets `code` and `text`. Codes that end a transaction roll it back.
    DROP_BEFORE = "drop_before"  # Not executed; the connection is reset and an open transaction is rolled back
    DROP_AFTER = "drop_after"  # Executed, with autocommit also committed; then the connection is reset without a reply
    DELAY = "delay"  # Executed after `seconds`; a cancel during the delay ends the request with error 139
    REFUSE = "refuse"  # The connection is reset when it is made (or, with `match` CONNECT, when the client logs in)
    SLOW = "slow"  # The reply comes in pieces of `bytes`, one every `seconds`


_KEYS = {
    Action.ERROR: ("code", "text"),
    Action.DROP_BEFORE: (),
    Action.DROP_AFTER: (),
    Action.DELAY: ("seconds",),
    Action.REFUSE: (),
    Action.SLOW: ("bytes", "seconds"),
}
_REQUIRED = {Action.ERROR: ("code",), Action.DELAY: ("seconds",), Action.SLOW: ("bytes", "seconds")}
_COMMON = ("match", "action", "skip", "count")
_LONGEST_SECONDS = 3_600.0
_SEARCH_SECONDS = 0.5
_log = logging.getLogger(__name__)


class FaultRefused(ValueError):
    """A fault's description is invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `match` is a regular expression, searched in the text, ignoring case. The fault skips `skip`
    matches, occurs `count` times (None: always), and is inactive afterwards."""

    match: str
    action: Action
    skip: int = 0
    count: int | None = 1
    code: int = 0
    text: str = ""
    seconds: float = 0.0
    bytes: int = 0

    @classmethod
    def parse(cls, document: str) -> Fault:
        """Parse JSON, for example {"match": "INSERT INTO .*OWL_", "action": "drop_after"}. Raises FaultRefused."""
        try:
            given = json.loads(document)
        except ValueError as error:
            raise FaultRefused(f"not JSON: {error}") from None
        if not isinstance(given, dict):
            raise FaultRefused('a JSON object is expected, such as {"match": "INSERT", "action": "drop_after"}')
        return cls(**_checked(given))

    def error(self) -> HanaError:
        return HanaError(self.code, self.text or f"error {self.code} (a fault injected into this emulator)")


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        action = Action(given.get("action", ""))
    except ValueError:
        raise FaultRefused(f'"action" must be one of {", ".join(Action)}') from None
    allowed = (*_COMMON, *_KEYS[action])
    for key in given:
        if key not in allowed:
            raise FaultRefused(f'"{key}" is not a key of the action {action}; it takes {", ".join(allowed)}')
    for key in _REQUIRED.get(action, ()):
        if key not in given:
            raise FaultRefused(f'the action {action} needs "{key}"')
    values = {"match": f"^{ACCEPT}$"} if action is Action.REFUSE else {}
    values |= {key: _value(key, value) for key, value in given.items()} | {"action": action}
    if "match" not in values:
        raise FaultRefused('"match" is missing: a regular expression for the statement text, or one of the words '
                           f"{CONNECT}, {FETCH}, {COMMIT}, {ROLLBACK}")  # fmt: skip
    return values


def _value(key: str, value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key == "match":
        try:
            regex.compile(value)
        except (regex.error, TypeError, RecursionError) as error:
            raise FaultRefused(f'"match" is not a regular expression: {error}') from None
    elif key == "text" and not isinstance(value, str):
        raise FaultRefused('"text" must be a string')
    elif key == "skip" and not (whole and value >= 0):
        raise FaultRefused('"skip" must be a whole number of 0 or more')
    elif key == "count" and value is not None and not (whole and value >= 1):
        raise FaultRefused('"count" must be a whole number of 1 or more, or null for always')
    elif key == "code" and not (whole and 0 < abs(value) < 2**31):
        raise FaultRefused('"code" must be an error code, for example 131')
    elif key == "bytes" and not (whole and value >= 1):
        raise FaultRefused('"bytes" must be a whole number of 1 or more')
    elif key == "seconds":
        number = whole or isinstance(value, float)
        if not (number and 0 < value <= _LONGEST_SECONDS):
            raise FaultRefused(f'"seconds" must be a number above 0 and at most {_LONGEST_SECONDS:g}')
        return float(value)
    return value


@dataclass(slots=True)
class _Ordered:
    number: int
    fault: Fault
    pattern: regex.Pattern[str] = field(init=False)
    matches: int = 0
    hits: int = 0
    too_slow: bool = False

    def __post_init__(self) -> None:
        self.pattern = regex.compile(self.fault.match, regex.IGNORECASE | regex.DOTALL)

    def strikes(self, text: str) -> bool:
        """Count a match; return whether the fault occurs now. A pattern that takes too long is never tried again,
        because it would block all sessions."""
        if self.too_slow or (self.fault.count is not None and self.hits >= self.fault.count):
            return False
        try:
            if self.pattern.search(text, timeout=_SEARCH_SECONDS) is None:
                return False
        except TimeoutError:
            self.too_slow = True
            _log.warning("fault %d is removed: its expression takes longer than %g s", self.number, _SEARCH_SECONDS)
            return False
        self.matches += 1
        if self.matches <= self.fault.skip:
            return False
        self.hits += 1
        return True


class FaultList:
    """The faults of all sessions. The first active fault that matches a request occurs; only its hits
    increase."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._ordered: list[_Ordered] = []
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._last += 1
            self._ordered.append(_Ordered(self._last, fault))

    def clear(self) -> None:
        with self._lock:
            self._ordered.clear()

    def strike(self, text: str) -> Fault | None:
        """Return the fault that occurs at a request with this text, or None. For ACCEPT, only REFUSE faults occur."""
        if not self._ordered:  # usually empty, so avoid the lock
            return None
        with self._lock:
            for ordered in self._ordered:
                if (text != ACCEPT or ordered.fault.action is Action.REFUSE) and ordered.strikes(text):
                    return ordered.fault
        return None

    def as_json(self) -> str:
        """A JSON array for SYS.M_EMULATOR_FAULTS: the fields of each fault, `id`, `matches` and `hits`."""
        with self._lock:
            rows = [
                {one.name: getattr(ordered.fault, one.name) for one in fields(Fault)}
                | {"id": ordered.number, "matches": ordered.matches, "hits": ordered.hits}
                for ordered in self._ordered
            ]
        return json.dumps(rows)
