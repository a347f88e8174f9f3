"""Who asks, as the guard found out, and whether they may see what is not narrowed to their rows. Knows the scope of a
request, no route.
"""

from __future__ import annotations

from fastapi import Request

from app.src.access.principal import LOOPBACK, Principal
from app.src.access.rows import RowsRefused
from app.src.service import Service

PRINCIPAL = "owl_sap.principal"
"""Where the guard leaves it, in the ASGI scope."""
REFUSED = "owl_sap.refused"
"""In the ASGI scope of a request that was refused: why, as a word for the audit log."""


def asker(request: Request) -> Principal:
    """Without a guard somebody on this machine, who claims nothing."""
    principal: Principal = request.scope.get(PRINCIPAL, LOOPBACK)
    return principal


def check_every_row(service: Service, request: Request, name: str | None = None) -> None:
    """For a route that shows rows of the collection (None: of any table) whoever they belong to. Raises RowsRefused."""
    try:
        service.check_every_row(asker(request), name)
    except RowsRefused:
        request.scope[REFUSED] = "row_rights"
        raise
