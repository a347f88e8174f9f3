"""The tree of errors, and the table that maps HANA's error codes to it. Only the code counts: the classes that the
driver chooses say almost nothing.

ConnectorError
├── ConfigurationError          the configuration cannot work: exit 2
│   ├── UnknownTable            259, 362, 397 or not in the catalogue
│   ├── UnknownColumn           260
│   ├── NoKey                   no primary key and no `key` given, or a `key` that two rows share
│   ├── LogMissing              the change log of a collection, or one of its triggers, is missing or inactive
│   ├── BadFilter               a search filter is invalid
│   ├── ModelMismatch           the collection holds vectors of another model or dimension
│   ├── WordsNotSearchable      the store cannot search for words on this machine
│   ├── UnknownCollection
│   ├── UnknownKey              no row in quarantine has this key
│   ├── UnknownRow              no row with this id, or none that the caller may see
│   ├── UnknownGeneration       no generation with this number
│   ├── WrongOrigin             an operation for synced collections, on one that clients write, or the reverse
│   ├── BadDocument             a document that a client sent cannot be stored
│   └── NoProposal              no collection can be proposed for a table
├── DatabaseError               HANA or the store failed; carries `code`: exit 3
│   ├── ConnectionLost          the session and its transaction are lost                       (retryable)
│   ├── Unavailable             down for maintenance or starting: wait minutes                 (retryable)
│   ├── ConnectFailed           no connection could be made
│   │   ├── Unreachable         unknown host, closed port, no answer                    (retryable)
│   │   └── ConnectionMisconfigured certificate, HTTP endpoint, missing key store entry
│   ├── LoginRefused            10, 414 ...; tried once, because HANA locks users
│   ├── PermissionRefused       258
│   ├── TransactionRolledBack   131, 133, 138 ...: run the whole transaction again             (retryable)
│   ├── Overloaded              out of memory, statement limits: less at a time                (retryable)
│   ├── SchemaChanged           the table or a column disappeared while it was read
│   ├── Cancelled               139 after our own request
│   └── StatementFailed         any other code: a defect or a missing feature
├── RowRejected                 one row cannot be processed; the others go on (quarantine)
│   └── RowsRejected            some rows of a batch; names them
├── TextsNotEmbeddable          the engine gave no finite vectors for some texts
├── StoreCorrupt                the local store's file is damaged
├── LeaseLost                   another worker owns the collection; nothing was written
├── GenerationRefused           a generation is in the wrong state: unfinished, or active
├── GenerationChanged           the active generation changed during the request        (retryable)
└── SyncPaused                  an operator must look first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class ConnectorError(Exception):
    """Root of the tree. `retryable`: the same call may succeed later without any change."""

    retryable = False


class ConfigurationError(ConnectorError):
    pass


class UnknownTable(ConfigurationError):
    pass


class UnknownColumn(ConfigurationError):
    pass


class NoKey(ConfigurationError):
    pass


class BadFilter(ConfigurationError):
    pass


class ModelMismatch(ConfigurationError):
    pass


class WordsNotSearchable(ConfigurationError):
    pass


class UnknownKey(ConfigurationError):
    pass


class UnknownCollection(ConfigurationError):
    pass


class UnknownRow(ConfigurationError):
    pass


class UnknownGeneration(ConfigurationError):
    pass


class WrongOrigin(ConfigurationError):
    pass


class BadDocument(ConfigurationError):
    """`index`: its position in the request, from 0. Holds nothing of its text."""

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class NoProposal(ConfigurationError):
    """The message says what the table lacks."""


class DatabaseError(ConnectorError):
    """`code` is HANA's (positive) or the driver's (negative) error code; 0 when there is none."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class ConnectionLost(DatabaseError):
    retryable = True


class Unavailable(DatabaseError):
    retryable = True


class ConnectFailed(DatabaseError):
    pass


class Unreachable(ConnectFailed):
    """Retryable: a server that restarts refuses connections, too."""

    retryable = True


class ConnectionMisconfigured(ConnectFailed):
    pass


class LoginRefused(DatabaseError):
    pass


class PermissionRefused(DatabaseError):
    pass


class TransactionRolledBack(DatabaseError):
    retryable = True


class Overloaded(DatabaseError):
    retryable = True


class SchemaChanged(DatabaseError):
    pass


class Cancelled(DatabaseError):
    pass


class StatementFailed(DatabaseError):
    pass


class RowRejected(ConnectorError):
    """The database or a conversion rejected this row's data. `code` as in DatabaseError. Holds no row data."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class RowsRejected(RowRejected):
    """`rows`: positions in the batch, from 0, each with its reason. Other rows may be bad, too."""

    def __init__(self, message: str, *, rows: Mapping[int, RowRejected]) -> None:
        super().__init__(message, code=next(iter(rows.values())).code)
        self.rows = dict(rows)


class TextsNotEmbeddable(ConnectorError):
    """`indices`: positions, in the list given to the embedder, of the texts without a finite vector."""

    def __init__(self, message: str, *, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.indices = tuple(indices)


class StoreCorrupt(ConnectorError):
    pass


class LeaseLost(ConnectorError):
    pass


class GenerationRefused(ConnectorError):
    """The message says what to do first."""


class GenerationChanged(ConnectorError):
    retryable = True


class LogMissing(ConfigurationError):
    pass


class SyncPaused(ConnectorError):
    """`reason` is a short word for machines (`max_deletes`, `schema_changed`), the message is for people."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


# ------------------------------------------------------------------------------------------ HANA's codes, as a table


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table. It applies when the code is among `codes` (empty: any) and the driver's text, in lower case,
    contains one of `texts` (empty: any).

    `meaning` completes "<what was being done>: ...". `next_step`: what to do. `quotes`: the driver's text may be shown;
    HANA's texts for bad data repeat the data.
    """

    error: type[ConnectorError]
    meaning: str
    next_step: str = ""
    codes: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    quotes: bool = False

    def holds(self, code: int, lowered: str) -> bool:
        if self.codes and code not in self.codes:
            return False
        return not self.texts or any(fragment in lowered for fragment in self.texts)


CONNECT_FAILED = -10709  # the driver's code for every failed connect; the RTE number in its text says why (2.30.27)
CANCELLED = 139
_CONNECT = frozenset({CONNECT_FAILED})

RULES: tuple[Rule, ...] = (
    # Bad rows come first: their texts may contain row data, so they are neither read nor shown.
    Rule(RowRejected, "a row with the same key already exists", codes=frozenset({301})),
    Rule(RowRejected, "a foreign key does not match", codes=frozenset({461})),
    Rule(RowRejected, "a value is too long for its column", codes=frozenset({274})),
    Rule(RowRejected, "a NOT NULL column would be NULL", codes=frozenset({287})),
    Rule(RowRejected, "a value is not a valid date", codes=frozenset({303})),
    Rule(RowRejected, "a calculation divides by zero or overflows", codes=frozenset({304, 314})),
    Rule(RowRejected, "a value is not a valid number", codes=frozenset({339})),
    Rule(RowRejected, "a CHECK constraint of the table is violated", codes=frozenset({677})),
    Rule(RowRejected, "a value does not fit the type of its column", codes=frozenset({-10404, -10411, -10427})),
    Rule(
        RowRejected,
        "a vector is invalid or does not have the length of its column",
        codes=frozenset({0}),
        texts=("expected a vector", "improper vector format"),
    ),
    Rule(
        RowRejected,
        "the driver cannot send a value: an unpaired surrogate, a number beyond 64 bits, or an unknown type",
        codes=frozenset({0}),
        texts=("not a valid unicode string", "too large to be represented", "invalid parameter ["),
    ),
    # Failed connects: first wrong settings, then failures that may be temporary.
    Rule(
        ConnectionMisconfigured,
        "the server's certificate is for another name than `host`",
        "use the name in the certificate as `host` (an IP address never matches), or set `host_name_in_certificate`",
        codes=_CONNECT,
        texts=("does not match names in certificate",),
        quotes=True,
    ),
    Rule(
        ConnectionMisconfigured,
        "the server's certificate is not trusted",
        "set `trust_store` to the PEM file of its certificate authority; the driver reports a missing file and an "
        "expired certificate the same way: owl-sap doctor distinguishes them",
        codes=_CONNECT,
        texts=("rte:[300015]",),
    ),
    Rule(
        ConnectionMisconfigured,
        "the server answered an encrypted connect in plain text",
        "check `port`; switch `encrypt` off only where the server has no TLS",
        codes=_CONNECT,
        texts=("rte:[300012]",),
    ),
    Rule(
        ConnectionMisconfigured,
        "a web server or proxy answered, not HANA's SQL port",
        "check `host` and `port` (HANA Cloud 443, on-premise 3NN13 or 3NN15) and `encrypt`",
        codes=_CONNECT,
        texts=("rte:[200121]",),
        quotes=True,
    ),
    Rule(
        ConnectionMisconfigured,
        "the port is not HANA's SQL port, or it expects TLS",
        "check `port` and `encrypt`",
        codes=_CONNECT,
        texts=("rte:[200110]",),
        quotes=True,
    ),
    Rule(
        ConnectionMisconfigured,
        "the driver finds no TLS library",
        "install OpenSSL 3 (libssl3) on this machine",
        codes=_CONNECT,
        texts=("rte:[300005]",),
        quotes=True,
    ),
    Rule(
        Unreachable,
        "the host name cannot be resolved",
        "check `host`, then the name server",
        codes=_CONNECT,
        texts=("rte:[89001]", "cannot resolve host name"),
        quotes=True,
    ),
    Rule(
        Unreachable,
        "the connection was refused: no server listens there",
        "check `host` and `port`, and that the instance is running",
        codes=_CONNECT,
        texts=("connection refused",),
        quotes=True,
    ),
    Rule(
        Unreachable,
        "no answer within `connect_timeout`",
        "check `host`, `port`, firewall and allow-list; raise `connect_timeout` on a slow network",
        codes=_CONNECT,
        texts=("timeout expired", "timed out", "rte:[89012]"),
        quotes=True,
    ),
    Rule(
        Unreachable,
        "the server could not be reached",
        "check `host` and `port`; where the server closes the connection at once, check `encrypt` and that the port "
        "speaks TLS",
        codes=_CONNECT,
        quotes=True,
    ),
    Rule(
        ConnectionMisconfigured,
        "the address is invalid",
        "check `host`: a name alone, without port or protocol",
        codes=frozenset({-10719}),
        quotes=True,
    ),
    Rule(
        ConnectionMisconfigured,
        "the key of the secure user store was not found",
        "check `userkey`; `hdbuserstore LIST` shows what this user of the operating system has",
        codes=frozenset({-10104}),
        quotes=True,
    ),
    # Errors that waiting does not help.
    Rule(
        LoginRefused,
        "login refused: user or password is wrong",
        "check `user` and `password`; the login is not tried again, because HANA locks users: restart a running "
        "service after the correction",
        codes=frozenset({10}),
    ),
    Rule(
        LoginRefused,
        "login refused: the password must be changed first",
        "log in with SAP's own tools, choose a new password, set `password` and restart a running service",
        codes=frozenset({414}),
    ),
    Rule(
        LoginRefused,
        "login refused: the user is deactivated",
        "ask the administrator to activate the user (ALTER USER ... ACTIVATE USER NOW), then restart a running service",
        codes=frozenset({415}),
    ),
    Rule(
        LoginRefused,
        "login refused: the user is locked",
        "ask the administrator to unlock the user (ALTER USER ... RESET CONNECT ATTEMPTS), then "
        "restart a running service",
        codes=frozenset({416}),
    ),
    Rule(
        PermissionRefused,
        "the user lacks a privilege",
        "`owl-sap grants` prints the statements that these settings need, with --search-only those for searching alone",
        codes=frozenset({258}),
        quotes=True,
    ),
    Rule(UnknownTable, "unknown table or view", codes=frozenset({259}), quotes=True),
    Rule(UnknownColumn, "unknown column", codes=frozenset({260}), quotes=True),
    Rule(UnknownTable, "unknown schema", codes=frozenset({362}), quotes=True),
    Rule(UnknownTable, "unknown object", codes=frozenset({397}), quotes=True),
    Rule(StatementFailed, "SQL syntax error", "check `where` if it is set", codes=frozenset({257}), quotes=True),
    Rule(StatementFailed, "this HANA lacks a required feature", codes=frozenset({7}), quotes=True),
    # Codes that mean different things with different texts.
    Rule(
        Unavailable,
        "the instance is down for maintenance or starting",
        "wait some minutes",
        codes=frozenset({663}),
        texts=("gba503",),
    ),
    Rule(StatementFailed, "the connection was rejected by the service", codes=frozenset({663})),
    Rule(
        Overloaded,
        "HANA has no thread free for the statement",
        "use smaller batches",
        codes=frozenset({129}),
        texts=("max number of sqlexecutor threads",),
    ),
    Rule(
        Overloaded,
        "HANA ran out of memory for the statement",
        "use smaller batches, or ask for a higher statement memory limit",
        codes=frozenset({2048, 129}),
        texts=("memory allocation failed", "allocation failed", "cannot allocate enough memory", "outofmemory"),
    ),
    # Codes that mean one thing.
    Rule(
        ConnectionLost,
        "the connection to HANA was lost",
        codes=frozenset({-10807, -10108, -10735, 18, 597}),
    ),
    Rule(
        ConnectionLost,
        "the connection to HANA was lost",
        codes=frozenset({0}),
        texts=("connection closed", "not connected"),
    ),
    Rule(Unavailable, "the instance is down for maintenance or starting", "wait some minutes", codes=frozenset({1888})),
    Rule(
        TransactionRolledBack,
        "HANA rolled the transaction back",
        "run it again",
        codes=frozenset({131, 133, 138, 143, 146, 129, 145, 149, CANCELLED}),
    ),
    Rule(
        Overloaded,
        "HANA is out of memory",
        "use smaller batches",
        codes=frozenset({4}),
    ),
    Rule(Overloaded, "HANA has too many transactions open", "use smaller batches", codes=frozenset({142})),
    Rule(Overloaded, "the statement exceeded HANA's time limit", "use smaller batches", codes=frozenset({613})),
    # Texts that mean the same with any code.
    Rule(
        Unavailable,
        "the instance is down for maintenance or starting",
        "wait some minutes",
        texts=(
            "maintenance window",
            "instance upgrade in progress",
            "instance resize in progress",
            "transactionmanager is not yet fully initialized",
        ),
    ),
    Rule(
        Overloaded,
        "HANA is out of memory or of transactions",
        "use smaller batches",
        texts=(
            "outofmemory exception",
            "cannot allocate enough memory",
            "allocation failed",
            "exceed maximum number of transactions",
        ),
    ),
    Rule(
        TransactionRolledBack,
        "HANA rolled the transaction back",
        "run it again",
        texts=(
            "sequence cache lock",
            "dtx commit",
            "an error occurred while opening/reading the channel",
            "exception in executor plan",
            "temp index not exists",
        ),
    ),
    Rule(
        StatementFailed,
        "this instance is a read-only secondary",
        "write to the primary: check `host`",
        texts=("writable statement not allowed in read-enabled replication",),
    ),
)
# First match wins. Sources: SAP's sqlalchemy-hana `errors.py` (Apache-2.0) for the meaning of codes; the negative codes
# and their texts were seen from the driver itself.

_OTHERWISE = Rule(StatementFailed, "HANA reported an error", "SYS.M_ERROR_CODES says what the code means")
_LONGEST_QUOTE = 300


def classify(code: int, text: str, *, doing: str, cancelled: bool = False) -> ConnectorError:
    """Return our error for what the driver reported while `doing` ("reading SAPDEMO.MARA"). Never raises.

    The message has what was being done, the code and the next step, and the driver's text only where that cannot
    contain row data. `cancelled`: we asked for it, so 139 is not retried.
    """
    if cancelled and code == CANCELLED:
        return Cancelled(f"{doing}: cancelled (code {code})", code=code)
    lowered = text.lower()
    rule = next((rule for rule in RULES if rule.holds(code, lowered)), _OTHERWISE)
    return make(rule.error, _message(rule, code, text, doing), code)


def make(error: type[ConnectorError], message: str, code: int) -> ConnectorError:
    """Return an error of that class, with the code where the class has one."""
    if issubclass(error, DatabaseError | RowRejected):
        return error(message, code=code)
    return error(message)


def _message(rule: Rule, code: int, text: str, doing: str) -> str:
    quoted = f": {_tidy(text)}" if rule.quotes and text.strip() else ""
    advice = f" {rule.next_step[0].upper()}{rule.next_step[1:]}." if rule.next_step else ""
    return f"{doing}: {rule.meaning} (code {code}{quoted}).{advice}"


def _tidy(text: str) -> str:
    """One printable line of bounded length."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= _LONGEST_QUOTE else line[:_LONGEST_QUOTE] + " ..."
