"""The routes that show what is stored: rows by their ids, the metadata that filters can be made of, and rows as points
on a map. Each shows no row, no value and no count of what who asks may not see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request, Response

from app.src.access.rows import Nothing
from app.src.api import schemas
from app.src.api.asker import asker
from app.src.api.audited import AUDITED, tell
from app.src.api.desk import Desk, Json
from app.src.api.errors import Unprocessable
from app.src.service.browse import POINTS, SAMPLE

_PLACE = "/v1/collections/{name}"

Result = TypeVar("Result")


def add(routes: APIRouter, desk: Desk) -> None:
    service = desk.service

    def told(request: Request, name: str, **counts: int) -> None:
        """To the audit log, as of a search."""
        if AUDITED in request.scope:
            within = service.rights.visible(name, asker(request))
            rows = "all" if within is None else "none" if isinstance(within, Nothing) else "some"
            tell(request.scope, rows=rows, **counts)

    @routes.post(f"{_PLACE}/rows", response_model=schemas.RowsResponse)
    async def rows(request: Request, name: str, body: schemas.RowsRequest) -> Response:
        """The rows with these ids, whole, in the order of the ids and each once. Ids that are not there are left out,
        and so are those of rows that may not be seen."""
        ask = partial(service.browse.rows, name, body.ids, principal=asker(request))
        found = await desk.run(partial(_checked, ask), request)
        told(request, name, asked=len(body.ids), hits=len(found))
        return Json({"rows": found})

    @routes.get(f"{_PLACE}/fields", response_model=schemas.FieldsResponse)
    async def fields(request: Request, name: str) -> Response:
        """What filters can be made of: each metadata field with its type, its most frequent values and its range, as
        the rows that may be seen have them. Of many rows a sample is looked at (`sampled` of `rows`)."""
        found = await desk.run(partial(service.browse.fields, name, principal=asker(request)), request)
        told(request, name, hits=found.sampled)
        return Json(found)

    @routes.get(f"{_PLACE}/map", response_model=schemas.MapResponse)
    async def map_(
        request: Request,
        name: str,
        color: Annotated[
            str | None, Query(description="a metadata field whose value each point gets", max_length=130)
        ] = None,
        limit: Annotated[int, Query(ge=1, le=SAMPLE)] = POINTS,
    ) -> Response:
        """The rows that may be seen as points: those alike in meaning lie near each other. The two principal components
        of a sample of at most 5000 rows; the same picture until rows change. Without two rows there are no points."""
        ask = partial(service.browse.map, name, color, limit, principal=asker(request))
        found = await desk.run(partial(_checked, ask), request)
        told(request, name, hits=len(found.points))
        return Json(found)


def _checked(ask: Callable[[], Result]) -> Result:
    try:
        return ask()
    except ValueError as error:
        raise Unprocessable(str(error)) from error
