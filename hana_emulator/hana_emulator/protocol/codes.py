"""Numbers of SAP's SQL command network protocol that the emulator uses, and the error for invalid packets."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class ProtocolError(Exception):
    """The peer sent an invalid request; the connection must end."""


class MessageType(IntEnum):
    """Types of request segments. READLOB and WRITELOB are numbered as in hdbcli; go-hdb swaps them."""

    EXECUTEDIRECT = 2
    PREPARE = 3
    EXECUTE = 13
    READLOB = 16
    WRITELOB = 17
    FINDLOB = 18
    AUTHENTICATE = 65
    CONNECT = 66
    COMMIT = 67
    ROLLBACK = 68
    CLOSERESULTSET = 69
    DROPSTATEMENTID = 70
    FETCHNEXT = 71
    DISCONNECT = 77
    DBCONNECTINFO = 82


class DataFormat(IntEnum):
    """Data format versions that add types; a client sends its version in the connect options.

    Source: go-hdb, `driver/internal/protocol/dfv.go` and `driver/internal/types/types.go`.
    """

    DATES = 3
    BOOLEAN = 7
    FIXED = 8
    LATEST = 10


class FirstFormatCode(IntEnum):
    """Type codes of dates and times below `DataFormat.DATES`."""

    DATE = 14
    TIME = 15
    TIMESTAMP = 16


class ReplyCode(IntEnum):
    """Function codes of replies that belong to no SQL statement; for statements see `seam.FunctionCode`."""

    NIL = 0
    FETCH = 10
    COMMIT = 11
    ROLLBACK = 12
    CONNECT = 14
    WRITELOB = 15
    READLOB = 16
    DISCONNECT = 18
    CLOSECURSOR = 19


class PartKind(IntEnum):
    COMMAND = 3
    RESULTSET = 5
    ERROR = 6
    STATEMENTID = 10
    ROWSAFFECTED = 12
    RESULTSETID = 13
    READLOBREQUEST = 17
    READLOBREPLY = 18
    WRITELOBREQUEST = 28
    WRITELOBREPLY = 30
    PARAMETERS = 32
    AUTHENTICATION = 33
    CONNECTOPTIONS = 42
    FETCHSIZE = 45
    PARAMETERMETADATA = 47
    RESULTSETMETADATA = 48
    FINDLOBREQUEST = 49
    FINDLOBREPLY = 50
    CLIENTINFO = 57
    TRANSACTIONFLAGS = 64
    DBCONNECTINFO = 67


class PartAttribute(IntFlag):
    NONE = 0
    LAST = 1
    NEXT = 2
    FIRST = 4
    ROW_NOT_FOUND = 8
    CLOSED = 16


class LobOption(IntFlag):
    NULL = 1
    DATA = 2
    LAST = 4


class TransactionFlag(IntEnum):
    """Keys of the TRANSACTIONFLAGS part."""

    ROLLED_BACK = 0
    COMMITTED = 1
    WRITE_STARTED = 4
