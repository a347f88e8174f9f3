"""The listener: loopback only, many clients, dead sockets, a clean end. Clients are our own (see `wire_client`)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from emulator_wire import ScriptedConnection, ScriptedDatabase, WireClient
from hana_emulator.errors import HanaError
from hana_emulator.seam import FunctionCode, Outcome, Statement
from hana_emulator.server import BindRefused, Server, check_loopback


def wait_for_cancel(connection: ScriptedConnection, _rows: object) -> Outcome:
    assert connection.cancelled.wait(10), "never cancelled"
    raise HanaError(139, "current operation cancelled by request and transaction rolled back")


@pytest.fixture
def database() -> ScriptedDatabase:
    database = ScriptedDatabase()
    database.add(Statement("DDL", FunctionCode.DDL), lambda *_: Outcome())
    database.add(Statement("WAIT", FunctionCode.UPDATE), wait_for_cancel)
    return database


@pytest.fixture
def server(database: ScriptedDatabase) -> Iterator[Server]:
    server = Server(database)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def connect(server: Server) -> WireClient:
    client = WireClient(socket.create_connection(server.address, timeout=10))
    client.login()
    return client


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "192.168.1.1"])
def test_other_than_loopback_is_refused(host: str) -> None:
    with pytest.raises(BindRefused, match=r"127\.0\.0\.1"):
        check_loopback(host)
    with pytest.raises(BindRefused):
        Server(ScriptedDatabase(), host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_accepted(host: str) -> None:
    check_loopback(host)


def test_clients_have_sessions_of_their_own(server: Server, database: ScriptedDatabase) -> None:
    clients = [connect(server) for _ in range(20)]
    assert len({client.session_id for client in clients}) == 20
    for client in clients:
        assert client.execute("DDL").session_id == client.session_id
    clients[0].socket.close()
    assert database.connections[0].closed.wait(5)
    assert clients[1].execute("DDL").function_code == 1
    for client in clients[1:]:
        client.socket.close()


def test_a_broken_client_harms_nobody(server: Server) -> None:
    good = connect(server)
    for rubbish in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096):
        with socket.create_connection(server.address) as bad:
            bad.sendall(rubbish)
    with connect(server).socket as bad:
        bad.sendall(bytes(1000))
    assert good.execute("DDL").function_code == 1
    good.socket.close()


def test_a_statement_is_cancelled_when_its_client_dies(server: Server, database: ScriptedDatabase) -> None:
    """The session's thread is busy and does not read its socket, so somebody else must notice."""
    client = connect(server)
    client.send(2, (3, 1, b"WAIT"))
    client.socket.close()
    assert database.connections[0].cancelled.wait(5)
    assert database.connections[0].closed.wait(5)


def test_cancel_from_a_second_connection(server: Server) -> None:
    first, second = connect(server), connect(server)
    first.send(2, (3, 1, b"WAIT"))
    assert second.execute(f"ALTER SYSTEM CANCEL SESSION '{first.session_id}'").kind == 2
    assert first.answer().error()[0] == 139
    assert first.execute("DDL").function_code == 1
    first.socket.close()
    second.socket.close()


def test_disconnect_from_a_second_connection(server: Server, database: ScriptedDatabase) -> None:
    first, second = connect(server), connect(server)
    assert second.execute(f"ALTER SYSTEM DISCONNECT SESSION '{first.session_id}'").kind == 2
    with pytest.raises(EOFError):
        first.read(1)
    assert database.connections[0].closed.wait(5)
    first.socket.close()
    second.socket.close()


def test_stop_ends_busy_and_idle_sessions(database: ScriptedDatabase) -> None:
    server = Server(database)
    thread = threading.Thread(target=server.serve)
    thread.start()
    idle, busy = connect(server), connect(server)
    busy.send(2, (3, 1, b"WAIT"))
    time.sleep(0.1)
    server.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert all(connection.closed.is_set() for connection in database.connections)
    with pytest.raises((EOFError, ConnectionResetError)):
        idle.read(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, timeout=5)
    server.stop()  # harmless a second time
    idle.socket.close()
    busy.socket.close()
