"""The routes of HANA's catalogue: tables and views, a proposed collection for each, a preview of its texts; and the
route that creates a collection."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, cast

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field, SkipValidation

from app.src.api.errors import MOST_FAULTS, problem
from app.src.api.guard import audit, caller
from app.src.api.requests import Body, Executors, Json, answered
from app.src.service.catalog import CollectionExists, NotSaved
from app.src.settings import CollectionSettings, InvalidCollection
from connector.errors import ConfigurationError, UnknownTable
from connector.model import TableRef


class TableBody(BaseModel):
    schema_name: str = Field(alias="schema")
    name: str
    kind: str = Field(examples=["table", "view"])
    comment: str
    columns: int
    rows: int | None = Field(description="HANA's own count; null for views, and without the privilege")


class ColumnBody(BaseModel):
    name: str
    type_name: str
    length: int = Field(description="characters, bytes or decimal precision")
    scale: int
    nullable: bool
    comment: str


class ProposalBody(BaseModel):
    """A proposed `[[collections]]` block, its reasons, and all of it as text for owl-sap.toml."""

    name: str
    source: str
    key: list[str]
    where: str | None = None
    template: str
    metadata: list[str]
    changes: dict[str, str] = Field(examples=[{"method": "full"}], description="how changes would be found")
    model: str | None = Field(
        description="knows the rows' languages; null: the configured one does, or notes name one to install"
    )
    languages: dict[str, int] = Field(examples=[{"de": 96, "en": 104}], description="sampled rows by language")
    sampled: int = Field(description="rows that were read to judge the languages")
    reasons: dict[str, str] = Field(description="by setting")
    guessed: list[str] = Field(description="settings that are guesses")
    notes: list[str]
    create_view: str | None = Field(description="SQL of a view that joins the table with its texts")
    toml: str


class TableDetailBody(BaseModel):
    schema_name: str = Field(alias="schema")
    name: str
    kind: str
    comment: str
    rows: int | None
    key: list[str] = Field(description="the primary key")
    columns: list[ColumnBody]
    proposal: ProposalBody | None
    reason: str | None = Field(description="why there is no proposal")


class PreviewRequest(Body):
    """Which texts to show of a table."""

    template: str | None = Field(
        default=None,
        min_length=1,
        max_length=10_000,
        description="columns in braces; null: as proposed",
        examples=["{MAKTX}. {LTEXT}"],
    )
    samples: int = Field(default=5, ge=0, le=50, description="texts to show")


class SampledTextBody(BaseModel):
    text: str = Field(examples=["Gearbox oil, 20 l drum"], description="cut after 20,000 characters")
    tokens: int = Field(examples=[9], description="of the whole text, without special tokens")


class PreviewBody(BaseModel):
    """A template's texts for a sample of a few hundred rows. Nothing is written or embedded."""

    source: str = Field(examples=["SAPDEMO.MAKT"], description="whose rows: a text table, where the other has no text")
    template: str = Field(examples=["{MAKTX}"])
    samples: list[SampledTextBody]
    histogram: dict[str, int] = Field(examples=[{"0-16": 180, "17-32": 20}], description="rows with text by tokens")
    truncated: int = Field(description="rows that would lose text; 0 with every chunking that is accepted")
    chunked: int = Field(description="rows that would be cut into several chunks")
    empty: int = Field(description="rows without text, which are not embedded")
    unreadable: int = Field(description="rows that cannot be rendered and go to quarantine")
    sampled: int = Field(description="rows that were rendered")
    max_tokens: int = Field(description="what the model takes")


class CreatedBody(BaseModel):
    """The collection is configured; it has no rows before its first sync."""

    collection: str = Field(examples=["materials"])
    toml: str = Field(description="the block that was appended to the settings file")


# Described as the settings of a collection; `Catalog.create` validates it, with the hints of the settings file.
Block = Annotated[CollectionSettings, SkipValidation]


def add(routes: APIRouter, executors: Executors) -> None:
    discovery, rights = executors.service.catalog, executors.service.rights

    @routes.get("/v1/tables", response_model=list[TableBody])
    async def tables(
        schema: Annotated[str | None, Query(description="default: all but SYS and _SYS_...", max_length=127)] = None,
        search: Annotated[str, Query(description="part of a name or a comment", max_length=200)] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
        offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    ) -> Response:
        """Tables and views that the technical user can see, by schema and name."""
        with answered(UnknownTable, "NotFound"):
            call = partial(discovery.tables, schema, search, limit=limit, offset=offset)
            return Json(await executors.run(call))

    # A table's name may hold slashes: /v1/tables/SAPABAP1//BIC/AZD00100, or with %2F.
    @routes.get("/v1/tables/{schema}/{table:path}", response_model=TableDetailBody)
    async def table(
        request: Request,
        schema: str,
        table: str,
        catalog_only: Annotated[bool, Query(description="do not count clients, do not try keys")] = False,
    ) -> Response:
        """Columns, key and comments, and a proposed collection as `owl-sap introspect` makes it."""
        if not catalog_only:  # counts rows of all clients
            rights.check_every_row(caller(request))
        look = partial(discovery.table, TableRef(schema, table), look_at_rows=not catalog_only)
        with answered(UnknownTable, "NotFound"):
            return Json(await executors.run(look))

    @routes.post("/v1/tables/{schema}/{table:path}/preview", response_model=PreviewBody)
    async def preview(request: Request, schema: str, table: str, body: PreviewRequest) -> Response:
        """The texts of a template for the table's rows, exactly as they would be embedded, with their lengths. The
        template's columns are looked up in the catalogue; nothing of the request is sent as SQL."""
        rights.check_every_row(caller(request))  # shows rows of all owners
        look = partial(discovery.preview, TableRef(schema, table), body.template, body.samples)
        with answered(UnknownTable, "NotFound"):
            shown = await executors.run(look, request)
        audit(request, hits=shown["sampled"])
        return Json(shown)

    @routes.post("/v1/collections", response_model=CreatedBody, status_code=201)
    async def create(request: Request, block: Block) -> Response:
        """Create a collection: append its `[[collections]]` block to the settings file and use it at once, without a
        restart. The block is as in the settings file and in a proposal. Table, columns, key, `where` and model are
        checked first; `where` is sent to HANA unchanged, as SQL of the operator. 409 if the name is in use, or the
        file cannot be written: then `toml` is the block to paste."""
        rights.check_every_row(caller(request))  # rows of other owners would be searchable

        def work() -> dict[str, Any]:
            with answered(UnicodeEncodeError, "Unprocessable"):  # unpaired surrogates
                json.dumps(block, ensure_ascii=False).encode()
            return discovery.create(cast("dict[str, Any]", block), caller(request).name)  # not validated yet

        try:
            made = await executors.run(work, request, writes=True)
        except InvalidCollection as error:
            faults = [{"where": ".".join(("body", *map(str, at))), "what": what} for at, what in error.faults]
            return problem(request, 422, str(error), errors=faults[:MOST_FAULTS])
        except NotSaved as error:
            return problem(request, 409, str(error), error=error, toml=error.toml)
        except ConfigurationError as error:
            return problem(request, 409 if isinstance(error, CollectionExists) else 422, str(error), error=error)
        audit(request, collection=made["collection"])
        return Json(made, 201, {"Location": f"/v1/collections/{made['collection']}"})
