"""OpenAI's embeddings and models routes, for clients that speak them. Errors take OpenAI's shape in `errors`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from app.src.api import forms, schemas
from app.src.api.desk import Desk, Json
from app.src.api.direct import direct
from app.src.api.errors import BadRequest, UnknownModel, Unprocessable
from app.src.service import Service

_CONTENT = {"application/json": {"schema": schemas.OpenAIError.model_json_schema()}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What was asked cannot be done; `error.message` says why.", "content": _CONTENT},
    "5XX": {"description": "503, with Retry-After: the engine is away.", "content": _CONTENT},
}


def add(routes: APIRouter, desk: Desk) -> None:
    service, started = desk.service, int(time.time())

    def described() -> dict[str, Any]:
        return {"id": service.engine.model, "object": "model", "created": started, "owned_by": "owl-sap-connector"}

    @direct(routes, "/v1/embeddings", response_model=schemas.OpenAIEmbeddingsResponse, responses=_ERRORS)
    async def embeddings(request: Request, body: schemas.OpenAIEmbeddings) -> Response:
        """As OpenAI's: `encoding_format` base64 is little-endian float32. Texts only, no token ids. `dimensions` below
        the model's own only for models trained for it (Matryoshka)."""
        texts = _texts(body)
        desk.check_texts(texts, name="input")
        content = await desk.run(partial(_embed, service, body, texts), request)
        return Response(content, media_type=Json.media_type)

    @routes.get("/v1/models", response_model=schemas.OpenAIModels, responses=_ERRORS)
    async def models() -> Response:
        """The one model that is served."""
        return Json({"object": "list", "data": [await desk.run(described)]})

    @routes.get("/v1/models/{model:path}", response_model=schemas.OpenAIModel, responses=_ERRORS)
    async def one_model(model: str) -> Response:
        """By its name; 404 for any other."""

        def asked() -> dict[str, Any]:
            _check_model(service, model)
            return described()

        return Json(await desk.run(asked))


def _texts(body: schemas.OpenAIEmbeddings) -> list[str]:
    given = [body.input] if isinstance(body.input, str) else body.input
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) < len(given):
        raise BadRequest(
            "input holds token ids, which belong to OpenAI's own tokenizer: send texts "
            "(LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False))",
            param="input",
        )
    return texts


def _embed(service: Service, body: schemas.OpenAIEmbeddings, texts: list[str]) -> bytes:
    """The answer."""
    engine = service.engine
    if body.model is not None:
        _check_model(service, body.model)
    _check_dimensions(body.dimensions, engine.dimension, engine.matryoshka)
    tokens = engine.count_tokens(texts)
    for position, count in enumerate(tokens):
        if count > engine.max_tokens:
            raise BadRequest(
                f"input[{position}] has {count} tokens, the model takes {engine.max_tokens}; send shorter texts "
                'or use POST /embed with "truncate": true',
                param="input",
                code="context_length_exceeded",
            )
    vectors = service.embed(texts)
    if body.dimensions is not None and body.dimensions < engine.dimension:
        vectors = _cut(vectors, body.dimensions)
    return forms.as_openai(vectors, engine.model, sum(tokens), body.encoding_format)


def _check_model(service: Service, asked: str) -> None:
    """The model's name, with or without a path before it: sentence-transformers/all-MiniLM-L6-v2 too."""
    served, configured = service.engine.model, service.settings.embedding.model
    same_but_for_a_path = asked.rpartition("/")[2] == served.rpartition("/")[2] and not ("/" in asked and "/" in served)
    if asked not in (served, configured) and not same_but_for_a_path:
        raise UnknownModel(
            f'the model "{asked}" is not served here; this service has "{served}"',
            param="model",
            code="model_not_found",
        )


def _check_dimensions(asked: int | None, own: int, shorter: Sequence[int]) -> None:
    if asked is None or asked == own or (asked < own and asked in shorter):
        return
    which = "was not trained to be cut (Matryoshka)"
    if shorter:
        lengths = f"any length from {shorter[0]}" if isinstance(shorter, range) else ", ".join(map(str, shorter))
        which = f"can be cut to {lengths}"
    raise BadRequest(
        f"dimensions is {asked}; the model gives {own} numbers and {which}; leave dimensions out", param="dimensions"
    )


def _cut(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first numbers of each vector, of length 1 again."""
    short = vectors[:, :dimensions]
    lengths = np.linalg.norm(short.astype(np.float64), axis=1)
    if not lengths.all():
        raise Unprocessable(f"a vector is all zeros in its first {dimensions} numbers", param="dimensions")
    unit: NDArray[np.float32] = np.ascontiguousarray(short / lengths[:, None], dtype=np.float32)
    return unit
