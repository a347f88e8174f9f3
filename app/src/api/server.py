"""The application and the process that serves it. Binds loopback only as long as no authentication is
configured."""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute

from app.src.access.audit import AuditLog
from app.src.api import errors, guard, routes
from app.src.api.audited import Audited
from app.src.api.desk import Desk
from app.src.api.middleware import BodyLimit, Observed
from app.src.service import Service, version
from app.src.settings import AccessSettings, is_loopback
from connector.errors import ConfigurationError

_SHUTDOWN_SECONDS = 3
_BACKLOG = 2048
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""FastAPI's own sends messages of exceptions, which may hold row data, to whatever the environment names."""


def create_app(service: Service) -> FastAPI:
    """The REST application over a service that the caller owns and closes. Raises AccessUnusable for keys that cannot
    be read: then nobody is served."""
    service.access.open()
    desk = Desk(service)
    path = service.settings.access.audit
    audit = None if path is None else AuditLog(path, service.metrics.audit_failures.inc)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            if audit is not None:
                stack.callback(audit.close)
            stack.callback(desk.close)
            yield

    app = FastAPI(
        title="owl-sap-connector",
        version=version(),
        description="Semantic search over SAP HANA tables. Errors are RFC 9457 problem documents with a request id.",
        redoc_url=None,
        responses=routes.PROBLEMS,
        lifespan=lifespan,
        telemetry=_NO_TELEMETRY,
    )
    routes.add(app.router, desk)  # with no router between, which newer FastAPIs would ask twice about each request
    app.router.routes.sort(key=lambda route: not isinstance(route, APIRoute))  # the pages about the API come last
    if service.access.configured:
        app.openapi = functools.partial(_described, app.openapi, service.access.settings)  # type: ignore[method-assign]
    errors.install(app, service)
    app.add_middleware(BodyLimit, limit=service.settings.api.max_body_bytes)
    routed = tuple(app.router.routes)
    app.add_middleware(guard.Guard, routes=routed, authentication=service.access, metrics=service.metrics)
    if audit is not None:
        app.add_middleware(Audited, log=audit, collections=service.names())
    app.add_middleware(Observed, metrics=service.metrics)
    return app


def _described(made: Callable[[], dict[str, Any]], access: AccessSettings) -> dict[str, Any]:
    """FastAPI makes the description once, or again when routes were added."""
    document = made()
    if "securitySchemes" not in document.get("components", {}):
        guard.describe(document, open_metrics=access.open_metrics)
    return document


def serve(service: Service, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `announce` gets the address once requests are answered.

    The engine is loaded first, so that a wrong model ends the start instead of the first request; so does a folder for
    job records that cannot be written (StateUnusable). HANA may be away: readiness says so. Once requests are answered
    it goes on with jobs that an earlier process left, and runs schedules. Raises ConfigurationError for an address that
    must not or cannot be bound.
    """
    refuse_public(host, authenticated=service.access.configured)
    listener = _listener(host, port)
    with contextlib.closing(listener):
        application = create_app(service)
        service.jobs.open()
        service.embed(["warm"])
        config = uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            server_header=False,
        )

        def started() -> None:
            service.background.run(schedules=service.settings.api.run_schedules)
            announce(_url(listener))

        _Server(config, started, service.background.stop).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
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


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Announces itself once it accepts connections, and ends with exit code 0 on SIGTERM and Ctrl-C."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = started
        self._ending = ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()  # jobs finish the batch in hand while open requests end
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
        self.handle_exit(number, frame)
