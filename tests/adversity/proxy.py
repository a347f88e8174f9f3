"""A line that fails: sits between a client and the emulator, counts what passes, and breaks at a chosen request.

Reads the frames of the protocol only (32 bytes of packet header, the message type in the segment header behind it).
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

EXECUTE_DIRECT, PREPARE, EXECUTE, AUTHENTICATE, CONNECT, COMMIT = 2, 3, 13, 65, 66, 67
ANY = 0
"""As a message type of a strike: every request counts."""
_HANDSHAKE, _HEADER, _MESSAGE_AT = 14, 32, 13


class Fault(Enum):
    NOTHING = "nothing happens to the line; only `then` is called"
    LOSE_REQUEST = "the line goes dead before the server hears"
    LOSE_REPLY = "the server has done it, and the client never hears"
    HALF_REPLY = "half of the reply, then a reset"
    STALL = "the request is swallowed and the line stays open"


@dataclass
class Strike:
    """At the `nth` request (from 1) of type `message`, over all connections, `fault` happens and `then` is called."""

    message: int
    nth: int
    fault: Fault
    then: Callable[[], object] = lambda: None


@dataclass
class _Link:
    client: socket.socket
    server: socket.socket
    strike: Strike | None = None
    threads: list[threading.Thread] = field(default_factory=list)

    def cut(self, *, reset: bool = False) -> None:
        for end in (self.client, self.server):
            with suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it, or `close` would wait for that
                    end.close()
                else:
                    end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Listens on a free loopback port and leads to `port`. `requests` counts the requests seen, by message type.

    `cut_after`: the line is reset once, when this many reply bytes have passed.
    """

    def __init__(self, port: int, *strikes: Strike, cut_after: int | None = None) -> None:
        self._target = ("127.0.0.1", port)
        self._strikes = list(strikes)
        self._cut_after = cut_after
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.requests: Counter[int] = Counter()
        self.connections = 0
        self.reply_bytes = 0
        self.fired = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(30)
        self._listener.close()
        for link in self._links:
            link.cut()
        for link in self._links:
            for thread in link.threads:
                thread.join(30)
            for end in (link.client, link.server):
                end.close()

    def strike(self, *strikes: Strike) -> None:
        """From now on: the counts begin again."""
        with self._lock:
            self.requests.clear()
            self._strikes = list(strikes)
            self.fired.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=30)
            except OSError:  # the emulator is down: so is the line
                client.close()
                continue
            for end in (client, server):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(client, server)
            self.connections += 1
            self._links.append(link)
            for work in (self._requests, self._replies):
                link.threads.append(threading.Thread(target=self._pump, args=(work, link), daemon=True))
                link.threads[-1].start()

    @staticmethod
    def _pump(work: Callable[[_Link], None], link: _Link) -> None:
        with suppress(OSError, EOFError):
            work(link)
        link.cut()

    def _requests(self, link: _Link) -> None:
        link.server.sendall(_exactly(link.client, _HANDSHAKE))
        while True:
            header = _exactly(link.client, _HEADER)
            body = _exactly(link.client, struct.unpack_from("<I", header, 12)[0])
            strike = self._strike_for(body[_MESSAGE_AT])
            match strike and strike.fault:
                case Fault.LOSE_REQUEST:
                    return self._fire(strike)
                case Fault.STALL:
                    self._fire(strike)
                    continue
                case Fault.NOTHING:
                    self._fire(strike)
                case Fault.LOSE_REPLY | Fault.HALF_REPLY:
                    link.strike = strike
                case _:
                    pass
            link.server.sendall(header + body)

    def _replies(self, link: _Link) -> None:
        while data := link.server.recv(1 << 16):
            if (strike := link.strike) is not None:
                if strike.fault is Fault.HALF_REPLY:
                    link.client.sendall(data[: len(data) // 2])
                self._fire(strike)
                return link.cut(reset=True)
            with self._lock:
                self.reply_bytes += len(data)
                cut = self._cut_after is not None and self.reply_bytes >= self._cut_after
                if cut:
                    self._cut_after = None
            if cut:
                self.fired.set()
                return link.cut(reset=True)
            link.client.sendall(data)

    def _strike_for(self, message: int) -> Strike | None:
        with self._lock:
            self.requests[message] += 1
            self.requests[ANY] += 1
            for strike in self._strikes:
                if strike.message in (ANY, message) and self.requests[strike.message] == strike.nth:
                    return strike
        return None

    def _fire(self, strike: Strike | None) -> None:
        if strike is not None:
            strike.then()
            self.fired.set()


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
