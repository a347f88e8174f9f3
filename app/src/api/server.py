"""The application and the process that serves it. Binds loopback only as long as no authentication is
configured."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from app.src.access.audit import AuditLog
from app.src.access.rates import Failures, Rates
from app.src.api import agents, console, errors, examples, guard, lateness, manual, routes, tls
from app.src.api.audited import Audited
from app.src.api.connections import Bounds, bounded
from app.src.api.deadlines import Deadlines, Ending
from app.src.api.desk import Desk
from app.src.api.direct import BoundedRoute
from app.src.api.headers import SecurityHeaders
from app.src.api.limiting import Limited, Throttled
from app.src.api.middleware import BodyLimit, Observed
from app.src.core.queue import WorkerDied
from app.src.service.service import Service, version
from app.src.settings import AccessSettings, is_loopback
from connector.errors import ConfigurationError

_BACKLOG = 2048
_SHARE_OF_REQUESTS = 0.8
"""Of the seconds for shutting down: then who still waits is told, while there is time to tell."""
_LEAST_FOR_JOBS = 0.5
_MARGIN_SECONDS = 2.0
"""After shutdown_seconds, for closing what is open; then the process ends, and the records' readers see to the rest."""
_LOOK_TICKS = 50
"""uvicorn ticks every 0.1 s."""
_OTHER_FILES = 512
"""Files beside the connections: HANA's, the store's, the model's."""
UNEXPECTED = 4
"""The exit code of `cli.exits`, which this module must not know."""
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""FastAPI's own sends messages of exceptions, which may hold row data, to whatever the environment names."""


def create_app(service: Service) -> FastAPI:
    """The REST application over a service that the caller owns and closes. Raises AccessUnusable for keys that cannot
    be read: then nobody is served."""
    service.access.open()
    access = service.settings.access
    rates = Rates(access.rate, access.concurrency, access.tokens)
    desk = Desk(service, rates)
    offered = agents.offered(desk)
    audit = None if access.audit is None else AuditLog(access.audit, service.metrics.audit_failures.inc)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            if audit is not None:
                stack.callback(audit.close)
            stack.callback(desk.close)
            stack.enter_context(lateness.watched(service.metrics.loop_lag.observe))
            async with agents.running(offered):
                yield

    app = FastAPI(
        title="owl-sap-connector",
        version=version(),
        description="Semantic search over SAP HANA tables. Errors are RFC 9457 problem documents with a request id.",
        docs_url=None,  # FastAPI's own page loads scripts from another host
        redoc_url=None,
        openapi_url="/openapi.json" if service.settings.api.docs else None,
        responses=routes.PROBLEMS,
        lifespan=lifespan,
        telemetry=_NO_TELEMETRY,
    )
    app.router.route_class = BoundedRoute
    agents.add(app.router, offered)
    routes.add(app.router, desk)  # with no router between, which newer FastAPIs would ask twice about each request
    app.router.routes.sort(key=lambda route: not isinstance(route, APIRoute))  # the pages about the API come last
    access_settings = service.access.settings if service.access.configured else None
    app.openapi = _Description(app.openapi, access_settings)  # type: ignore[method-assign]
    errors.install(app, service)
    if service.settings.api.docs:
        manual.add(app, console=service.settings.api.console)
    if service.settings.api.console:
        console.add(app, manual=service.settings.api.docs)
    app.state.ending = _surround(app, service, rates, audit)
    return app


class _Description:
    """FastAPI makes the description once, or again when routes were added; each gets examples, and who may ask."""

    def __init__(self, make: Callable[[], dict[str, Any]], access: AccessSettings | None) -> None:
        self._make = make
        self._access = access
        self._last: dict[str, Any] | None = None

    def __call__(self) -> dict[str, Any]:
        document = self._make()
        if document is not self._last:
            examples.describe(document)
            if self._access is not None:
                guard.describe(document, open_metrics=self._access.open_metrics)
            self._last = document
        return document


def _surround(app: FastAPI, service: Service, rates: Rates, audit: AuditLog | None) -> Ending:
    """The middleware, innermost first."""
    api, access, ending = service.settings.api, service.settings.access, Ending()
    app.add_middleware(BodyLimit, limit=api.max_body_bytes, together=api.max_bodies_bytes)
    app.add_middleware(Limited, rates=rates)
    routed = tuple(app.router.routes)
    app.add_middleware(guard.Guard, routes=routed, authentication=service.access, metrics=service.metrics)
    app.add_middleware(Throttled, failures=Failures(access.failures))
    app.add_middleware(Deadlines, timeout=api.timeout, read_timeout=api.read_timeout, ending=ending)
    if audit is not None:
        app.add_middleware(Audited, log=audit, collections=service.names())
    app.add_middleware(Observed, metrics=service.metrics)
    app.add_middleware(SecurityHeaders, hsts=api.hsts)  # outermost: for what goes wrong in those above, too
    return ending


def configuration(app: ASGIApp, service: Service) -> uvicorn.Config:
    """uvicorn's, which reads the environment for what it is not told. Raises ConfigurationError for a certificate that
    cannot be used."""
    api = service.settings.api
    config = uvicorn.Config(
        app,
        http=bounded(Bounds(api.max_connections, api.read_timeout)),
        ws="none",
        workers=1,
        log_level="error",  # below that it writes a line for each request that is no HTTP
        access_log=False,
        timeout_graceful_shutdown=math.ceil(api.shutdown_seconds),
        server_header=False,
        proxy_headers=bool(api.trusted_proxies),
        forwarded_allow_ips=list(api.trusted_proxies),
    )
    config.load()
    certificate = tls.of(api)
    if certificate is not None:
        config.ssl = certificate.context
        service.metrics.certificate.read = certificate.reading
    return config


def serve(service: Service, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `announce` gets the address once requests are answered.

    The engine is loaded first, so that a wrong model ends the start instead of the first request; so does a folder for
    job records that cannot be written (StateUnusable). HANA may be away: readiness says so. Once requests are answered
    it goes on with jobs that an earlier process left, and runs schedules. Raises ConfigurationError for an address that
    must not or cannot be bound.
    """
    refuse_public(host, authenticated=service.access.configured)
    api = service.settings.api
    app = create_app(service)
    config = configuration(app, service)
    _allow_files(api.max_connections)
    listener = bound(host, port)
    with contextlib.closing(listener):
        service.jobs.open()
        service.embed(["warm"])
        _keep_what_is_loaded()
        server = _Server(config, service, app.state.ending)
        server.announce = lambda: announce(address(listener, config.ssl is not None))
        server.run(sockets=[listener])
    service.background.close(server.seconds_left())
    if server.stuck is not None:
        raise WorkerDied(f"ended, for a supervisor to start it again (setting api.exit_when_stuck): {server.stuck}")


def _keep_what_is_loaded() -> None:
    """Modules and model stay as long as the process, so the collector need not go through them again and again: with
    torch that stops every thread for 0.1 to 0.2 s, and under load every few seconds."""
    gc.collect()
    gc.freeze()


def _allow_files(connections: int) -> None:
    """Each connection is an open file, and many systems allow 1024 unless they are asked for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft not in (resource.RLIM_INFINITY,) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises ConfigurationError for an address that cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With TCP named, for asyncio switches Nagle's delay off only then: without it each answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"{host}:{port} cannot be bound ({error.strerror}); choose another with --port; 0 takes any free one"
        ) from None
    return listener


def refuse_public(host: str, *, authenticated: bool) -> None:
    """Without authentication only this machine may ask."""
    if authenticated or is_loopback(host):
        return
    raise ConfigurationError(
        f"refusing to serve on {host}: no authentication is configured, so loopback only (--host 127.0.0.1). Make a "
        "key (owl-sap keys create NAME --scope search), or set access.jwt (docs/access.md)"
    )


def address(listener: socket.socket, encrypted: bool) -> str:
    """As clients write it."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """Announces itself once it accepts connections, and ends with exit code 0 on SIGTERM and Ctrl-C, in bounded time
    whatever still hangs. `stuck`: why it ended by itself."""

    def __init__(self, config: uvicorn.Config, service: Service, ending: Ending) -> None:
        super().__init__(config)
        self.announce: Callable[[], None] = lambda: None
        self.stuck: str | None = None
        self._service = service
        self._api = service.settings.api
        self._requests = ending
        self._asked: float | None = None

    def seconds_left(self) -> float:
        """For jobs to finish the batch in hand."""
        passed = 0.0 if self._asked is None else time.monotonic() - self._asked
        return max(_LEAST_FOR_JOBS, self._api.shutdown_seconds - passed)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._service.background.run(schedules=self._api.run_schedules)
            self.announce()

    async def on_tick(self, counter: int) -> bool:
        if self._api.exit_when_stuck and counter % _LOOK_TICKS == 0 and not self.should_exit:
            self.stuck = self._service.probes.beyond_help()
            if self.stuck is not None:
                self.should_exit = True
                self._see_to_the_end(UNEXPECTED)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.background.stop()  # jobs finish the batch in hand while open requests end
        self._requests.within(self._api.shutdown_seconds * _SHARE_OF_REQUESTS)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again after a clean shutdown, which would turn exit 0 into 143.
        kinds = (signal.SIGTERM, signal.SIGINT)
        before = {kind: signal.signal(kind, self._leave) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._see_to_the_end(0)
        self.handle_exit(number, frame)

    def _see_to_the_end(self, code: int) -> None:
        """Whatever hangs in a driver that does not listen: its thread would hold the process up for ever."""
        if self._asked is None:
            self._asked = time.monotonic()
            within = self._api.shutdown_seconds + _MARGIN_SECONDS
            threading.Thread(target=_end_after, args=(within, code), name="owl-sap-end", daemon=True).start()


def _end_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)
