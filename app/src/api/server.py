"""The REST application, the limits of its connections, and its process; also a server of GET /metrics alone, for a
worker. Without authentication, both bind only to loopback."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import os
import resource
import signal
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal

import orjson
import uvicorn
from cryptography import x509
from fastapi import FastAPI
from fastapi.routing import APIRoute
from httptools import HttpParserError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.src.access.audit import AuditLog
from app.src.access.files import Reloaded
from app.src.access.rates import Rates
from app.src.api import agents, console, embeddings, errors, generations, health, jobs, openapi, rerank, search, tables
from app.src.api.guard import Ending, Guard
from app.src.api.requests import Executors
from app.src.core.backends import DeviceFailed
from app.src.core.queue import WorkerDied
from app.src.observe.metrics import CONTENT_TYPE, Sample
from app.src.service.service import Service
from app.src.service.status import version
from app.src.settings import is_loopback
from connector.errors import ConfigurationError

_STUCK_TICKS = 50  # uvicorn ticks every 0.1 s
UNEXPECTED = 4  # the exit code of `cli.exits`, which this module must not import
# FastAPI's own telemetry sends exception messages, which may hold row data, to an address from the environment.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
_CONTENT = {errors.PROBLEM: {"schema": errors.ProblemBody.model_json_schema()}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request cannot be fulfilled; `detail` says why.", "content": _CONTENT},
    "5XX": {"description": "503, with Retry-After: HANA or the store is unavailable.", "content": _CONTENT},
}


# --------------------------------------------------------------------------------------------------------- application


def create_app(service: Service) -> FastAPI:
    """Return the REST application over a service that the caller closes. Raises AccessUnusable."""
    service.access.open()
    access, api = service.settings.access, service.settings.api
    rates = Rates(access.rate, access.concurrency, access.tokens, access.failures)
    executors = Executors(service, rates)
    log = None if access.audit is None else AuditLog(access.audit, service.metrics.audit_failures.inc)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            if log is not None:
                stack.callback(log.close)
            stack.callback(executors.close)
            stack.callback(asyncio.create_task(watch_loop_lag(service.metrics.loop_lag.observe)).cancel)
            async with tools:
                yield

    app = FastAPI(
        title="owl-sap-connector",
        version=version(),
        description="Semantic search over SAP HANA tables. Errors are RFC 9457 problem documents with a request id.",
        docs_url=None,  # FastAPI's own page loads scripts from another host
        redoc_url=None,
        openapi_url="/openapi.json" if api.docs else None,
        responses=PROBLEMS,
        lifespan=lifespan,
        telemetry=_NO_TELEMETRY,
    )
    tools = agents.add(app.router, executors)
    # Add routes directly to the router: newer FastAPIs match each request twice through a nested router. The router
    # compares in this order, so frequent routes come first.
    for add in (
        *(embeddings.add_embed, embeddings.add_openai, rerank.add),
        *(search.add_search, search.add_browsing, search.add_documents),
        *(health.add, tables.add, jobs.add, generations.add),
    ):
        add(app.router, executors)
    app.router.routes.sort(key=lambda route: not isinstance(route, APIRoute))  # the pages about the API come last
    access_settings = service.access.settings if service.access.configured else None
    app.openapi = openapi.described(app.openapi, access_settings)  # type: ignore[method-assign]
    errors.install(app)
    if api.docs:
        openapi.add_docs(app, console=api.console)
    if api.console:
        console.add(app, manual=api.docs)
    app.state.ending = Ending()
    app.add_middleware(Guard, routes=app.router.routes, service=service, rates=rates, log=log, ending=app.state.ending)
    return app


async def watch_loop_lag(observe: Callable[[float], None], every: float = 0.5) -> None:
    """Report every `every` seconds how many seconds late the event loop runs. A late loop delays all requests."""
    while True:
        due = time.monotonic() + every  # uvloop's own clock does not advance while a callback runs
        await asyncio.sleep(every)
        observe(max(0.0, time.monotonic() - due))


# --------------------------------------------------------------------------------------------------------- connections

MOST_HEAD_BYTES = 64 * 1024  # of path and headers together, enough for a token with many claims
# Seconds to wait for the rest of an answered request, and for the client to confirm the close.
LINGER_SECONDS = 5.0
SLOWEST = 10_000  # minimum bytes a second at which a client must read an answer
# Limit of pipelined requests per connection. Parsed requests take more memory than their bytes.
MOST_AHEAD = 32
# Limit per request. Each header takes memory beyond its bytes while the head arrives.
MOST_HEADERS = 200
# Allowed bytes of chunk sizes, extensions and trailers per byte of a body, beyond MOST_HEAD_BYTES. A client that sends
# one byte per chunk needs 5.
FRAMING = 8


class BoundedHttp(HttpToolsProtocol):
    """One connection. Unless the service works on its request, a timer limits the wait for the client: to complete a
    head, to begin the next request, or to read an answer. The guard limits bodies."""

    most: ClassVar[int]  # connections
    read_timeout: ClassVar[float]  # seconds

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The expected part of a request: none, its head, or the rest.
        self._part: Literal["none", "head", "rest"] = "none"
        self._passed = False  # a head or a request ended in this packet
        self._beside = 0  # bytes of this part outside the body
        self._body = 0  # bytes of this request's body
        self._clock: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._answering: deque[Any] = deque()  # uvicorn's cycles of requests without a complete answer, oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            why = f"{self.most} connections are open, the limit (setting api.max_connections): try again later"
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, why)
            return
        self._start(self.read_timeout, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.resume_writing()
        super().connection_lost(exc)
        for cycle in self._answering:  # uvicorn notifies only the last cycle
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._passed = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        # If a part ended inside this packet, its end is unknown, so count the next part from the next packet.
        self._beside = 0 if self._passed else self._beside + len(data)
        if self._part == "rest":
            wanted = 0 if self.cycle.response_complete else self._body  # an answered request is only drained
            if self._beside > MOST_HEAD_BYTES + FRAMING * wanted:
                why = "chunk sizes, chunk extensions and trailers are larger than "
                self._refuse(431, f"{why}{MOST_HEAD_BYTES} bytes and {FRAMING} for each byte of the body")
        elif self._beside > MOST_HEAD_BYTES:
            self._refuse(431, f"path and headers are larger than {MOST_HEAD_BYTES} bytes")

    # Called by the parser.

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_AHEAD:
            self._stop_parsing(400, f"more than {MOST_AHEAD} requests were sent before their answers")
        super().on_message_begin()
        self._part, self._body = "head", 0
        self._start(self.read_timeout, self._too_slow)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record a header. Trailers arrive here too and are ignored."""
        if self._part != "head":
            return
        if len(self.headers) >= MOST_HEADERS:
            self._stop_parsing(431, f"the request has more than {MOST_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEAD_BYTES:
            self._stop_parsing(431, f"path and headers are larger than {MOST_HEAD_BYTES} bytes")
        self._part, self._passed = "rest", True
        self._stop()
        super().on_headers_complete()
        self._answering.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._beside -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._part, self._passed = "none", True
        if not self._answering:
            # uvicorn ends idle connections too, but not those that send blank lines between requests.
            self._start(self.read_timeout, self._too_slow)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(400, "not an HTTP request")

    # Called for answers.

    def on_response_complete(self) -> None:
        self._answering.popleft()
        super().on_response_complete()
        if self.transport.is_closing():
            self._end()
        elif not self._answering:  # otherwise the next request runs; the guard waits for its body
            if self._part == "rest":
                self._start(LINGER_SECONDS, self._end)  # the rest of a body after its answer
            else:
                self._start(self.read_timeout, self._too_slow)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():  # uvicorn leaves this timer running after a reset
            self._end()

    # Closing.

    def _stop_parsing(self, status: int, why: str) -> None:
        self._refuse(status, why)
        raise HttpParserError(why)

    def _too_slow(self) -> None:
        if self._answering:
            self._start(self.read_timeout, self._too_slow)  # the answer to the previous request comes first
        elif self._part == "head":
            why = f"the request's head did not arrive within {self.read_timeout:g} s (setting api.read_timeout)"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, why)
        else:
            self._end()

    def _refuse(self, status: int, why: str) -> None:
        """Answer without the application, or cut off an answer that has begun."""
        if not self._answering or not self._answering[0].response_started:
            body = orjson.dumps(errors.document(status, why))
            retry = f"retry-after: {errors.RETRY_AFTER}\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
            head = (
                f"HTTP/1.1 {status:d} {HTTPStatus(status).phrase}\r\ncontent-type: {errors.PROBLEM}\r\n"
                f"content-length: {len(body)}\r\n{retry}cache-control: no-store\r\n"
                "x-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + body)
        self._end()

    def _end(self) -> None:
        """Close the connection after the client has read everything; reset it if that takes too long."""
        self._stop()
        self._watch_reading()
        self.transport.close()

    def _watch_reading(self) -> None:
        """Reset the connection if the client reads too slowly. Closing would keep unread data in the system for
        minutes, and the client would not notice the end."""

        def look() -> None:
            if waiting and self.transport.get_write_buffer_size() <= waiting - SLOWEST * seconds:
                self._watch_reading()
                return
            # With zero time, closing discards unread data and sends a reset.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                options = socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                self.transport.get_extra_info("socket").setsockopt(*options)
            self.transport.abort()

        waiting = self.transport.get_write_buffer_size()
        seconds = self.read_timeout if waiting else LINGER_SECONDS
        if self._unread is not None:
            self._unread.cancel()
        self._unread = self.loop.call_later(seconds, look)

    def _start(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop()
        self._clock = self.loop.call_later(seconds, then)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


class Certificate(Reloaded[tuple[ssl.SSLContext, float]]):
    """A certificate and key from files. `context` gives new connections the newest usable pair."""

    def __init__(self, certificate: Path, key: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise ConfigurationError for unreadable or unmatched files."""
        super().__init__(certificate, key, clock=clock)
        self.open()
        self.context, _ = self.content

        def choose(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
            self.refresh()
            connection.context, _ends = self.content

        self.context.sni_callback = choose  # which OpenSSL calls at each handshake

    def load(self) -> tuple[ssl.SSLContext, float]:
        """Return the context and the certificate's expiry in POSIX seconds. Raises ConfigurationError."""
        certificate, key = self._paths
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.options |= ssl.OP_NO_RENEGOTIATION  # renegotiation costs the server far more than the client
        for path, setting in ((certificate, "api.tls_certificate"), (key, "api.tls_key")):
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigurationError(f"{setting}: {path} cannot be read ({error.strerror})") from None
        try:
            made.load_cert_chain(certificate, key, password="")  # otherwise OpenSSL would prompt at the terminal
            ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
        except (OSError, ValueError):
            raise ConfigurationError(
                f"{certificate} and {key} are not a certificate and its private key, both PEM and the key "
                "without a password (settings api.tls_certificate, api.tls_key)"
            ) from None
        return made, ends.timestamp()

    def samples(self) -> list[Sample]:
        """Return the metrics: when the certificate expires, and whether the files are unusable."""
        self.refresh()
        return [
            ("owl_sap_tls_certificate_expiry_timestamp_seconds", (), self.content[1]),
            ("owl_sap_tls_certificate_refused", (), float(self.fault is not None)),
        ]


# ------------------------------------------------------------------------------------------------------------- process


def configuration(app: ASGIApp, service: Service) -> uvicorn.Config:
    """Return uvicorn's configuration with all values set, so that it reads none from the environment. Raises
    ConfigurationError for an unusable certificate."""
    api = service.settings.api
    config = uvicorn.Config(
        app,
        # The class carries the limits, because uvicorn creates the protocol objects itself.
        http=type("Http", (BoundedHttp,), {"most": api.max_connections, "read_timeout": api.read_timeout}),
        ws="none",
        workers=1,
        log_level="error",  # lower levels write a line for each request that is not HTTP
        access_log=False,
        timeout_graceful_shutdown=math.ceil(api.shutdown_seconds),
        server_header=False,
        proxy_headers=bool(api.trusted_proxies),
        forwarded_allow_ips=list(map(str, api.trusted_proxies)),
    )
    config.load()
    if api.tls_certificate is not None and api.tls_key is not None:
        certificate = Certificate(api.tls_certificate, api.tls_key)
        config.ssl = certificate.context
        service.metrics.sources["certificate"] = certificate.samples
    return config


def serve(service: Service, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `announce` gets the address once requests are answered.

    The engine is loaded first, so that a wrong model or an unwritable folder for job records (StateUnusable) stops the
    start. HANA, and a model that it computes, may be unreachable: readiness reports it. After the start, jobs of
    earlier processes continue and schedules run. Raises ConfigurationError for an address that is refused or cannot be
    bound, WorkerDied when the engine cannot recover.
    """
    refuse_public(host, authenticated=service.access.configured)
    api = service.settings.api
    app = create_app(service)
    config = configuration(app, service)
    # Each connection needs an open file, and many systems allow only 1024 by default.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = api.max_connections + 512  # for HANA, store and model
    files = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    listener = bound(host, port)
    with contextlib.closing(listener):
        service.jobs.open()
        service.parts.warm()
        # Modules and model live as long as the process. Collecting them would stop all threads for 0.1 to 0.2 s with
        # torch, every few seconds under load.
        gc.collect()
        gc.freeze()
        url = address(listener, config.ssl is not None)
        server = _Server(config, service, app.state.ending, functools.partial(announce, url))
        server.run(sockets=[listener])
    passed = 0.0 if server.asked is None else time.monotonic() - server.asked
    service.jobs.close(max(0.5, api.shutdown_seconds - passed))  # to finish their current batch
    if server.stuck is not None:
        kind = DeviceFailed if service.parts.failed else WorkerDied
        raise kind(f"ended, for a supervisor to start it again (setting api.exit_when_stuck): {server.stuck}")


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free one. Raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP is named because only then does asyncio disable Nagle's algorithm, which would delay each answer by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Keep the system's send buffer small: megabytes of it would hide whether a slow client still reads.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 128 * 1024)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"{host}:{port} cannot be bound ({error.strerror}); choose another with --port; 0 takes any free one"
        ) from None
    return listener


def refuse_public(host: str, *, authenticated: bool) -> None:
    """Raise ConfigurationError for an address other than loopback while no authentication is configured."""
    if authenticated or is_loopback(host):
        return
    raise ConfigurationError(
        f"refusing to serve on {host}: no authentication is configured, so loopback only (--host 127.0.0.1). Create a "
        "key (owl-sap keys create NAME --scope search), or set access.jwt (docs/access.md)"
    )


def address(listener: socket.socket, encrypted: bool) -> str:
    """Return the URL of the listener."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """Announces itself when it accepts connections; exits 0 on SIGTERM and Ctrl-C in bounded time, even if threads
    hang. `stuck`: why it ended by itself; `asked`: when it began to end (monotonic seconds)."""

    def __init__(self, config: uvicorn.Config, service: Service, ending: Ending, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._api, self._ending, self._announce = service, service.settings.api, ending, announce
        self.stuck: str | None = None
        self.asked: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._service.background.run(schedules=self._api.run_schedules)
            self._announce()

    async def on_tick(self, counter: int) -> bool:
        if self._api.exit_when_stuck and counter % _STUCK_TICKS == 0 and not self.should_exit:
            self.stuck = self._service.readiness.beyond_help()
            if self.stuck is not None:
                self.should_exit = True
                self._end_in_time(UNEXPECTED)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.jobs.stop()  # jobs finish their current batch while open requests end
        self._ending.within(self._api.shutdown_seconds * 0.8)  # leaves time to send refusals
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own handler raises the signal again after a clean shutdown, which would turn exit 0 into 143.
        def leave(number: int, frame: FrameType | None) -> None:
            self._end_in_time(0)
            self.handle_exit(number, frame)

        kinds = (signal.SIGTERM, signal.SIGINT)
        before = {kind: signal.signal(kind, leave) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _end_in_time(self, code: int) -> None:
        """End the process after the allowed seconds and two for closing, even if a thread hangs in a driver. Later
        readers of the job records repair what is left."""
        if self.asked is not None:
            return
        self.asked = time.monotonic()
        timer = threading.Timer(self._api.shutdown_seconds + 2, os._exit, (code,))
        timer.daemon = True
        timer.start()


@contextlib.contextmanager
def metrics_served(service: Service, host: str, port: int) -> Iterator[str]:
    """Serve GET /metrics in a thread while the context is open; yields its URL. Port 0 picks a free one. Raises
    ConfigurationError for an address that is refused or cannot be bound and for an unusable certificate,
    AccessUnusable for keys that cannot be read."""
    refuse_public(host, authenticated=service.access.configured)
    service.access.open()
    access = service.settings.access

    async def metrics(_: Request) -> Response:
        return Response(await asyncio.to_thread(service.metrics.render), headers={"Content-Type": CONTENT_TYPE})

    app = Starlette(routes=[Route("/metrics", metrics)])
    rates = Rates(access.rate, access.concurrency, access.tokens, access.failures)
    app.add_middleware(Guard, routes=app.router.routes, service=service, rates=rates)
    config = configuration(app, service)
    with contextlib.closing(bound(host, port)) as listener:
        server = uvicorn.Server(config)
        run = functools.partial(server.run, sockets=[listener])
        thread = threading.Thread(target=run, name="owl-sap-metrics", daemon=True)
        thread.start()
        try:
            yield address(listener, config.ssl is not None) + "/metrics"
        finally:
            server.should_exit = True
            thread.join(3)  # for a running scrape
