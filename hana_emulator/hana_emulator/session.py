"""One client connection: translate requests to calls of the SQL side, and outcomes to replies."""

from __future__ import annotations

import logging
import re
import struct
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hana_emulator import cesu8
from hana_emulator.errors import HanaError, authentication_failed, not_supported, syntax_error
from hana_emulator.faults import COMMIT, CONNECT, FETCH, ROLLBACK, Action, Fault, FaultList, FaultRefused
from hana_emulator.line import Line
from hana_emulator.protocol import authentication, lobs, metadata, packet, replies
from hana_emulator.protocol.codes import (
    DataFormat,
    MessageType,
    PartAttribute,
    PartKind,
    ProtocolError,
    ReplyCode,
    TransactionFlag,
)
from hana_emulator.protocol.input import ParameterDecoder, ParameterRow
from hana_emulator.protocol.options import Option, option_part, parse_client_info, parse_options
from hana_emulator.protocol.output import ResultSet
from hana_emulator.protocol.packet import Part, Reply, Request
from hana_emulator.registry import Registry
from hana_emulator.seam import UNKNOWN, FunctionCode, Outcome, SqlConnection, SqlDatabase, Statement

VERSION = "4.00.000.00.1700000000 (emulator)"
_FORMAT_OPTIONS = (23, 12)  # Connect options that carry the client's data format; the first one present wins
_ID = struct.Struct("<q")
_SIZE = struct.Struct("<i")
_SESSION_COMMAND = re.compile(r"\s*ALTER\s+SYSTEM\s+(CANCEL|DISCONNECT)\s+SESSION\s+'(\d{1,18})'[\s;]*", re.IGNORECASE)
# Statements that only this emulator has
_FAULT_COMMAND = re.compile(
    r"\s*ALTER\s+SYSTEM\s+(?:INJECT\s+FAULT\s+'((?:[^']|'')*)'|CLEAR\s+FAULTS)[\s;]*", re.IGNORECASE
)
_log = logging.getLogger(__name__)


class _Dropped(Exception):
    """An injected fault resets the connection without a reply."""


class Host(Protocol):
    @property
    def database(self) -> SqlDatabase: ...

    @property
    def name(self) -> str:
        """The database name that clients see."""
        ...

    @property
    def faults(self) -> FaultList: ...

    def find(self, session_id: int) -> Session | None: ...


@dataclass(slots=True)
class _Prepared:
    statement: Statement
    decoder: ParameterDecoder


@dataclass(slots=True)
class _PendingExecution:
    """An EXECUTE whose LOB parameters are still arriving; it runs after the last piece.

    `batch`: hdbcli adds up the counts of a batch's replies, but reads a single row's count from the last reply.
    node-hdb never marks a batch and concatenates the counts of all replies, except a single -1.
    """

    prepared: _Prepared
    rows: list[ParameterRow]
    autocommit: bool
    batch: bool
    open_lobs: int = 0


@dataclass(slots=True)
class _OpenLob:
    execution: _PendingExecution
    row: int
    column: int
    value: lobs.LobInput


Handler = Callable[["Session", Request], Reply]
_LOGIN = frozenset({MessageType.AUTHENTICATE, MessageType.CONNECT})
_BEFORE_LOGIN = _LOGIN | {MessageType.DBCONNECTINFO, MessageType.DISCONNECT}


def _struck_by(text: str) -> Callable[[Handler], Handler]:
    """Apply faults that match `text` to the handler's requests."""

    def decorate(handler: Handler) -> Handler:
        return lambda session, request: session._struck(text, lambda: handler(session, request))

    return decorate


class Session:
    """Serves a connection with `run`. Other threads may only call `peer_gone`, `cancel` and `disconnect`."""

    _handlers: ClassVar[Registry[int, Handler]] = Registry()

    def __init__(self, line: Line, host: Host) -> None:
        self.id = 0
        self._line = line
        self._host = host
        self._challenge: authentication.Challenge | None = None
        self._connection: SqlConnection | None = None
        self._statements: dict[bytes, _Prepared] = {}
        self._results: dict[bytes, ResultSet] = {}
        self._lobs = lobs.LobStore()
        self._open_lobs: dict[bytes, _OpenLob] = {}
        self._last_id = 0
        self._data_format: int = DataFormat.LATEST
        self._ended = False
        self._pace: Fault | None = None  # Makes the session send the next reply slowly

    # --- life of the connection

    def run(self) -> None:
        """Serve until the client disconnects or violates the protocol, then roll back uncommitted work."""
        try:
            packet.check_handshake(self._line.receive(packet.HANDSHAKE_REQUEST_SIZE))
            self._line.send(packet.HANDSHAKE_REPLY)
            while not self._ended:
                self._serve_request()
        except ProtocolError as error:
            _log.warning("session %d closed: %s", self.id, error)
        except _Dropped:
            self._line.reset_on_close()
        except OSError:
            _log.debug("session %d: the client disconnected", self.id)
        finally:
            self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        for results in self._results.values():
            results.close()
        self._results.clear()
        if connection is not None:
            connection.close()

    def peer_gone(self) -> None:
        """Cancel the running statement and roll back, because the client's socket is closed."""
        self.cancel()

    def cancel(self) -> None:
        self._line.wake()
        if (connection := self._connection) is not None:
            connection.cancel()

    def disconnect(self) -> None:
        """End the connection from the server's side, for an administrator or a shutdown."""
        self.cancel()
        try:
            self._line.cut()
        except OSError:
            _log.debug("session %d was already disconnected", self.id)

    def _serve_request(self) -> None:
        number, length = packet.parse_packet_header(self._line.receive(packet.PACKET_HEADER_SIZE))
        body = self._line.receive(length)
        self._line.begin()
        try:
            reply = self._answer(packet.parse_request(body))
        except ProtocolError as error:
            refusal = replies.error_reply(HanaError(1033, f"error while parsing protocol: {error}"))
            self._line.send(packet.build_reply(self.id, number, refusal))
            raise
        data = packet.build_reply(self.id, number, reply)
        pace, self._pace = self._pace, None
        if pace is None:
            self._line.send(data)
        else:
            self._line.trickle(data, pace.bytes, pace.seconds)

    def _answer(self, request: Request) -> Reply:
        try:
            handler, logged_in = self._handlers.get(request.message_type), self._connection is not None
            if not logged_in and request.message_type not in _BEFORE_LOGIN:
                raise ProtocolError(f"message type {request.message_type} before login")
            if handler is None or (logged_in and request.message_type in _LOGIN):
                raise not_supported(f"message type {request.message_type}")
            part = request.find(PartKind.CLIENTINFO)
            if part is not None and self._connection is not None:
                for name, value in parse_client_info(part).items():
                    self._connection.set_variable(name, value)
            return handler(self, request)
        except (ProtocolError, _Dropped):
            raise
        except HanaError as error:
            if error.rolls_back and self._connection is not None:
                self._connection.rollback()
            return replies.error_reply(error)
        except Exception as error:  # an internal error must not look like a lost connection
            # Log only the error's type and location: its message may contain values.
            frames = traceback.extract_tb(error.__traceback__)
            places = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames[-4:]))
            kind = type(error).__name__
            _log.error("session %d: internal error %s at %s", self.id, kind, places)
            return replies.error_reply(
                HanaError(2, f"general error: internal error of the emulator ({kind} at {places})")
            )

    def _struck(self, text: str, work: Callable[[], Reply]) -> Reply:
        """Run `work`, or apply the fault for a request with this text."""
        fault = self._host.faults.strike(text)
        if fault is None:
            return work()
        match fault.action:
            case Action.ERROR:
                raise fault.error()
            case Action.DROP_BEFORE | Action.REFUSE:
                raise _Dropped
            case Action.DROP_AFTER:
                with suppress(HanaError):
                    work()
                raise _Dropped
            case Action.DELAY:
                if self._line.pause(fault.seconds):
                    raise HanaError(139, "current operation cancelled by request and transaction rolled back")
            case Action.SLOW:
                self._pace = fault
        return work()

    # --- login

    @_handlers(MessageType.AUTHENTICATE)
    def _authenticate(self, request: Request) -> Reply:
        self._challenge = authentication.begin(request.part(PartKind.AUTHENTICATION).data)
        if self._challenge is None:
            raise authentication_failed()
        return Reply(ReplyCode.NIL, (Part(PartKind.AUTHENTICATION, self._challenge.reply()),))

    @_handlers(MessageType.CONNECT)
    @_struck_by(CONNECT)
    def _log_in(self, request: Request) -> Reply:
        challenge, self._challenge = self._challenge, None
        if challenge is None:
            raise ProtocolError("CONNECT without AUTHENTICATE")
        database = self._host.database
        # hdbcli sends the name as typed; HANA upper-cases it unless it is quoted.
        user = (
            challenge.user[1:-1].replace('""', '"')
            if len(challenge.user) > 2 and challenge.user[0] == challenge.user[-1] == '"'
            else challenge.user.upper()
        )
        proof = challenge.verify(request.part(PartKind.AUTHENTICATION).data, database.password(user))
        database.admit(user, proven=proof is not None)
        if proof is None:
            raise authentication_failed()
        self._data_format = _data_format(request.find(PartKind.CONNECTOPTIONS))
        self._connection = database.connect(user)
        self.id = self._connection.connection_id
        # Send few options and do not echo the client's. 49 (compression) and 53 (features) are 0 to reject both; if
        # they were absent, node-hdb would use its own flags.
        options: dict[int, Option] = {
            1: self.id,
            11: self._host.name,
            23: self._data_format,
            44: VERSION,
            45: self._host.name,
            49: 0,
            53: 0,
        }
        return Reply(
            ReplyCode.CONNECT, (Part(PartKind.AUTHENTICATION, proof), option_part(PartKind.CONNECTOPTIONS, options))
        )

    @_handlers(MessageType.DBCONNECTINFO)
    def _database_info(self, _request: Request) -> Reply:
        already_here = option_part(PartKind.DBCONNECTINFO, {4: True})
        return Reply(ReplyCode.NIL, (already_here,))

    @_handlers(MessageType.DISCONNECT)
    def _disconnect(self, _request: Request) -> Reply:
        self._ended = True
        return Reply(ReplyCode.DISCONNECT)

    # --- statements

    @property
    def _sql(self) -> SqlConnection:
        if self._connection is None:
            raise ProtocolError("not logged in")
        return self._connection

    def _new_id(self) -> bytes:
        self._last_id += 1
        return _ID.pack(self._last_id)

    @_handlers(MessageType.EXECUTEDIRECT)
    def _execute_direct(self, request: Request) -> Reply:
        return self._run(self._statement_of(_command(request)), [()], request.autocommit, describe=True)

    def _statement_of(self, sql: str) -> Statement:
        if _SESSION_COMMAND.fullmatch(sql) or _FAULT_COMMAND.fullmatch(sql):
            return Statement(sql, FunctionCode.DDL)
        return self._sql.prepare(sql)

    def _own_command(self, sql: str) -> Reply | None:
        """Run a session or fault command; return None for any other statement."""
        if command := _SESSION_COMMAND.fullmatch(sql):
            verb = command[1].upper()
            session_id = int(command[2])
            session = self._host.find(session_id)
            if session is None:
                raise HanaError(2, f"general error: unknown session {session_id}")
            self._sql.require_control_of(session_id)
            if verb == "CANCEL":
                session.cancel()
            else:
                session.disconnect()
            return Reply(FunctionCode.DDL)
        if command := _FAULT_COMMAND.fullmatch(sql):
            document = command[1]
            if document is None:
                self._host.faults.clear()
                return Reply(FunctionCode.DDL)
            try:
                self._host.faults.add(Fault.parse(document.replace("''", "'")))
            except FaultRefused as error:
                raise syntax_error(f"ALTER SYSTEM INJECT FAULT: {error}") from None
            return Reply(FunctionCode.DDL)
        return None

    @_handlers(MessageType.PREPARE)
    def _prepare(self, request: Request) -> Reply:
        statement = self._statement_of(_command(request))
        statement_id = self._new_id()
        self._statements[statement_id] = _Prepared(statement, ParameterDecoder(statement.parameters))
        described = metadata.parameter_metadata(statement.parameters, self._data_format)  # even if empty, for node-hdb
        parts = [Part(PartKind.STATEMENTID, statement_id), described]
        if statement.columns:
            parts.append(metadata.result_metadata(statement.columns, self._data_format))
        return Reply(statement.function, tuple(parts))

    @_handlers(MessageType.EXECUTE)
    def _execute(self, request: Request) -> Reply:
        prepared = self._statements.get(request.part(PartKind.STATEMENTID).data)
        if prepared is None:
            raise HanaError(2, "general error: statement id is unknown")
        parameters = request.find(PartKind.PARAMETERS)
        rows: list[Any] = [()] if parameters is None else prepared.decoder.rows(parameters.data, parameters.count)
        if not (bool(rows) and any(isinstance(value, lobs.LobInput) for value in rows[-1])):
            return self._run(prepared.statement, rows, request.autocommit, describe=False, batch=len(rows) > 1)
        batch = parameters is not None and parameters.attributes != PartAttribute.NONE
        execution = _PendingExecution(prepared, rows, request.autocommit, batch)
        locators = []
        for row_number, row in enumerate(execution.rows):
            for column, value in enumerate(row):
                if isinstance(value, lobs.LobInput):
                    locators.append(self._lobs.new_locator())
                    self._open_lobs[locators[-1]] = _OpenLob(execution, row_number, column, value)
        execution.open_lobs = len(locators)
        function = execution.prepared.statement.function
        expected = [1] * len(rows) if batch else [1] * (len(rows) - 1) or [UNKNOWN]  # the statement has not run yet
        counts = replies.rows_affected(expected)
        return Reply(function, (counts, lobs.write_reply(locators), replies.transaction_flags()))

    def _run(
        self, statement: Statement, rows: list[Any], autocommit: bool, *, describe: bool, batch: bool = False
    ) -> Reply:
        if (done := self._own_command(statement.sql)) is not None:
            return done

        def run() -> Reply:
            # A batch keeps its valid rows: hdbcli sends the same bytes with and without `batcherrors`.
            in_transaction = self._sql.in_transaction
            outcome = self._sql.execute(statement, rows, autocommit=autocommit, batch=batch)
            if statement.columns:
                return self._result(statement, outcome, describe=describe or outcome.columns is not None)
            if outcome.errors:
                flags = self._flags(statement, in_transaction, autocommit)
                return replies.batch_error_reply(outcome.errors, outcome.rows_affected, flags)
            parts = []
            if statement.function is not FunctionCode.DDL:
                parts.append(replies.rows_affected(outcome.rows_affected))
            parts.append(self._flags(statement, in_transaction, autocommit))
            return Reply(statement.function, tuple(parts))

        return self._struck(statement.sql, run)

    def _flags(self, statement: Statement, was_in_transaction: bool, autocommit: bool) -> Part:
        if autocommit or statement.function is FunctionCode.DDL:
            return replies.transaction_flags(TransactionFlag.COMMITTED)
        if self._sql.in_transaction and not was_in_transaction:
            return replies.transaction_flags(TransactionFlag.WRITE_STARTED)
        return replies.transaction_flags()

    def _result(self, statement: Statement, outcome: Outcome, *, describe: bool) -> Reply:
        columns = statement.columns if outcome.columns is None else outcome.columns
        results = ResultSet(outcome.rows or iter(()), columns, self._lobs, self._data_format)
        result_id = self._new_id()
        page = replies.result_page(results, replies.FIRST_PAGE, first=True)
        if not results.exhausted:
            self._results[result_id] = results
        parts = [Part(PartKind.RESULTSETID, result_id), page]
        if describe:
            parts.insert(0, metadata.result_metadata(columns, self._data_format))
        return Reply(statement.function, tuple(parts))

    @_handlers(MessageType.FETCHNEXT)
    @_struck_by(FETCH)
    def _next_page(self, request: Request) -> Reply:
        result_id = request.part(PartKind.RESULTSETID).data
        results = self._results.get(result_id)
        if results is None:
            raise HanaError(2, "general error: result set is unknown or closed")
        size = request.find(PartKind.FETCHSIZE)
        wanted = replies.NEXT_PAGE if size is None or len(size.data) < _SIZE.size else _SIZE.unpack_from(size.data)[0]
        page = replies.result_page(results, max(1, wanted), first=False)
        if results.exhausted:
            del self._results[result_id]
        return Reply(ReplyCode.FETCH, (page,))

    @_handlers(MessageType.CLOSERESULTSET)
    def _close_result(self, request: Request) -> Reply:
        results = self._results.pop(request.part(PartKind.RESULTSETID).data, None)
        if results is not None:
            results.close()
        return Reply(ReplyCode.CLOSECURSOR)

    @_handlers(MessageType.DROPSTATEMENTID)
    def _drop_statement(self, request: Request) -> Reply:
        self._statements.pop(request.part(PartKind.STATEMENTID).data, None)
        return Reply(ReplyCode.NIL)

    # --- LOBs

    @_handlers(MessageType.READLOB, MessageType.WRITELOB)
    def _lob(self, request: Request) -> Reply:
        """Dispatch by part, because clients use different message types."""
        if (part := request.find(PartKind.READLOBREQUEST)) is not None:
            return Reply(ReplyCode.READLOB, (self._lobs.read(part),))
        outcome: list[Part] = []
        for locator, data, last in lobs.parse_write_request(request.part(PartKind.WRITELOBREQUEST)):
            lob = self._open_lobs.get(locator)
            if lob is None:
                raise HanaError(2, "general error: LOB locator is unknown or closed by transaction end")
            lob.value.data += data
            if not last:
                continue
            del self._open_lobs[locator]
            execution, statement = lob.execution, lob.execution.prepared.statement
            execution.rows[lob.row][lob.column] = execution.prepared.decoder.lob_value(lob.column, lob.value)
            execution.open_lobs -= 1
            if execution.open_lobs:
                continue
            if statement.columns:
                raise not_supported("a query with a LOB parameter longer than one packet")
            parts = self._run(statement, execution.rows, execution.autocommit, describe=False).parts
            outcome += () if execution.batch else replies.counts_of_last_row(parts)
            outcome += [part for part in parts if part.kind != PartKind.ROWSAFFECTED]
        return Reply(ReplyCode.WRITELOB, (lobs.write_reply(list(self._open_lobs)), *outcome))

    @_handlers(MessageType.FINDLOB)
    def _find_in_lob(self, request: Request) -> Reply:
        return Reply(ReplyCode.READLOB, (self._lobs.find(request.part(PartKind.FINDLOBREQUEST)),))

    # --- transactions

    @_handlers(MessageType.COMMIT)
    @_struck_by(COMMIT)
    def _commit(self, _request: Request) -> Reply:
        self._open_lobs.clear()
        self._sql.commit()
        return Reply(ReplyCode.COMMIT, (replies.transaction_flags(TransactionFlag.COMMITTED),))

    @_handlers(MessageType.ROLLBACK)
    @_struck_by(ROLLBACK)
    def _rollback(self, _request: Request) -> Reply:
        self._open_lobs.clear()
        self._sql.rollback()
        return Reply(ReplyCode.ROLLBACK, (replies.transaction_flags(TransactionFlag.ROLLED_BACK),))


def _data_format(connect_options: Part | None) -> int:
    """Return the client's data format, or the latest if the client names none."""
    options = {} if connect_options is None else parse_options(connect_options)
    named = (options.get(key) for key in _FORMAT_OPTIONS)
    return min(next((value for value in named if isinstance(value, int)), DataFormat.LATEST), DataFormat.LATEST)


def _command(request: Request) -> str:
    try:
        return cesu8.decode(request.part(PartKind.COMMAND).data)
    except UnicodeDecodeError:
        raise ProtocolError("statement text is not CESU-8") from None
