"""Faults on order: what goes wrong, at which requests, how often. Knows neither sockets nor SQL: it compares texts."""

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
# Matched by requests without a statement: a new connection, a login, the next page of a result, and the end of a
# transaction as the driver asks for it.


class Action(StrEnum):
    """What happens; the keys that an action takes beside `match`, `skip` and `count` are listed in `_KEYS`."""

    ERROR = "error"
    """Not executed; the client gets `code` and `text`. Codes that end a transaction roll it back."""
    DROP_BEFORE = "drop_before"
    """The connection is reset before anything is executed; what was open is rolled back."""
    DROP_AFTER = "drop_after"
    """Executed, committed if autocommit or a COMMIT asked for it; then reset without a reply."""
    DELAY = "delay"
    """Executed after `seconds`; a cancel in the meantime ends it with 139."""
    REFUSE = "refuse"
    """The connection is reset when it is made (or, with `match` CONNECT, when the client logs in)."""
    SLOW = "slow"
    """The reply comes in pieces of `bytes`, one every `seconds`."""


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
    """The description of a fault is not understood; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `match`: a regular expression, searched in the text without regard to case. It lets `skip` matches
    pass, happens at the next `count` (None: at all), and is inert afterwards."""

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
        """From JSON, for example {"match": "INSERT INTO .*OWL_", "action": "drop_after"}. Raises FaultRefused."""
        try:
            given = json.loads(document)
        except ValueError as error:
            raise FaultRefused(f"not JSON: {error}") from None
        if not isinstance(given, dict):
            raise FaultRefused('a JSON object is expected, such as {"match": "INSERT", "action": "drop_after"}')
        return cls(**_checked(given))

    def error(self) -> HanaError:
        return HanaError(self.code, self.text or f"error {self.code} on order (a fault of this emulator)")


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
    """The value of `key`, checked. Raises FaultRefused."""
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
        raise FaultRefused('"count" must be a whole number of 1 or more, or null for every time')
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

    @property
    def spent(self) -> bool:
        return self.fault.count is not None and self.hits >= self.fault.count

    def strikes(self, text: str) -> bool:
        """Counts a match, and says whether the fault happens now."""
        if self.spent or not self._is_found(text):
            return False
        self.matches += 1
        if self.matches <= self.fault.skip:
            return False
        self.hits += 1
        return True

    def _is_found(self, text: str) -> bool:
        """A pattern that takes too long would stop every session: it is never tried again."""
        if self.too_slow:
            return False
        try:
            return self.pattern.search(text, timeout=_SEARCH_SECONDS) is not None
        except TimeoutError:
            self.too_slow = True
            _log.warning("fault %d is taken off: its expression takes longer than %g s", self.number, _SEARCH_SECONDS)
            return False


class FaultList:
    """The faults on order, shared by all sessions. The first that strikes at a request wins; only that one is counted
    as a hit, every other that matched before it let it pass."""

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
        """The fault that happens at a request of this text, if any. New connections know refusals only."""
        if not self._ordered:  # the ordinary case costs no lock
            return None
        with self._lock:
            for ordered in self._ordered:
                if (text != ACCEPT or ordered.fault.action is Action.REFUSE) and ordered.strikes(text):
                    return ordered.fault
        return None

    def as_json(self) -> str:
        """An array for SYS.M_EMULATOR_FAULTS: the fields of each fault, `id`, `matches` and `hits`."""
        with self._lock:
            rows = [
                {one.name: getattr(ordered.fault, one.name) for one in fields(Fault)}
                | {"id": ordered.number, "matches": ordered.matches, "hits": ordered.hits}
                for ordered in self._ordered
            ]
        return json.dumps(rows)
