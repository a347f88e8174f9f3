"""What is told of every request to the audit log, at its end, whatever became of it. Plain ASGI; stands outside of all
that may refuse a request, so that refusals are told too.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.src.access.audit import AuditLog
from app.src.access.principal import ANONYMOUS
from app.src.api.errors import CRASHED, METHODS
from app.src.api.guard import PRINCIPAL, REFUSED
from app.src.api.limiting import OLD_NEWS

AUDITED = "owl_sap.audited"
"""In the ASGI scope while there is an audit log: what a route tells of its request, by field."""
_NOT_TOLD = ("/health/live", "/health/ready")
"""Open to everybody, asked every few seconds, and without any effect."""
_REFUSALS = {401: "unauthenticated", 403: "forbidden", 413: "too_large", 421: "misdirected", 429: "limited"}


def tell(scope: Scope, **fields: Any) -> None:
    """Of this request, for the audit log; never a query, a value or a text."""
    audited = scope.get(AUDITED)
    if audited is not None:
        audited.update(fields)


class Audited:
    """`collections`: the names that are configured; a path may hold any other text, which is not told."""

    def __init__(self, app: ASGIApp, log: AuditLog, collections: Collection[str]) -> None:
        self._app = app
        self._log = log
        self._collections = frozenset(collections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = scope[AUDITED] = {}
        start, status = time.perf_counter(), CRASHED

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route not in _NOT_TOLD and not scope.get(OLD_NEWS):
                seconds = time.perf_counter() - start
                self._log.record(self._entry(scope, route, status) | told | {"latency_ms": round(seconds * 1000, 2)})

    def _entry(self, scope: Scope, route: str | None, status: int) -> dict[str, Any]:
        why = scope.get(REFUSED) or _REFUSALS.get(status)
        method = scope["method"] if scope["method"] in METHODS else "other"
        client, principal = scope.get("client"), scope.get(PRINCIPAL, ANONYMOUS)
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": scope.get("owl_sap.request_id"),
            "principal": principal.name,
            "credential": principal.credential,
            "client": client[0] if client else None,
            "method": method,
            "route": route,
            "collection": self._collection(scope),
            "decision": "allowed" if why is None else "refused",
            "why": why,
            "status": status,
        }

    def _collection(self, scope: Scope) -> str | None:
        """Also of a request that was refused before anybody looked for its route's parameters."""
        found = scope.get("path_params", {}).get("name")
        pattern = getattr(scope.get("route"), "path_regex", None)
        if found is None and pattern is not None:
            match = pattern.match(scope["path"])
            found = None if match is None else match.groupdict().get("name")
        return found if found in self._collections else None
