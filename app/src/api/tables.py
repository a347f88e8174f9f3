"""The routes that show what the technical user sees in HANA: tables and views, a proposed collection for each, and the
texts that it would make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request, Response

from app.src.api import table_schemas
from app.src.api.asker import check_every_row
from app.src.api.audited import tell
from app.src.api.desk import Desk, Json
from app.src.api.errors import NotFound
from connector.errors import UnknownTable
from connector.model import TableRef

_LIMIT = 200
_MOST = 1000

Result = TypeVar("Result")


def add(routes: APIRouter, desk: Desk) -> None:
    discovery = desk.service.catalog

    @routes.get("/v1/tables", response_model=list[table_schemas.TableBody])
    async def tables(
        schema: Annotated[str | None, Query(description="default: all but SYS and _SYS_...", max_length=127)] = None,
        search: Annotated[str, Query(description="part of a name or a comment", max_length=200)] = "",
        limit: Annotated[int, Query(ge=1, le=_MOST)] = _LIMIT,
        offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    ) -> Response:
        """Tables and views that the technical user can see, by schema and name."""
        return Json(
            await desk.run(partial(_found, partial(discovery.tables, schema, search, limit=limit, offset=offset)))
        )

    # A table's name may hold slashes: /v1/tables/SAPABAP1//BIC/AZD00100, or with %2F.
    @routes.get("/v1/tables/{schema}/{table:path}", response_model=table_schemas.TableDetailBody)
    async def table(
        request: Request,
        schema: str,
        table: str,
        catalog_only: Annotated[bool, Query(description="do not count clients, do not try keys")] = False,
    ) -> Response:
        """Columns, key and comments, and a proposed collection as `owl-sap introspect` makes it."""
        if not catalog_only:  # the clients that there are, whoever they belong to
            check_every_row(desk.service, request)
        look = partial(discovery.table, TableRef(schema, table), look_at_rows=not catalog_only)
        return Json(await desk.run(partial(_found, look)))

    @routes.post("/v1/tables/{schema}/{table:path}/preview", response_model=table_schemas.PreviewBody)
    async def preview(request: Request, schema: str, table: str, body: table_schemas.PreviewRequest) -> Response:
        """The texts that a template makes of the table's rows, exactly as they would be embedded, and how long they
        are. The template's columns are looked up in the catalogue; nothing of the request is sent as SQL."""
        check_every_row(desk.service, request)  # rows, whoever they belong to
        look = partial(discovery.preview, TableRef(schema, table), body.template, body.samples)
        shown = await desk.run(partial(_found, look), request)
        tell(request.scope, hits=shown["sampled"])
        return Json(shown)


def _found(call: Callable[[], Result]) -> Result:
    """Here the caller names the table, so one that is not there is no fault of the configuration."""
    try:
        return call()
    except UnknownTable as error:
        raise NotFound(str(error)) from None
