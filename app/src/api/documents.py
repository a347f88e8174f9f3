"""The routes of stored rows: rows by id, and documents that clients write."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from app.src.api.errors import TooMuch
from app.src.api.guard import audit, caller
from app.src.api.requests import FEW_FAULTS, MOST_ITEMS, Body, Executors, Json, Texts
from connector.sync.documents import NewDocument


class DocumentBody(Body):
    id: str | None = Field(default=None, max_length=2000, description="null: a new UUID", examples=["note-17"])
    text: str = Field(examples=["The gearbox of press 4 was oiled."])
    metadata: dict[str, Any] = Field(
        default={},
        description="stored unchanged; filters use texts, numbers and booleans on the first level",
        examples=[{"plant": "1000", "year": 2026}],
    )


class DocumentsBody(Body):
    documents: Annotated[list[DocumentBody], Field(max_length=MOST_ITEMS), FEW_FAULTS] = Field(min_length=1)


class DocumentIds(Body):
    ids: Texts = Field(min_length=1, examples=[["note-17"]])


class DocumentsWritten(BaseModel):
    ids: list[str] = Field(description="in the order of the documents")


class DocumentsDeleted(BaseModel):
    deleted: int = Field(description="how many of the documents existed")


_PLACE = "/v1/collections/{name}/documents"


def add(routes: APIRouter, executors: Executors) -> None:
    service = executors.service

    @routes.post(_PLACE, response_model=DocumentsWritten)
    async def put(request: Request, name: str, body: DocumentsBody) -> Response:
        """Store documents in a collection that clients write (`documents = true`), all or none. A document with a known
        id is replaced; one without an id gets a new one, which is returned. 409 for a collection that is synced from a
        table, and while another writer holds it."""
        documents = [NewDocument(each.id, each.text, each.metadata) for each in body.documents]
        executors.check_texts([each.text for each in documents], name="documents")
        audit(request.scope, documents=len(documents))
        counted = partial(executors.spend, request, whole=True)
        put = partial(service.documents.put, name, documents, principal=caller(request), counted=counted)
        return Json({"ids": (await executors.run(put, request, writes=True)).ids})

    @routes.post(f"{_PLACE}/delete", response_model=DocumentsDeleted)
    async def delete(request: Request, name: str, body: DocumentIds) -> Response:
        """Delete the documents with these ids; returns how many existed. 409 as above."""
        most = executors.limits.max_inputs
        if len(body.ids) > most:
            raise TooMuch(f"{len(body.ids)} ids; at most {most} (setting api.max_inputs)", param="ids")
        audit(request.scope, documents=len(body.ids))
        deletion = partial(service.documents.delete, name, body.ids, principal=caller(request))
        return Json({"deleted": await executors.run(deletion, request, writes=True)})
