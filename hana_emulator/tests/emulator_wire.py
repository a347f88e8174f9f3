"""A tiny client of the protocol, from its description and not from the codec under test; and a scripted database."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hana_emulator.errors import HanaError
from hana_emulator.faults import FaultList
from hana_emulator.line import Line
from hana_emulator.seam import FunctionCode, Outcome, Statement, Storage
from hana_emulator.session import Session

USER, PASSWORD = "OWL", "sEcret-1"
HANDSHAKE = bytes.fromhex("ffffffff 0400140400 0100 01 0101")
Parts = Sequence[tuple[int, int, bytes]]
"""(kind, argument count, data)."""


@dataclass
class Answer:
    session_id: int
    packet_count: int
    kind: int
    function_code: int
    parts: list[tuple[int, int, int, bytes]]
    """(kind, attributes, argument count, data)."""

    def part(self, kind: int) -> bytes:
        return next(data for k, _a, _n, data in self.parts if k == kind)

    def attributes(self, kind: int) -> int:
        return next(a for k, a, _n, _data in self.parts if k == kind)

    def count(self, kind: int) -> int:
        return next(n for k, _a, n, _data in self.parts if k == kind)

    def kinds(self) -> list[int]:
        return [k for k, _a, _n, _d in self.parts]

    def flags(self) -> set[int]:
        """Keys of the transaction flags part; every value must be BOOLEAN true."""
        data, count = self.part(64), self.count(64)
        assert all(data[3 * i + 1 : 3 * i + 3] == b"\x1c\x01" for i in range(count))
        return {data[3 * i] for i in range(count)}

    def error(self) -> tuple[int, str]:
        assert self.kind == 5, f"no error but {self.kinds()}"
        data = self.part(6)
        code, _position, length = struct.unpack_from("<iii", data)
        return code, data[18 : 18 + length].decode()


def request_packet(message: int, parts: Parts, *, session_id: int = 0, commit: int = 0, count: int = 7) -> bytes:
    body = b""
    for kind, arguments, data in parts:
        small, big = (arguments, 0) if arguments <= 32767 else (-1, arguments)
        body += struct.pack("<bbhiii", kind, 0, small, big, len(data), 1 << 20) + data + bytes(-len(data) % 8)
    length = 24 + len(body)
    segment = struct.pack("<iihhbbbB8x", length, 0, len(parts), 1, 1, message, commit, 8)
    return struct.pack("<qiIIhBxI4x", session_id, count, length, 1 << 20, 1, 0, 0) + segment + body


def parse_answer(packet: bytes) -> Answer:
    session_id, count, length, _size, segments = struct.unpack_from("<qiIIh", packet)
    assert length == len(packet) - 32
    assert segments == 1
    segment_length, _offset, part_count, number, kind = struct.unpack_from("<iihhb", packet, 32)
    assert (segment_length, number) == (length, 1)
    (function_code,) = struct.unpack_from("<h", packet, 46)
    parts, position = [], 56
    for _ in range(part_count):
        part_kind, attributes, small, big, size, _ = struct.unpack_from("<bbhiii", packet, position)
        position += 16
        data = packet[position : position + size]
        parts.append((part_kind, attributes, big if small == -1 else small, data))
        position += size + -size % 8
    assert position == len(packet)
    return Answer(session_id, count, kind, function_code, parts)


def fields(*items: bytes) -> bytes:
    """An authentication field list of items up to 245 bytes."""
    return struct.pack("<H", len(items)) + b"".join(bytes([len(item)]) + item for item in items)


def split_fields(data: bytes) -> list[bytes]:
    (count,), position, items = struct.unpack_from("<H", data), 2, []
    for _ in range(count):
        size = data[position]
        items.append(data[position + 1 : position + 1 + size])
        position += 1 + size
    assert position == len(data)
    return items


@dataclass
class Proof:
    """The client's half of SCRAM, from the description of the method."""

    password: str
    challenge: bytes = bytes(range(64))

    def salted(self, salt: bytes, iterations: int | None) -> bytes:
        if iterations is None:
            return hmac.digest(self.password.encode(), salt, "sha256")
        return hashlib.pbkdf2_hmac("sha256", self.password.encode(), salt, iterations, 32)

    def client(self, salted: bytes, salt: bytes, nonce: bytes) -> bytes:
        key = hashlib.sha256(salted).digest()
        signature = hmac.digest(hashlib.sha256(key).digest(), salt + nonce + self.challenge, "sha256")
        return bytes(a ^ b for a, b in zip(key, signature, strict=True))

    def server(self, salted: bytes, salt: bytes, nonce: bytes) -> bytes:
        return hmac.digest(hmac.digest(salted, salt, "sha256"), self.challenge + salt + nonce, "sha256")


class WireClient:
    """Speaks over any connected socket; `login` first."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.session_id = 0
        sock.settimeout(10)

    def handshake(self) -> bytes:
        self.socket.sendall(HANDSHAKE)
        return self.read(8)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def answer(self) -> Answer:
        header = self.read(32)
        return parse_answer(header + self.read(struct.unpack_from("<I", header, 12)[0]))

    def send(self, message: int, *parts: tuple[int, int, bytes], commit: int = 0) -> None:
        self.socket.sendall(request_packet(message, parts, session_id=self.session_id, commit=commit))

    def ask(self, message: int, *parts: tuple[int, int, bytes], commit: int = 0) -> Answer:
        self.send(message, *parts, commit=commit)
        return self.answer()

    def login(
        self,
        user: str = USER,
        password: str = PASSWORD,
        methods: Sequence[bytes] = (b"SCRAMPBKDF2SHA256", b"SCRAMSHA256"),
        options: tuple[int, int, bytes] = (42, 0, b""),
    ) -> Answer:
        """Handshake and login; leaves the server's proof to the caller, in the answer."""
        self.handshake()
        proof = Proof(password)
        offered = [item for method in methods for item in (method, proof.challenge)]
        reply = self.ask(65, (33, 1, fields(user.encode(), *offered)))
        if reply.kind == 5:
            return reply
        assert reply.session_id == 0
        method, inner = split_fields(reply.part(33))
        salt, nonce, *rest = split_fields(inner)
        salted = proof.salted(salt, int.from_bytes(rest[0], "big") if rest else None)
        client_proof = fields(proof.client(salted, salt, nonce))
        answer = self.ask(66, (33, 1, fields(user.encode(), method, client_proof)), options)
        self.session_id = answer.session_id
        self.expected_server_proof = proof.server(salted, salt, nonce)
        return answer

    def execute(self, sql: str, commit: int = 0) -> Answer:
        return self.ask(2, (3, 1, sql.encode()), commit=commit)

    def prepare(self, sql: str) -> tuple[bytes, Answer]:
        answer = self.ask(3, (3, 1, sql.encode()))
        return answer.part(10), answer


Action = Callable[["ScriptedConnection", Sequence[Sequence[Storage]]], Outcome]


@dataclass
class ScriptedConnection:
    """Executes by looking the statement up; keeps what it was asked to do in `calls`."""

    database: ScriptedDatabase
    connection_id: int
    in_transaction: bool = False
    calls: list[Any] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def prepare(self, sql: str) -> Statement:
        if sql not in self.database.script:
            raise HanaError(257, "sql syntax error: unscripted", position=3)
        return self.database.script[sql][0]

    def execute(
        self, statement: Statement, rows: Sequence[Sequence[Storage]], *, autocommit: bool, batch: bool = False
    ) -> Outcome:
        self.calls.append(("execute", statement.sql, [tuple(row) for row in rows], autocommit))
        outcome = self.database.script[statement.sql][1](self, rows)
        if statement.function in (FunctionCode.INSERT, FunctionCode.UPDATE):
            self.in_transaction = not autocommit
        return outcome

    def commit(self) -> None:
        self.calls.append("commit")
        self.in_transaction = False

    def rollback(self) -> None:
        self.calls.append("rollback")
        self.in_transaction = False

    def require_control_of(self, connection_id: int) -> None:
        pass

    def set_variable(self, name: str, value: str | None) -> None:
        self.calls.append(("variable", name, value))

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.closed.set()


@dataclass
class ScriptedDatabase:
    script: dict[str, tuple[Statement, Action]] = field(default_factory=dict)
    connections: list[ScriptedConnection] = field(default_factory=list)

    def add(self, statement: Statement, action: Action) -> None:
        self.script[statement.sql] = (statement, action)

    def connect(self, user: str) -> ScriptedConnection:
        self.connections.append(ScriptedConnection(self, 1000 + len(self.connections)))
        self.connections[-1].calls.append(("user", user))
        return self.connections[-1]

    def password(self, user: str) -> str | None:
        return PASSWORD if user == USER else None

    def admit(self, user: str, *, proven: bool) -> None: ...

    def close(self) -> None: ...


@dataclass
class LoneHost:
    """What a session needs of a server, for one session without a server."""

    database: ScriptedDatabase
    name: str = "TEST"
    faults: FaultList = field(default_factory=FaultList)
    sessions: dict[int, Session] = field(default_factory=dict)

    def find(self, session_id: int) -> Session | None:
        return self.sessions.get(session_id)


@contextmanager
def served(database: ScriptedDatabase) -> Iterator[WireClient]:
    """A client whose peer is one session over a socket pair, ended afterwards."""
    ours, theirs = socket.socketpair()
    host = LoneHost(database)
    session = Session(Line(theirs), host)

    def run() -> None:
        session.run()
        theirs.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with ours:
            yield WireClient(ours)
    finally:
        thread.join(10)
        assert not thread.is_alive(), "the session outlived its client"
