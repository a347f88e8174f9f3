"""Who asks, as the guard found out, and whether they may see what is not narrowed to their rows. Knows the scope of a
request, no route.
"""

from __future__ import annotations

from fastapi import Request

from app.src.access.principal import ANONYMOUS, Principal
from app.src.access.rows import RowsRefused
from app.src.api.guard import PRINCIPAL, REFUSED
from app.src.service.service import Service


def asker(request: Request) -> Principal:
    principal: Principal = request.scope.get(PRINCIPAL, ANONYMOUS)
    return principal


def check_every_row(service: Service, request: Request, name: str | None = None) -> None:
    """For a route that shows rows of the collection (None: of any table) whoever they belong to. Raises RowsRefused."""
    try:
        service.rights.check_every_row(asker(request), name)
    except RowsRefused:
        request.scope[REFUSED] = "row_rights"
        raise
