"""Everything that can go wrong on the HANA side, as one tree, and the table from HANA's error codes to it.

HANA's driver chooses an exception class by its own rules, which say almost nothing; only the code counts.

ConnectorError
├── ConfigurationError          what the operator wrote cannot work: exit 2
│   ├── UnknownTable            259, 362, 397 or not in the catalogue
│   ├── UnknownColumn           260
│   ├── NoKey                   a view or table without a primary key, and no `key` given
│   ├── BadFilter               a search filter that is not of the filter language
│   ├── ModelMismatch           the collection holds vectors of another model or dimension
│   └── UnknownCollection
├── DatabaseError               HANA or the store said no; carries `code`: exit 3
│   ├── ConnectionLost          the session is gone, its transaction too                       (retryable)
│   ├── Unavailable             down for maintenance or starting: wait minutes                 (retryable)
│   ├── ConnectionMisconfigured certificate, HTTP endpoint, missing key store entry
│   ├── LoginRefused            10 and its kin; tried exactly once, because HANA locks users
│   ├── PermissionRefused       258
│   ├── TransactionRolledBack   131, 133, 138 ...: run the whole transaction again             (retryable)
│   ├── Overloaded              out of memory, statement limits: less at a time                (retryable)
│   ├── SchemaChanged           the table or a column went away while we were reading
│   ├── Cancelled               139 after our own cancel
│   └── StatementFailed         any other code: a defect or a feature that is missing
├── RowRejected                 one row cannot be processed; the others go on (quarantine)
├── TextsNotEmbeddable          the engine could not make finite vectors of some texts
├── StoreCorrupt                the local store's file cannot be trusted
├── LeaseLost                   another worker owns the collection now; nothing was written
└── SyncPaused                  something looks wrong enough that a person should look first
"""

from __future__ import annotations

from collections.abc import Sequence


class ConnectorError(Exception):
    """Root of the tree. `retryable`: the same call may succeed later without anybody changing anything."""

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


class UnknownCollection(ConfigurationError):
    pass


class DatabaseError(ConnectorError):
    """`code` is HANA's (positive) or the driver's (negative) error code; 0 when there is none."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class ConnectionLost(DatabaseError):
    retryable = True


class Unavailable(DatabaseError):
    retryable = True


class ConnectionMisconfigured(DatabaseError):
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
    """The database or a conversion refused this row's data. `code` as in DatabaseError. Holds no row data."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class TextsNotEmbeddable(ConnectorError):
    """`indices`: positions, in the list given to the embedder, of the texts without a finite vector."""

    def __init__(self, message: str, *, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.indices = tuple(indices)


class StoreCorrupt(ConnectorError):
    pass


class LeaseLost(ConnectorError):
    pass


class SyncPaused(ConnectorError):
    """`reason` is a short word for machines (`max_deletes`, `schema_changed`), the message is for people."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
