"""The listener: accept clients on loopback, run one thread for each, and end all of them on request."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import select
import socket
import ssl
import sys
import threading
import time

from hana_emulator.faults import ACCEPT, FaultList
from hana_emulator.line import Line
from hana_emulator.seam import SqlDatabase
from hana_emulator.session import Session

_JOIN_SECONDS = 5.0
_HANGUP_SECONDS = 0.1
_log = logging.getLogger(__name__)


class BindRefused(ValueError):
    """The requested address is not a loopback address."""


def check_loopback(host: str) -> None:
    """Raise BindRefused unless the address is loopback: the password is known, so the emulator must stay local."""
    if host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise BindRefused(f"the emulator listens on loopback only: use --host 127.0.0.1 instead of {host}")


class HangupWatch:
    """Notify a busy session of its client's disconnect while no thread reads the socket (Linux only).

    Repeats the signal until the session ends, because a statement may begin to wait just after the first one.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}
        self._lock = threading.Lock()
        self._poll = select.epoll() if sys.platform == "linux" else None

    def start(self) -> None:
        if self._poll is not None:
            threading.Thread(target=self._run, name="hangup-watch", daemon=True).start()

    def add(self, line: Line, session: Session) -> None:
        if self._poll is not None:
            with self._lock:
                self._sessions[line.fileno()] = session
                self._poll.register(line.fileno(), select.EPOLLRDHUP | select.EPOLLHUP)

    def remove(self, line: Line) -> None:
        """Stop watching. Call before closing the socket, because its descriptor can be reused afterwards."""
        if self._poll is not None:
            with self._lock:
                if self._sessions.pop(line.fileno(), None) is not None:
                    self._poll.unregister(line.fileno())

    def _run(self) -> None:
        while self._poll is not None:
            for descriptor, _event in self._poll.poll():
                with self._lock:
                    session = self._sessions.get(descriptor)
                if session is not None:
                    session.peer_gone()
            time.sleep(_HANGUP_SECONDS)


class Server:
    """The listening server. `address` is set after construction, so `port=0` works.

    With `tls` every connection is encrypted from its first byte.
    """

    name = "OWL"

    def __init__(
        self,
        database: SqlDatabase,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: ssl.SSLContext | None = None,
        faults: FaultList | None = None,
    ) -> None:
        check_loopback(host)
        self.database = database
        self.faults = FaultList() if faults is None else faults
        self._tls = tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._wake_read, self._wake_write = socket.socketpair()
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, Session] = {}
        self._watch = HangupWatch()

    def serve(self) -> None:
        """Accept until `stop` is called, then end all sessions; open transactions are rolled back."""
        self._watch.start()
        try:
            while True:
                ready, _, _ = select.select((self._listener, self._wake_read), (), ())
                if self._wake_read in ready:
                    return
                try:
                    sock, _address = self._listener.accept()
                except OSError:  # the client left between select and accept
                    continue
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line = Line(sock)
                if self.faults.strike(ACCEPT) is not None:
                    line.reset_on_close()
                    line.close()
                    continue
                session = Session(line, self)
                thread = threading.Thread(target=self._run, args=(line, session), daemon=True)
                with self._lock:
                    self._open[thread] = session
                thread.start()
        finally:
            self._listener.close()
            with self._lock:
                open_sessions = dict(self._open)
            for session in open_sessions.values():
                session.disconnect()
            for thread in open_sessions:
                thread.join(_JOIN_SECONDS)
            self._wake_read.close()
            self._wake_write.close()

    def stop(self) -> None:
        """End `serve`. Can be called from signal handlers and other threads."""
        with contextlib.suppress(OSError):  # already closed
            self._wake_write.send(b"x")

    def find(self, session_id: int) -> Session | None:
        with self._lock:
            return next((session for session in self._open.values() if session.id == session_id), None)

    def _run(self, line: Line, session: Session) -> None:
        try:
            if self._tls is not None:  # in the session's thread, so that a slow client does not delay others
                line.secure(self._tls)
            self._watch.add(line, session)
            session.run()
        except OSError as error:
            _log.debug("a client was refused: %s", error)
        except Exception as error:
            _log.error("session %d ended by %s", session.id, type(error).__name__)
        finally:
            self._watch.remove(line)
            line.close()
            with self._lock:
                self._open.pop(threading.current_thread(), None)
