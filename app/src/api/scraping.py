"""GET /metrics alone, for a process without REST: a worker. In a thread of its own, with REST's credentials, limits,
bounds on connections, security headers and certificate.
"""

from __future__ import annotations

import asyncio
import threading

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.src.access.rates import Failures, Rates
from app.src.api.guard import Guard
from app.src.api.headers import SecurityHeaders
from app.src.api.limiting import Limited, Throttled
from app.src.api.middleware import Observed
from app.src.api.server import address, bound, configuration, refuse_public
from app.src.observe.metrics import CONTENT_TYPE
from app.src.service.service import Service

_SHUTDOWN_SECONDS = 3
"""A scrape that is under way may take so long; then the process ends without it."""


def metrics_app(service: Service) -> Starlette:
    """The application over a service that the caller owns and closes. Raises AccessUnusable for keys that cannot be
    read."""
    service.access.open()
    access = service.settings.access

    async def metrics(_: Request) -> Response:
        return Response(await asyncio.to_thread(service.metrics.render), headers={"Content-Type": CONTENT_TYPE})

    app = Starlette(routes=[Route("/metrics", metrics)])
    # Innermost first, as REST has them (server.py).
    app.add_middleware(Limited, rates=Rates(access.rate, access.concurrency, access.tokens))
    app.add_middleware(Guard, routes=tuple(app.routes), authentication=service.access, metrics=service.metrics)
    app.add_middleware(Throttled, failures=Failures(access.failures))
    app.add_middleware(Observed, metrics=service.metrics)
    app.add_middleware(SecurityHeaders, hsts=service.settings.api.hsts)
    return app


class MetricsListener:
    """Answers from `start` until `close`."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        """Binds; port 0 picks a free one. Raises ConfigurationError for an address that must not or cannot be bound
        and for a certificate that cannot be used, AccessUnusable for keys that cannot be read."""
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
            self._thread.join(_SHUTDOWN_SECONDS)
        self._listener.close()
