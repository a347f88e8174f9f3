"""The reranking routes: /rerank, and /v1/rerank for clients of Cohere, Jina and others."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from app.src.api.embeddings import OPENAI_ERRORS
from app.src.api.errors import Refused
from app.src.api.requests import BOUNDED, Body, Executors, Json, Texts, direct
from app.src.service.rerank import NO_RERANKER, falling
from app.src.settings.model import UNLIMITED
from connector.hana.embedding import estimated_tokens


class TextDocument(Body):
    text: str


def _document(given: Any, read: ValidatorFunctionWrapHandler) -> str | TextDocument:
    """Read a document. Its error is one, and does not name our types."""
    try:
        return cast("str | TextDocument", read(given))
    except ValidationError:
        raise PydanticCustomError("document", 'must be a text, or an object with "text" alone') from None


class RerankRequest(Body):
    """`model` is optional, because only one reranker is served here."""

    query: str = Field(examples=["oil pump"])
    documents: Annotated[list[Annotated[str | TextDocument, WrapValidator(_document)]], BOUNDED] = Field(
        examples=[["Hydraulic oil pump", "Office chair"]]
    )
    top_n: int | None = Field(default=None, ge=1, description="the best so many; null: all")
    return_documents: bool = Field(default=False, description="repeat the text of each result")
    model: str | None = Field(default=None, description="the name of the configured reranker, as explain shows it")


class CompatibleRerankRequest(RerankRequest):
    """`max_tokens_per_doc`, `max_chunks_per_doc` and `rank_fields` of Cohere's clients are ignored: the reranker reads
    as much of each text as it can, and a document has no other field."""

    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    rank_fields: Texts | None = None


class RerankedDocument(BaseModel):
    index: int = Field(description="place in the request, from 0")
    relevance_score: float = Field(description="greater is better; the scale depends on the reranker")
    document: TextDocument | None = Field(default=None, description="left out unless return_documents")


class RerankResponse(BaseModel):
    results: list[RerankedDocument] = Field(description="best first")


def add(routes: APIRouter, executors: Executors) -> None:
    service = executors.service

    async def rerank(request: Request, body: RerankRequest) -> Response:
        """Score texts by how well they answer a query, with the configured reranker; best first. Without a reranker
        422."""
        reranker, name = service.reranker, service.reranker.settings.name
        if not reranker.on:
            raise Refused("Unprocessable", NO_RERANKER)
        if body.model is not None and body.model.rpartition("/")[2] != name.rpartition("/")[2]:
            why = f'the reranker "{body.model}" is not served here; this service has "{name}"'
            raise Refused("UnknownModel", why, param="model", code="model_not_found")
        if not body.query.strip():
            raise Refused("Unprocessable", "query is empty", param="query")
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        executors.check_texts(body.query, name="query")
        executors.check_texts(texts, name="documents")

        def scored() -> list[float]:
            if service.access.settings.tokens != UNLIMITED:
                query = estimated_tokens(body.query)
                executors.spend(request, [query + estimated_tokens(text) for text in texts], whole=True)
            return reranker.scores(body.query, texts)

        def shown(place: int) -> dict[str, Any]:
            document = {"document": {"text": texts[place]}} if body.return_documents else {}
            return {"index": place, "relevance_score": scores[place], **document}

        scores = await executors.run(scored, request)
        return Json({"results": [shown(place) for place in falling(scores)[: body.top_n]]})

    async def compatible_rerank(request: Request, body: CompatibleRerankRequest) -> Response:
        """`POST /rerank` for clients of Cohere and Jina, with errors in OpenAI's shape. Cohere's `max_tokens_per_doc`,
        `max_chunks_per_doc` and `rank_fields` are ignored."""
        return await rerank(request, body)

    direct(routes, "/rerank", response_model=RerankResponse)(rerank)
    direct(routes, "/v1/rerank", response_model=RerankResponse, responses=OPENAI_ERRORS)(compatible_rerank)
