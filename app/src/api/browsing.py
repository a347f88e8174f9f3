"""The routes that show what is stored: rows by their ids, and the metadata that filters can be made of. Each shows no
row, no value and no count of what who asks may not see.
"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from app.src.api import schemas
from app.src.api.asker import asker
from app.src.api.audited import tell
from app.src.api.desk import Desk, Json

_PLACE = "/v1/collections/{name}"


def add(routes: APIRouter, desk: Desk) -> None:
    service = desk.service

    @routes.post(f"{_PLACE}/rows", response_model=schemas.RowsResponse)
    async def rows(request: Request, name: str, body: schemas.RowsRequest) -> Response:
        """The rows with these ids, whole, in the order of the ids and each once. Ids that are not there are left out,
        and so are those of rows that may not be seen."""
        found = await desk.run(partial(service.rows, name, body.ids, principal=asker(request)), request)
        tell(request.scope, asked=len(body.ids), hits=len(found))
        return Json({"rows": found})

    @routes.get(f"{_PLACE}/fields", response_model=schemas.FieldsResponse)
    async def fields(request: Request, name: str) -> Response:
        """What filters can be made of: each metadata field with its type, its most frequent values and its range, as
        the rows that may be seen have them. Of many rows a sample is looked at (`sampled` of `rows`)."""
        return Json(await desk.run(partial(service.fields, name, principal=asker(request)), request))
