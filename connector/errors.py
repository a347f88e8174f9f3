"""The errors of the connector, and a table that maps HANA's error codes to them. The driver's exception classes are
ignored, because they carry almost no information.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


class ConnectorError(Exception):
    """Base class. `retryable`: the same call may succeed later without any change."""

    retryable = False


# ------------------------------------------------------------------------ the configuration cannot work: exit code 2


class ConfigurationError(ConnectorError):
    """The configuration or a request cannot work."""


class UnknownTable(ConfigurationError):
    """Codes 259, 362 and 397, or not in the catalogue."""


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
    """An operation for synced collections on one that clients write, or the reverse."""


class BadDocument(ConfigurationError):
    """A client's document cannot be stored. `index`: its position in the request, from 0. Contains none of its text."""

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class NoProposal(ConfigurationError):
    """No collection can be proposed for a table. The message says why."""


# ------------------------------------------------------------------------------ HANA or the store failed: exit code 3


class DatabaseError(ConnectorError):
    """`code`: HANA's (positive) or the driver's (negative) error code; 0 if none."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class ConnectionLost(DatabaseError):
    """The session and its transaction are lost."""

    retryable = True


class Unavailable(DatabaseError):
    """Down for maintenance, or starting: retry after minutes."""

    retryable = True


class ConnectFailed(DatabaseError):
    """No connection could be made."""


class Unreachable(ConnectFailed):
    """Unknown host, closed port, or no answer. Retryable, because a restarting server refuses connections."""

    retryable = True


class ConnectionMisconfigured(ConnectFailed):
    """Certificate, HTTP endpoint, or missing key store entry."""


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
    """The database or a conversion rejected this row's data; other rows continue. `code`: as in DatabaseError. Contains
    no row data."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class RowsRejected(RowRejected):
    """`rows`: reasons by position in the batch, from 0. Other rows may be bad, too."""

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


# ------------------------------------------------------------------------------------------ HANA's codes, as a table


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table. It applies if the code is among `codes` (empty: any) and the driver's text, in lower case,
    contains one of `texts` (empty: any).

    `meaning` completes "<what was being done>: ...". `next_step`: what to do. `quotes`: the driver's text may be shown;
    HANA's texts for bad data repeat the data.
    """

    error: type[ConnectorError]
    meaning: str
    next_step: str = ""
    codes: AbstractSet[int] = frozenset()
    texts: tuple[str, ...] = ()
    quotes: bool = False

    def holds(self, code: int, lowered: str) -> bool:
        if self.codes and code not in self.codes:
            return False
        return not self.texts or any(fragment in lowered for fragment in self.texts)


def _failed_connect(error: type[ConnectorError], *texts: str, meaning: str, check: str, quotes: bool = True) -> Rule:
    return Rule(error, meaning, check, {CONNECT_FAILED}, texts, quotes)


CONNECT_FAILED = -10709  # the driver's code for every failed connect; the RTE number in its text is the cause (2.30.27)
CANCELLED = 139
# Texts of these codes may contain row data: never read or show them.
_BAD_ROWS = {
    301: "a row with the same key already exists",
    461: "a foreign key does not match",
    274: "a value is too long for its column",
    287: "a NOT NULL column would be NULL",
    303: "a value is not a valid date",
    304: "a calculation divides by zero",
    314: "a calculation overflows",
    339: "a value is not a valid number",
    677: "a CHECK constraint of the table is violated",
    -10404: "a value does not fit the type of its column",
    -10411: "a value does not fit the type of its column",
    -10427: "a value does not fit the type of its column",
}
_REFUSED_LOGINS = {
    10: ("user or password is wrong", "check `user` and `password`; the login is not tried again: HANA locks users"),
    414: ("the password must be changed first", "choose a new one with SAP's own tools and set `password`"),
    415: ("the user is deactivated", "ask the administrator to run ALTER USER ... ACTIVATE USER NOW"),
    416: ("the user is locked", "ask the administrator to run ALTER USER ... RESET CONNECT ATTEMPTS"),
}
_DOWN = Unavailable, "the instance is down for maintenance or starting", "wait some minutes"
_LOST = ConnectionLost, "the connection to HANA was lost", ""
_ROLLED_BACK = TransactionRolledBack, "HANA rolled the transaction back", "run it again"
_EXHAUSTED = Overloaded, "HANA is out of memory, threads, transactions or time for the statement", "use smaller batches"

# First match wins. Sources: SAP's sqlalchemy-hana `errors.py` (Apache-2.0) for the meaning of codes; negative codes and
# their texts were observed from the driver.
RULES: tuple[Rule, ...] = (
    *(Rule(RowRejected, meaning, codes={code}) for code, meaning in _BAD_ROWS.items()),
    Rule(
        RowRejected,
        "a vector is invalid or does not have the length of its column",
        codes={0},
        texts=("expected a vector", "improper vector format"),
    ),
    Rule(
        RowRejected,
        "the driver cannot send a value: an unpaired surrogate, a number beyond 64 bits, or an unknown type",
        codes={0},
        texts=("not a valid unicode string", "too large to be represented", "invalid parameter ["),
    ),
    # Failed connects: first wrong settings, then possibly temporary failures.
    _failed_connect(
        ConnectionMisconfigured,
        "does not match names in certificate",
        meaning="the server's certificate is for another name than `host`",
        check="use the name in the certificate as `host` (an IP address never matches), or set "
        "`host_name_in_certificate`",
    ),
    _failed_connect(
        ConnectionMisconfigured,
        "rte:[300015]",
        meaning="the server's certificate is not trusted",
        check="set `trust_store` to the PEM file of its certificate authority; the driver reports a missing file and "
        "an expired certificate the same way: owl-sap doctor distinguishes them",
        quotes=False,
    ),
    _failed_connect(
        ConnectionMisconfigured,
        "rte:[300012]",
        meaning="the server answered an encrypted connect in plain text",
        check="check `port`; switch `encrypt` off only where the server has no TLS",
        quotes=False,
    ),
    _failed_connect(
        ConnectionMisconfigured,
        *("rte:[200121]", "rte:[200110]"),
        meaning="not HANA's SQL port, but a web server, a proxy or a port that expects TLS",
        check="check `host`, `port` (HANA Cloud 443, on-premise 3NN13 or 3NN15) and `encrypt`",
    ),
    _failed_connect(
        ConnectionMisconfigured,
        "rte:[300005]",
        meaning="the driver finds no TLS library",
        check="install OpenSSL 3 (libssl3) on this machine",
    ),
    _failed_connect(
        Unreachable,
        *("rte:[89001]", "cannot resolve host name"),
        meaning="the host name cannot be resolved",
        check="check `host`, then the name server",
    ),
    _failed_connect(
        Unreachable,
        "connection refused",
        meaning="the connection was refused: no server listens there",
        check="check `host` and `port`, and that the instance is running",
    ),
    _failed_connect(
        Unreachable,
        *("timeout expired", "timed out", "rte:[89012]"),
        meaning="no answer within `connect_timeout`",
        check="check `host`, `port`, firewall and allow-list; raise `connect_timeout` on a slow network",
    ),
    _failed_connect(
        Unreachable,
        meaning="the server could not be reached",
        check="check `host` and `port`; where the server closes the connection at once, check `encrypt`",
    ),
    Rule(
        ConnectionMisconfigured,
        "the address is invalid",
        "check `host`: a name alone, without port or protocol",
        {-10719},
        quotes=True,
    ),
    Rule(
        ConnectionMisconfigured,
        "the key of the secure user store was not found",
        "check `userkey`; `hdbuserstore LIST` shows what this user of the operating system has",
        {-10104},
        quotes=True,
    ),
    # Errors that do not go away by waiting.
    *(
        Rule(LoginRefused, f"login refused: {meaning}", f"{step}, then restart a running service", {code})
        for code, (meaning, step) in _REFUSED_LOGINS.items()
    ),
    Rule(
        PermissionRefused,
        "the user lacks a privilege",
        "`owl-sap grants` prints the statements that these settings need, with --search-only those for searching alone",
        {258},
        quotes=True,
    ),
    Rule(UnknownTable, "unknown table or view", codes={259}, quotes=True),
    Rule(UnknownColumn, "unknown column", codes={260}, quotes=True),
    Rule(UnknownTable, "unknown schema", codes={362}, quotes=True),
    Rule(UnknownTable, "unknown object", codes={397}, quotes=True),
    Rule(StatementFailed, "SQL syntax error", "check `where` if it is set", {257}, quotes=True),
    Rule(StatementFailed, "this HANA lacks a required feature", codes={7}, quotes=True),
    # Codes that mean different things with different texts.
    Rule(*_DOWN, {663}, ("gba503",)),
    Rule(StatementFailed, "the connection was rejected by the service", codes={663}),
    Rule(
        *_EXHAUSTED,
        {2048, 129},
        (
            *("max number of sqlexecutor threads", "allocation failed"),
            *("cannot allocate enough memory", "outofmemory"),
        ),
    ),
    # Codes that mean one thing.
    Rule(*_LOST, {-10807, -10108, -10735, 18, 597}),
    Rule(*_LOST, {0}, ("connection closed", "not connected")),
    Rule(*_DOWN, {1888}),
    Rule(*_ROLLED_BACK, {131, 133, 138, 143, 146, 129, 145, 149, CANCELLED}),
    Rule(*_EXHAUSTED, {4, 142, 613}),
    # Texts that mean the same with any code.
    Rule(
        *_DOWN,
        texts=(
            "maintenance window",
            "instance upgrade in progress",
            "instance resize in progress",
            "transactionmanager is not yet fully initialized",
        ),
    ),
    Rule(
        *_EXHAUSTED,
        texts=(
            *("outofmemory exception", "cannot allocate enough memory", "allocation failed"),
            "exceed maximum number of transactions",
        ),
    ),
    Rule(
        *_ROLLED_BACK,
        texts=(
            *("sequence cache lock", "dtx commit", "an error occurred while opening/reading the channel"),
            *("exception in executor plan", "temp index not exists"),
        ),
    ),
    Rule(
        StatementFailed,
        "this instance is a read-only secondary",
        "write to the primary: check `host`",
        texts=("writable statement not allowed in read-enabled replication",),
    ),
    Rule(StatementFailed, "HANA reported an error", "SYS.M_ERROR_CODES says what the code means"),
)
_LONGEST_QUOTE = 300


def classify(code: int, text: str, *, doing: str) -> ConnectorError:
    """Return our error for what the driver reported while `doing` ("reading SAPDEMO.MARA"). Never raises.

    The message has the activity, the code and the next step. It includes the driver's text (one printable line of
    limited length) only if that cannot contain row data.
    """
    lowered = text.lower()
    rule = next(rule for rule in RULES if rule.holds(code, lowered))
    quoted, advice = "", ""
    if rule.quotes and text.strip():
        line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        quoted = f": {line}" if len(line) <= _LONGEST_QUOTE else f": {line[:_LONGEST_QUOTE]} ..."
    if rule.next_step:
        advice = f" {rule.next_step[0].upper()}{rule.next_step[1:]}."
    return make(rule.error, f"{doing}: {rule.meaning} (code {code}{quoted}).{advice}", code)


def make(error: type[ConnectorError], message: str, code: int) -> ConnectorError:
    """Return an error of that class, with the code if the class has one."""
    if issubclass(error, DatabaseError | RowRejected):
        return error(message, code=code)
    return error(message)
