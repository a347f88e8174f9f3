"""The errors of the connector, and the mapping of HANA's error codes (hana_codes.toml) to them. The driver's exception
classes are ignored, because they carry almost no information.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any


class ConnectorError(Exception):
    """Base class. `retryable`: the same call may succeed later without any change. `code`: HANA's (positive) or the
    driver's (negative) error code; 0 if none."""

    retryable = False

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling `__init__`, whose parameters differ between classes."""
        return Exception.__new__, (type(self), *self.args), vars(self)


# ------------------------------------------------------------------------ the configuration cannot work: exit code 2


class ConfigurationError(ConnectorError):
    """The configuration or a request cannot work."""


class UnknownTable(ConfigurationError):
    """Codes 259, 362 and 397, or the table is not in the catalogue."""


class UnknownColumn(ConfigurationError):
    """Code 260."""


class NoKey(ConfigurationError):
    """No primary key and no `key` configured, or two rows share a `key`."""


class LogMissing(ConfigurationError):
    """The change log of a collection, or one of its triggers, is missing or inactive."""


class BadFilter(ConfigurationError):
    """A search filter is invalid."""


class ModelMismatch(ConfigurationError):
    """The collection holds vectors of another model or dimension."""


class UnknownCollection(ConfigurationError):
    """The store has no such collection."""


class UnknownKey(ConfigurationError):
    """No row in quarantine has this key."""


class UnknownRow(ConfigurationError):
    """No row has this id, or the caller may not see it."""


class UnknownGeneration(ConfigurationError):
    """No generation has this number."""


class WrongOrigin(ConfigurationError):
    """The operation is for synced collections and clients write this one, or the reverse."""


class BadDocument(ConfigurationError):
    """A client's document cannot be stored. `index`: its position in the request, from 0. Never quotes its text."""

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class NoProposal(ConfigurationError):
    """No collection can be proposed for a table. The message says why."""


# ------------------------------------------------------------------------------ HANA or the store failed: exit code 3


class DatabaseError(ConnectorError):
    """HANA, the driver or the local store failed."""


class ConnectionLost(DatabaseError):
    """The session and its transaction are lost."""

    retryable = True


class Unavailable(DatabaseError):
    """HANA is starting or down for maintenance: retry after some minutes."""

    retryable = True


class ConnectFailed(DatabaseError):
    """The connection failed: wrong address, certificate, port or key store entry."""


class Unreachable(ConnectFailed):
    """Unknown host, closed port, or no answer. Retryable, because a restarting server refuses connections."""

    retryable = True


class LoginRefused(DatabaseError):
    """The login was refused. Never retried, because HANA locks users."""


class PermissionRefused(DatabaseError):
    """The user lacks a privilege: code 258."""


class TransactionRolledBack(DatabaseError):
    """HANA rolled the transaction back: run all of it again."""

    retryable = True


class Overloaded(DatabaseError):
    """Out of memory, or a statement limit: a smaller statement may succeed."""

    retryable = True


class SchemaChanged(DatabaseError):
    """The table or a column disappeared while it was read."""


class Cancelled(DatabaseError):
    """The statement was cancelled by this process."""


class StatementFailed(DatabaseError):
    """Any other code: a defect or a missing feature."""


# ------------------------------------------------------------------------------------------------------------- others


class RowRejected(ConnectorError):
    """The database or a conversion rejected this row's data; other rows continue. The message contains no row data."""


class RowsRejected(RowRejected):
    """`rows`: reasons by position in the batch, from 0. Other rows may be invalid, too."""

    def __init__(self, message: str, *, rows: Mapping[int, RowRejected]) -> None:
        super().__init__(message, code=next(iter(rows.values())).code)
        self.rows = dict(rows)


class TextsNotEmbeddable(ConnectorError):
    """`indices`: positions, in the embedder's input, of the texts without a finite vector."""

    def __init__(self, message: str, *, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.indices = tuple(indices)


class StoreCorrupt(ConnectorError):
    """The local store's file is damaged."""


class LeaseLost(ConnectorError):
    """Another worker owns the collection; nothing was written."""


class GenerationRefused(ConnectorError):
    """A generation is in the wrong state. The message says what to do."""


class GenerationChanged(ConnectorError):
    """The active generation changed during the request."""

    retryable = True


class SyncPaused(ConnectorError):
    """An operator must check first. `reason`: a short machine-readable word (`max_deletes`, `schema_changed`)."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


# -------------------------------------------------------------------------------------------------------- HANA's codes

CANCELLED = 139
_LONGEST_QUOTE = 300


@cache
def rules() -> tuple[dict[str, Any], ...]:
    """Return the rules of hana_codes.toml, which explains their fields."""
    text = files("connector").joinpath("hana_codes.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["rules"])


def classify(code: int, text: str, *, doing: str) -> ConnectorError:
    """Return our error for what the driver reported while `doing` ("reading SAPDEMO.MARA"). Never raises.

    The message names the activity, the code and the next step. It includes the driver's text (one printable line of
    limited length) only if that cannot contain row data.
    """
    lowered = text.lower()
    rule = next(
        rule
        for rule in rules()
        if code in rule.get("codes", (code,)) and any(part in lowered for part in rule.get("texts", ("",)))
    )
    quoted, advice = "", rule.get("next_step", "")
    if rule.get("quotes") and text.strip():
        line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        quoted = f": {line}" if len(line) <= _LONGEST_QUOTE else f": {line[:_LONGEST_QUOTE]} ..."
    if advice:
        advice = f" {advice[0].upper()}{advice[1:]}."
    kind: type[ConnectorError] = globals()[rule["error"]]
    return kind(f"{doing}: {rule['meaning']} (code {code}{quoted}).{advice}", code=code)
