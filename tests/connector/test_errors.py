"""The error tree and the table from HANA's codes to it."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector import errors
from connector.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectorError,
    DatabaseError,
    GenerationChanged,
    LoginRefused,
    Overloaded,
    PermissionRefused,
    RowRejected,
    StatementFailed,
    TransactionRolledBack,
    Unavailable,
    UnknownColumn,
    UnknownTable,
    Unreachable,
    classify,
    rules,
)

CLASSES = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, ConnectorError) and member is not ConnectorError
]

# The driver's own texts below were recorded from hdbcli 2.30.27; the server's are those of the documentation.
TABLE = [
    (301, "unique constraint violated: Table(T), 'secret'", RowRejected),
    (461, "foreign key constraint violation", RowRejected),
    (274, "inserted value too large for column: 'secret'", RowRejected),
    (287, "cannot insert NULL or update to NULL: C", RowRejected),
    (303, "invalid DATE, TIME or TIMESTAMP value", RowRejected),
    (304, "division by zero undefined", RowRejected),
    (314, "numeric overflow", RowRejected),
    (339, "invalid number: 'secret'", RowRejected),
    (677, "check constraint violation", RowRejected),
    (-10404, "Invalid value for parameter", RowRejected),
    (-10427, "Conversion of parameter failed", RowRejected),
    (-10411, "Illegal DATE value for parameter/column (1:\"D\"): 'Geheim'", RowRejected),
    (0, "Invalid parameter [1], expected a vector of length 3", RowRejected),
    (0, "Invalid parameter [1], improper vector format", RowRejected),
    (0, "Provided string was not a valid unicode string", RowRejected),
    (0, "Value is too large to be represented by a 64-bit integer", RowRejected),
    (0, "Invalid parameter [1]", RowRejected),
    (
        -10709,
        "Connection failed (RTE:[300015] SSL certificate validation failed: Hostname 'localhost' does not match "
        "names in certificate: 'wrong', 'wrong' (127.0.0.1:1 -> localhost:2))",
        ConnectFailed,
    ),
    (
        -10709,
        "Connection failed (RTE:[300015] SSL certificate validation failed: error code: 167772294, "
        "certificate verify failed\n (127.0.0.1:1 -> localhost:2))",
        ConnectFailed,
    ),
    (
        -10709,
        "Connection failed (RTE:[300012] Cannot create SSL engine: Received invalid SSL Record Header (a -> b))",
        ConnectFailed,
    ),
    (
        -10709,
        "Connection failed (RTE:[200121] Invalid connect reply (received HTTP response, not SAP HANA): HTTP 400 (a))",
        ConnectFailed,
    ),
    (
        -10709,
        "Connection failed (RTE:[200110] Invalid connect reply (server may not be SAP HANA) (a -> b))",
        ConnectFailed,
    ),
    (
        -10709,
        "Connection failed (RTE:[300005] SAP crypto lib is not available: Exception caught (a -> b))",
        ConnectFailed,
    ),
    (
        -10709,
        "Connection failed (RTE:[89001] Cannot resolve host name 'nowhere.invalid' rc=-2 (nowhere.invalid:443))",
        Unreachable,
    ),
    (
        -10709,
        "Connection failed (RTE:[89006] System call 'connect' failed, rc=111:Connection refused {127.0.0.1:1})",
        Unreachable,
    ),
    (-10709, "Connect failed (connect timeout expired) (127.0.0.1:1 -> 127.0.0.1:2)", Unreachable),
    (-10709, "Connection failed (RTE:[89013] Socket closed by peer {a -> b})", Unreachable),
    (-10719, "Connect failed (invalid SERVERNODE '127.0.0.1;encrypt=true:41167')", ConnectFailed),
    (-10104, 'Invalid value for KEY "NOPE", directory search path: /home/me/.hdb/box', ConnectFailed),
    (10, "authentication failed", LoginRefused),
    (414, "user is forced to change password", LoginRefused),
    (415, "user is deactivated", LoginRefused),
    (416, "user is locked", LoginRefused),
    (258, "insufficient privilege: not authorized", PermissionRefused),
    (259, "invalid table name: Could not find table/view NOPE", UnknownTable),
    (260, "invalid column name: NOPE", UnknownColumn),
    (362, "invalid schema name: NOPE", UnknownTable),
    (391, "invalidated view: V", UnknownTable),
    (397, "invalid object name: NOPE", UnknownTable),
    (257, 'sql syntax error: incorrect syntax near "SELEC"', StatementFailed),
    (7, "feature not supported", StatementFailed),
    (663, "rejected: GBA503 Service is unavailable", Unavailable),
    (663, "rejected: not found", StatementFailed),
    (129, "transaction rolled back by an internal error: exceed max number of SqlExecutor threads", Overloaded),
    (2048, "column store error: search table error: [9] Memory allocation failed", Overloaded),
    (-10807, "Connection down: receive timeout", ConnectionLost),
    (-10108, "Session has been reconnected", ConnectionLost),
    (-10735, "wrong replication role", ConnectionLost),
    (18, "service is shutting down", ConnectionLost),
    (597, "session context error", ConnectionLost),
    (0, "Connection closed", ConnectionLost),
    (1888, "instance is not reachable", Unavailable),
    (131, "transaction rolled back by lock wait timeout", TransactionRolledBack),
    (133, "transaction rolled back by detected deadlock", TransactionRolledBack),
    (138, "transaction serialization failure", TransactionRolledBack),
    (143, "sequence is being altered", TransactionRolledBack),
    (146, "resource busy and NOWAIT specified", TransactionRolledBack),
    (129, "transaction rolled back by an internal error", TransactionRolledBack),
    (145, "transaction rolled back", TransactionRolledBack),
    (149, "transaction rolled back: two-phase commit", TransactionRolledBack),
    (139, "current operation cancelled by request", TransactionRolledBack),
    (4, "cannot allocate enough memory", Overloaded),
    (142, "exceed maximum number of transactions", Overloaded),
    (613, "execution aborted by timeout", Overloaded),
    (-9999, "we are in a maintenance window", Unavailable),
    (2, "general error: instance upgrade in progress", Unavailable),
    (2, "general error: instance resize in progress", Unavailable),
    (2, "TransactionManager is not yet fully initialized", Unavailable),
    (2, "OutOfMemory exception", Overloaded),
    (2, "sequence cache lock", TransactionRolledBack),
    (2048, "DTX commit failed", TransactionRolledBack),
    (2048, "An error occurred while opening/reading the channel", TransactionRolledBack),
    (2048, "Exception in executor plan", TransactionRolledBack),
    (2048, "temp index not exists", TransactionRolledBack),
    (2, "writable statement not allowed in read-enabled replication", StatementFailed),
    (2, "general error", StatementFailed),
    (12345, "", StatementFailed),
]


@pytest.mark.parametrize(("code", "text", "expected"), TABLE)
def test_every_row_of_the_table(code, text, expected):
    error = classify(code, text, doing="reading S.T")
    assert type(error) is expected
    assert str(error).startswith("reading S.T: ")
    assert f"code {code}" in str(error)
    assert error.code == code


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, text, kind in TABLE if kind is LoginRefused])
def test_a_refused_login_says_that_a_running_service_must_be_restarted(code, text):
    assert "restart a running service" in str(classify(code, text, doing="connecting"))


def test_every_rule_is_reached_by_the_examples():
    messages = [str(classify(code, text, doing="d")) for code, text, _ in TABLE]
    assert [rule for rule in rules() if not any(f"d: {rule['meaning']} (" in message for message in messages)] == []


def test_text_fragments_are_lower_case():
    assert all(text == text.lower() for rule in rules() for text in rule.get("texts", ()))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("RTE:[89001] Cannot resolve host name 'x'", ["`host`"]),
        ("rc=111:Connection refused", ["`host`", "`port`"]),
        ("connect timeout expired", ["`connect_timeout`", "`host`"]),
        ("RTE:[300015] Hostname 'x' does not match names in certificate: 'y'", ["`host_name_in_certificate`"]),
        ("RTE:[300015] certificate verify failed", ["`trust_store`"]),
        ("RTE:[300012] Cannot create SSL engine", ["`encrypt`", "`port`"]),
        ("RTE:[200121] received HTTP response", ["`host`", "`port`"]),
    ],
)
def test_a_failed_connect_names_the_setting_that_decides(text, settings):
    message = str(classify(-10709, text, doing="connecting to h:1"))
    for setting in settings:
        assert setting in message


@pytest.mark.parametrize("code", [301, 461, 274, 287, 303, 304, 314, 339, -10404, -10427, 2, 2048, 131, 12345])
def test_texts_that_may_hold_row_data_are_not_shown(code):
    assert "Geheim" not in str(classify(code, "failed for value 'Geheim'", doing="writing"))


def test_row_data_cannot_pass_for_maintenance():
    error = classify(301, "unique constraint violated: 'maintenance window'", doing="writing")
    assert isinstance(error, RowRejected)
    assert not error.retryable


def test_safe_texts_are_shown_on_one_bounded_line():
    message = str(classify(259, "invalid table name:\n\x00 " + "X" * 1000, doing="reading"))
    assert "invalid table name: XXX" in message
    assert "\n" not in message
    assert "\x00" not in message
    assert len(message) < 500


@given(st.integers(-(2**31), 2**31 - 1), st.text(), st.text())
def test_classify_is_total(code, text, doing):
    error = classify(code, text, doing=doing)
    assert isinstance(error, ConnectorError)
    assert f"code {code}" in str(error)


def test_what_is_retryable():
    retryable = {error for error in CLASSES if error.retryable}
    assert retryable == {
        ConnectionLost,
        Unavailable,
        Unreachable,
        TransactionRolledBack,
        Overloaded,
        GenerationChanged,
    }


def test_database_errors_carry_their_code():
    assert all(cls("m", code=5).code == 5 for cls in CLASSES if issubclass(cls, DatabaseError))
