"""The routes of documents that clients write: put them, delete them."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from app.src.api import schemas
from app.src.api.asker import asker
from app.src.api.audited import tell
from app.src.api.desk import Desk, Json
from app.src.api.errors import TooMuch
from connector.sync.documents import NewDocument

_PLACE = "/v1/collections/{name}/documents"


def add(routes: APIRouter, desk: Desk) -> None:
    service = desk.service

    @routes.post(_PLACE, response_model=schemas.DocumentsWritten)
    async def put(request: Request, name: str, body: schemas.DocumentsBody) -> Response:
        """Store documents in a collection that clients write (`documents = true`), all of them or none. One whose id is
        there already is replaced; without an id it gets a new one, which the answer tells. 409 for a collection that is
        synced from a table, and while another writer holds it."""
        documents = [NewDocument(each.id, each.text, each.metadata) for each in body.documents]
        desk.check_texts([each.text for each in documents], name="documents")
        tell(request.scope, documents=len(documents))
        counted = partial(desk.spend, request, whole=True)
        put = partial(service.documents.put, name, documents, principal=asker(request), counted=counted)
        return Json({"ids": (await desk.write(put, request)).ids})

    @routes.post(f"{_PLACE}/delete", response_model=schemas.DocumentsDeleted)
    async def delete(request: Request, name: str, body: schemas.DocumentIds) -> Response:
        """Delete the documents of these ids; how many of them there were. 409 as above."""
        most = desk.limits.max_inputs
        if len(body.ids) > most:
            raise TooMuch(f"{len(body.ids)} ids; at most {most} (setting api.max_inputs)", param="ids")
        tell(request.scope, documents=len(body.ids))
        deletion = partial(service.documents.delete, name, body.ids, principal=asker(request))
        return Json({"deleted": await desk.write(deletion, request)})
