"""Bounds and encryption of one connection, which an application cannot enforce."""

from __future__ import annotations

import asyncio
import http
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson
from cryptography import x509
from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.src.access.files import edition
from app.src.api.errors import BAD_REQUEST, HEAD_TOO_LARGE, PROBLEM, RETRY_AFTER, TOO_SLOW, UNAVAILABLE, code_for
from app.src.api.middleware import MOST_HEAD_BYTES
from app.src.observe.metrics import Sample
from app.src.settings import ApiSettings
from connector.errors import ConfigurationError

# Seconds for the rest of an answered request, and for the client to confirm the close.
LINGER_SECONDS = 5.0
SLOWEST = 10_000  # bytes a second at which an answer must be fetched, or it is given up
# Requests that one connection sends ahead of their answers. Each costs the parser more than its bytes.
MOST_AHEAD = 32
# Of one request. Each costs memory beyond its bytes for as long as the head may take.
MOST_HEADERS = 200
# Bytes of chunk sizes, extensions and trailers for each byte of a body, beyond MOST_HEAD_BYTES. A client that sends
# one byte a chunk needs 5.
FRAMING = 8
_ACKNOWLEDGED = 120  # where Linux' tcp_info has tcpi_bytes_acked, a 64-bit number
# SO_LINGER with no time: closing throws away what the other side has not fetched, and tells it.
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Bounds:
    """`read_timeout` in seconds."""

    connections: int
    read_timeout: float


class BoundedHttp(HttpToolsProtocol):
    """A connection always has a timer, unless the service works on its request: until the head is complete, until the
    next request begins, until an answer is read. `middleware.Deadlines` bounds bodies."""

    bounds: ClassVar[Bounds]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._part: Literal["none", "head", "rest"] = "none"
        """The expected part: no request, its head, or the rest."""
        self._passed = False
        """A head or a request has ended in this packet."""
        self._beside = 0
        """Bytes of this part outside the body."""
        self._body = 0
        """Bytes of this request's body."""
        self._headers = 0
        self._wrong = BAD_REQUEST, "not an HTTP request"
        self._clock: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._at_work: Any = None
        """uvicorn's cycle of the request that is worked on; its own `cycle` is of the one that came last."""

    # ------------------------------------------------------------------------------------------------------ connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            limit = f"{self.bounds.connections} connections are open, the limit"
            self._refuse(UNAVAILABLE, f"{limit} (setting api.max_connections): try again later")
            return
        self._start(self.bounds.read_timeout, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.resume_writing()
        super().connection_lost(exc)
        if self._at_work is not None and not self._at_work.response_complete:
            self._at_work.disconnected = True
            self._at_work.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._passed = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        # Where the part ended in it is unknown: the next part is counted from here.
        self._beside = 0 if self._passed else self._beside + len(data)
        if self._part == "rest":
            wanted = 0 if self.cycle.response_complete else self._body  # an answered request is only drained
            if self._beside > MOST_HEAD_BYTES + FRAMING * wanted:
                allowed = f"{MOST_HEAD_BYTES} bytes and {FRAMING} for each byte of the body"
                self._refuse(HEAD_TOO_LARGE, f"chunk sizes, chunk extensions and trailers are larger than {allowed}")
        elif self._beside > MOST_HEAD_BYTES:
            self._refuse(HEAD_TOO_LARGE, f"path and headers are larger than {MOST_HEAD_BYTES} bytes")

    # --------------------------------------------------------------------------------------------------------- requests

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_AHEAD:
            self._wrong = BAD_REQUEST, f"more than {MOST_AHEAD} requests were sent before their answers"
            raise HttpParserError(self._wrong[1])
        super().on_message_begin()
        self._part, self._body, self._headers = "head", 0, 0
        self._start(self.bounds.read_timeout, self._too_slow)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers come here too and are ignored."""
        if self._part != "head":
            return
        self._headers += 1
        if self._headers > MOST_HEADERS:
            self._wrong = HEAD_TOO_LARGE, f"the request has more than {MOST_HEADERS} headers"
            raise HttpParserError(self._wrong[1])
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._part, self._passed = "rest", True
        self._stop()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._beside -= len(body)
        super().on_body(body)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._at_work = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._part, self._passed = "none", True
        if self.cycle is not None and self.cycle.response_complete and not self.pipeline:
            self._await_the_next()

    def on_response_complete(self) -> None:
        more = bool(self.pipeline)
        super().on_response_complete()
        if self.transport.is_closing():
            self._end()
        elif more:
            pass  # the next request runs; `Deadlines` waits for its body
        elif self._part == "rest":
            self._start(LINGER_SECONDS, self._end)  # the rest of a body after its answer
        else:
            self._await_the_next()

    def _await_the_next(self) -> None:
        """uvicorn ends idle connections, except when they send blank lines between requests."""
        self._start(self.bounds.read_timeout, self._too_slow)

    # ---------------------------------------------------------------------------------------------------------- answers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _watch_reading(self) -> None:
        def again() -> None:
            if self._cut_unless_fetched(before, self.bounds.read_timeout):
                self._watch_reading()

        before = self._fetched()
        self._unread = self.loop.call_later(self.bounds.read_timeout, again)

    def _fetched(self) -> int:
        """Return the bytes that the client acknowledged; 0 on systems other than Linux."""
        try:
            told = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return int(struct.unpack_from("Q", told, _ACKNOWLEDGED)[0])
        except (AttributeError, OSError, ValueError, struct.error):  # ValueError: closed under uvloop
            return 0

    def _cut_unless_fetched(self, before: int, seconds: float) -> bool:
        """Return whether enough was fetched in these seconds, else reset the connection. A reset, because the system
        would keep unread data for minutes, and the client would not see the end behind it."""
        if self._fetched() - before >= SLOWEST * seconds:
            return True
        with suppress(AttributeError, OSError, ValueError):
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()
        return False

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():  # uvicorn leaves this timer running where a connection was reset
            self._end()

    # ----------------------------------------------------------------------------------------------------------- ending

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._wrong)

    def _too_slow(self) -> None:
        if self._at_work is not None and not self._at_work.response_complete:
            self._start(self.bounds.read_timeout, self._too_slow)  # the answer to the request before comes first
        elif self._part == "head":
            seconds = self.bounds.read_timeout
            self._refuse(TOO_SLOW, f"the request's head did not arrive within {seconds:g} s (setting api.read_timeout)")
        else:
            self._end()

    def _refuse(self, status: int, why: str) -> None:
        """Answer without the application. An answer that has begun is cut."""
        if self._at_work is None or self._at_work.response_complete or not self._at_work.response_started:
            self.transport.write(_answer(status, why))
        self._end()

    def _end(self) -> None:
        """Close; that waits until the client has read everything, which may be never."""
        self._watch_closing()
        self.transport.close()

    def _watch_closing(self) -> None:
        def again() -> None:
            if self._cut_unless_fetched(before, seconds):
                self._watch_closing()

        before = self._fetched()
        seconds = self.bounds.read_timeout if self.transport.get_write_buffer_size() else LINGER_SECONDS
        self._start(seconds, again)

    def _start(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop()
        self._clock = self.loop.call_later(seconds, then)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def bounded(bounds: Bounds) -> type[BoundedHttp]:
    """Return a protocol class with bounds: uvicorn creates the protocols itself."""
    return type("BoundedHttp", (BoundedHttp,), {"bounds": bounds})


def _answer(status: int, why: str) -> bytes:
    phrase = http.HTTPStatus(status).phrase
    document = {"type": "about:blank", "title": phrase, "status": status, "detail": why, "code": code_for(status)}
    body = orjson.dumps(document)
    retry = f"retry-after: {RETRY_AFTER}\r\n" if status == UNAVAILABLE else ""
    head = (
        f"HTTP/1.1 {status} {phrase}\r\ncontent-type: {PROBLEM}\r\ncontent-length: {len(body)}\r\n{retry}"
        "cache-control: no-store\r\nx-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


_log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0  # least seconds between two checks of the files


class Certificate:
    """A certificate and key from files: `context` gives each new connection the newest usable pair.
    An unusable pair (half written, not matching) leaves the previous one in force, is logged once and tried again.
    Open connections keep theirs. Thread-safe."""

    def __init__(self, certificate: Path, key: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise ConfigurationError for unreadable or unmatched files."""
        self._certificate, self._key, self._clock = certificate, key, clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._seen = self._editions()
        self._newest, self._ends = _loaded_certificate(certificate, key)
        self.fault: str | None = None
        """Why the present files are unusable; None: they are served."""
        self.context = self._newest
        self.context.sni_callback = self._choose

    def look(self) -> None:
        """Load changed files. Costs two file stats, and never waits for a concurrent check."""
        if self._clock() - self._looked < LOOK_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked = self._clock()
            editions = self._editions()
            if editions != self._seen or self.fault is not None:
                self._seen = editions
                self._newest, self._ends = _loaded_certificate(self._certificate, self._key)
                self.fault = None
                _log.info("a new certificate is served: %s", self._certificate)
        except ConfigurationError as error:
            if self.fault != str(error):  # once
                _log.error("%s; the previous certificate stays in force", error)
            self.fault = str(error)
        finally:
            self._lock.release()

    def samples(self) -> list[Sample]:
        """Return for the metrics when the served certificate expires, and whether the files are unusable."""
        self.look()
        return [
            ("owl_sap_tls_certificate_expiry_timestamp_seconds", (), self._ends),
            ("owl_sap_tls_certificate_refused", (), float(self.fault is not None)),
        ]

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        """Choose the context; OpenSSL calls this at each handshake."""
        self.look()
        connection.context = self._newest

    def _editions(self) -> tuple[object, object]:
        return edition(self._certificate), edition(self._key)


def certificate_of(api: ApiSettings) -> Certificate | None:
    """Return the certificate; None: http. Raises ConfigurationError."""
    if api.tls_certificate is None or api.tls_key is None:
        return None
    return Certificate(api.tls_certificate, api.tls_key)


def _loaded_certificate(certificate: Path, key: Path) -> tuple[ssl.SSLContext, float]:
    """Return the context and the certificate's end as POSIX time. Raises ConfigurationError."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION  # it costs the server far more than the client
    for path, setting in ((certificate, "api.tls_certificate"), (key, "api.tls_key")):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigurationError(f"{setting}: {path} cannot be read ({error.strerror})") from None
    try:
        made.load_cert_chain(certificate, key, password=_no_password)
        ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{certificate} and {key} are not a certificate and its private key, both PEM and the key "
            "without a password (settings api.tls_certificate, api.tls_key)"
        ) from None
    return made, ends.timestamp()


def _no_password() -> str:
    """Fail; without a callback OpenSSL asks at the terminal."""
    raise ValueError
