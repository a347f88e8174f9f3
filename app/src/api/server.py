"""The REST application and the process that serves it; and GET /metrics alone, for a worker. Binds loopback only,
unless authentication is configured.
"""

from __future__ import annotations

import asyncio
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
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.src.access.audit import AuditLog
from app.src.access.rates import Failures, Rates
from app.src.api import (
    agents,
    console,
    documents,
    embeddings,
    errors,
    generations,
    guard,
    health,
    jobs,
    middleware,
    openapi,
    search,
    tables,
)
from app.src.api.bodies import BoundedRoute
from app.src.api.connections import Bounds, bounded, certificate_of
from app.src.api.executors import Executors
from app.src.core.queue import WorkerDied
from app.src.observe.metrics import CONTENT_TYPE
from app.src.service.service import Service
from app.src.service.status import version
from app.src.settings import is_loopback
from connector.errors import ConfigurationError

_BACKLOG = 2048
# Share of shutdown_seconds after which waiting requests get their refusal, while there is time to send it.
_SHARE_OF_REQUESTS = 0.8
_LEAST_FOR_JOBS = 0.5
# Seconds after shutdown_seconds for closing; then the process ends, and readers of the job records repair the rest.
_MARGIN_SECONDS = 2.0
_STUCK_TICKS = 50  # uvicorn ticks every 0.1 s
_OTHER_FILES = 512  # open files beside the connections: HANA's, the store's, the model's
_SCRAPE_SECONDS = 3.0  # for a scrape in progress when a worker ends
LAG_SECONDS = 0.5
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
    """Return the REST application over a service that the caller owns and closes. Raises AccessUnusable for keys that
    cannot be read."""
    service.access.open()
    access, api = service.settings.access, service.settings.api
    rates = Rates(access.rate, access.concurrency, access.tokens)
    executors = Executors(service, rates)
    mcp = agents.offered(executors)
    log = None if access.audit is None else AuditLog(access.audit, service.metrics.audit_failures.inc)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            if log is not None:
                stack.callback(log.close)
            stack.callback(executors.close)
            stack.enter_context(loop_lag_watched(service.metrics.loop_lag.observe))
            async with agents.running(mcp):
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
    app.router.route_class = BoundedRoute
    agents.add(app.router, mcp)
    # Straight into the router: newer FastAPIs would match each request twice through a router between. The router
    # compares requests in this order, so the most frequent routes come first.
    for routes in (embeddings, search, health, tables, jobs, generations, documents):
        routes.add(app.router, executors)
    app.router.routes.sort(key=lambda route: not isinstance(route, APIRoute))  # the pages about the API come last
    access_settings = service.access.settings if service.access.configured else None
    app.openapi = openapi.Description(app.openapi, access_settings)  # type: ignore[method-assign]
    errors.install(app, service)
    if api.docs:
        openapi.add_docs(app, console=api.console)
    if api.console:
        console.add(app, manual=api.docs)
    app.state.ending = middleware.Ending()
    app.add_middleware(middleware.BodyLimit, limit=api.max_body_bytes, together=api.max_bodies_bytes)
    _surround(app, service, rates, log, app.state.ending)
    return app


def _surround(
    app: Starlette, service: Service, rates: Rates, log: AuditLog | None = None, ending: middleware.Ending | None = None
) -> None:
    """Add the middleware, innermost first. A worker's metrics have neither an audit log nor deadlines."""
    api = service.settings.api
    app.add_middleware(middleware.Limited, rates=rates)
    app.add_middleware(
        guard.Guard, routes=tuple(app.router.routes), authentication=service.access, metrics=service.metrics
    )
    app.add_middleware(middleware.Throttled, failures=Failures(service.settings.access.failures))
    if ending is not None:
        app.add_middleware(middleware.Deadlines, timeout=api.timeout, read_timeout=api.read_timeout, ending=ending)
    if log is not None:
        app.add_middleware(middleware.Audited, log=log, collections=service.collections.names)
    app.add_middleware(middleware.Observed, metrics=service.metrics)
    app.add_middleware(middleware.SecurityHeaders, hsts=api.hsts)


@contextlib.contextmanager
def loop_lag_watched(observe: Callable[[float], None], every: float = LAG_SECONDS) -> Iterator[None]:
    """Report every `every` seconds how many seconds late the event loop runs: a late loop delays all requests."""
    loop = asyncio.get_running_loop()
    due = time.monotonic() + every  # uvloop's own clock stands still while a callback runs
    timer: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal due, timer
        now = time.monotonic()
        observe(max(0.0, now - due))
        due, timer = now + every, loop.call_later(every, tick)

    timer = loop.call_later(every, tick)
    try:
        yield
    finally:
        timer.cancel()


# ------------------------------------------------------------------------------------------------------------- process


def configuration(app: ASGIApp, service: Service) -> uvicorn.Config:
    """Return uvicorn's configuration, every value given so that it reads none from the environment. Raises
    ConfigurationError for an unusable certificate."""
    api = service.settings.api
    config = uvicorn.Config(
        app,
        http=bounded(Bounds(api.max_connections, api.read_timeout)),
        ws="none",
        workers=1,
        log_level="error",  # lower levels write a line for each request that is not HTTP
        access_log=False,
        timeout_graceful_shutdown=math.ceil(api.shutdown_seconds),
        server_header=False,
        proxy_headers=bool(api.trusted_proxies),
        forwarded_allow_ips=list(api.trusted_proxies),
    )
    config.load()
    certificate = certificate_of(api)
    if certificate is not None:
        config.ssl = certificate.context
        service.metrics.sources["certificate"] = certificate.samples
    return config


def serve(service: Service, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `announce` gets the address once requests are answered.

    The engine is loaded first, so that a wrong model or an unwritable folder of job records (StateUnusable) ends the
    start. HANA may be away: readiness says so. Then jobs of an earlier process continue and schedules run. Raises
    ConfigurationError for an address that is refused or cannot be bound, WorkerDied where the engine is beyond help.
    """
    refuse_public(host, authenticated=service.access.configured)
    api = service.settings.api
    app = create_app(service)
    config = configuration(app, service)
    _allow_files(api.max_connections)
    listener = bound(host, port)
    with contextlib.closing(listener):
        service.jobs.open()
        service.parts.embedder.embed(["warm"])
        # Modules and model live as long as the process. Collecting them again and again stops every thread for
        # 0.1 to 0.2 s with torch, every few seconds under load.
        gc.collect()
        gc.freeze()
        server = _Server(config, service, app.state.ending)
        server.announce = lambda: announce(address(listener, config.ssl is not None))
        server.run(sockets=[listener])
    service.background.close(server.seconds_left())
    if server.stuck is not None:
        raise WorkerDied(f"ended, for a supervisor to start it again (setting api.exit_when_stuck): {server.stuck}")


def _allow_files(connections: int) -> None:
    """Raise the limit of open files: each connection is one, and many systems allow only 1024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free one. Raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP is named because asyncio switches Nagle's delay off only then; otherwise each answer takes 40 ms.
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
    """Raise ConfigurationError for an address beyond this machine while no authentication is configured."""
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
    """Announces itself once it accepts connections; exits 0 on SIGTERM and Ctrl-C in bounded time, even with threads
    that hang. `stuck`: why it ended by itself."""

    def __init__(self, config: uvicorn.Config, service: Service, ending: middleware.Ending) -> None:
        super().__init__(config)
        self.announce: Callable[[], None] = lambda: None
        self.stuck: str | None = None
        self._service = service
        self._api = service.settings.api
        self._ending = ending
        self._asked: float | None = None

    def seconds_left(self) -> float:
        """Return the seconds that jobs have to finish their current batch."""
        passed = 0.0 if self._asked is None else time.monotonic() - self._asked
        return max(_LEAST_FOR_JOBS, self._api.shutdown_seconds - passed)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._service.background.run(schedules=self._api.run_schedules)
            self.announce()

    async def on_tick(self, counter: int) -> bool:
        if self._api.exit_when_stuck and counter % _STUCK_TICKS == 0 and not self.should_exit:
            self.stuck = self._service.readiness.beyond_help()
            if self.stuck is not None:
                self.should_exit = True
                self._end_in_time(UNEXPECTED)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.background.stop()  # jobs finish their current batch while open requests end
        self._ending.within(self._api.shutdown_seconds * _SHARE_OF_REQUESTS)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again after a clean shutdown, which would turn exit 0 into 143.
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
        """End the process after the allowed seconds, even if a thread hangs in a driver."""
        if self._asked is not None:
            return
        self._asked = time.monotonic()
        within = self._api.shutdown_seconds + _MARGIN_SECONDS
        threading.Thread(target=_end_after, args=(within, code), name="owl-sap-end", daemon=True).start()


def _end_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)


# ------------------------------------------------------------------------------------------------- metrics of a worker


def metrics_app(service: Service) -> Starlette:
    """Return an application with GET /metrics alone. Raises AccessUnusable for keys that cannot be read."""
    service.access.open()
    access = service.settings.access

    async def metrics(_: Request) -> Response:
        return Response(await asyncio.to_thread(service.metrics.render), headers={"Content-Type": CONTENT_TYPE})

    app = Starlette(routes=[Route("/metrics", metrics)])
    _surround(app, service, Rates(access.rate, access.concurrency, access.tokens))
    return app


class MetricsListener:
    """Serves GET /metrics in a thread, from `start` until `close`."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        """Bind; port 0 picks a free one. Raises ConfigurationError for an address that is refused or cannot be bound
        and for an unusable certificate, AccessUnusable for keys that cannot be read."""
        app = metrics_app(service)
        refuse_public(host, authenticated=service.access.configured)
        config = configuration(app, service)
        self._listener = bound(host, port)
        self.url = address(self._listener, config.ssl is not None) + "/metrics"
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="owl-sap-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def close(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_SCRAPE_SECONDS)
        self._listener.close()
