"""Who asks, as the guard found out. Knows the scope of a request, no route."""

from __future__ import annotations

from fastapi import Request

from app.src.access.principal import LOOPBACK, Principal

PRINCIPAL = "owl_sap.principal"
"""Where the guard leaves it."""


def asker(request: Request) -> Principal:
    """Without a guard somebody on this machine, who claims nothing."""
    principal: Principal = request.scope.get(PRINCIPAL, LOOPBACK)
    return principal
