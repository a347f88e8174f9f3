"""OpenAI's embeddings and models routes, for clients that speak them. Errors take OpenAI's shape in `errors`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from app.src.api import forms, schemas
from app.src.api.desk import Desk, Json
from app.src.api.direct import direct
from app.src.api.errors import BadRequest, UnknownModel, Unprocessable
from app.src.service.service import Service
from connector.model import Vectors

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What was asked cannot be done; `error.message` says why.", "model": schemas.OpenAIError},
    "5XX": {"description": "503, with Retry-After: the engine is away.", "model": schemas.OpenAIError},
}


def add(routes: APIRouter, desk: Desk) -> None:
    service, started = desk.service, int(time.time())

    def described() -> dict[str, Any]:
        model = service.parts.engine.model
        return {
            "id": model,
            "object": "model",
            "created": started,
            "owned_by": "owl-sap-connector",
        }

    @direct(routes, "/v1/embeddings", response_model=schemas.OpenAIEmbeddingsResponse, responses=_ERRORS)
    async def embeddings(request: Request, body: schemas.OpenAIEmbeddings) -> Response:
        """As OpenAI's: `encoding_format` base64 is little-endian float32. Texts only, no token ids. `dimensions` below
        the model's own only for models trained for it (Matryoshka)."""
        texts = _texts(body)
        desk.check_texts(texts, name="input")
        order = _Order(service, body, texts, partial(desk.spend, request))
        content = order.answer(await desk.embed(request, texts, order.queue))
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


@dataclass(slots=True)
class _Order:
    """What one request asks of the service. `spend` is told the tokens of each text before they are computed.
    `tokens`: of all its texts together, known once they are queued."""

    service: Service
    body: schemas.OpenAIEmbeddings
    texts: list[str]
    spend: Callable[[list[int]], None]
    tokens: int = 0

    def queue(self) -> Future[Vectors]:
        """In a thread, for a model may have to be loaded, and texts are tokenised."""
        engine, body = self.service.parts.engine, self.body
        if body.model is not None:
            _check_model(self.service, body.model)
        _check_dimensions(body.dimensions, engine.dimension, engine.matryoshka)
        return self.service.parts.embedder.embed_later(self.texts, counted=self._counted)

    def _counted(self, tokens: list[int]) -> None:
        most = self.service.parts.engine.max_tokens
        for position, count in enumerate(tokens):
            if count > most:
                raise BadRequest(
                    f"input[{position}] has {count} tokens, the model takes {most}; send shorter texts "
                    'or use POST /embed with "truncate": true',
                    param="input",
                    code="context_length_exceeded",
                )
        self.spend(tokens)
        self.tokens = sum(tokens)

    def answer(self, vectors: Vectors) -> bytes:
        wanted = self.body.dimensions
        if wanted is not None and wanted < vectors.shape[1]:
            vectors = _cut(vectors, wanted)
        return forms.as_openai(vectors, self.service.parts.engine.model, self.tokens, self.body.encoding_format)


def _check_model(service: Service, asked: str) -> None:
    """The model's name, with or without a path before it: sentence-transformers/all-MiniLM-L6-v2 too."""
    served, configured = service.parts.engine.model, service.settings.embedding.model
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


def _cut(vectors: Vectors, dimensions: int) -> Vectors:
    """The first numbers of each vector, of length 1 again."""
    short = vectors[:, :dimensions]
    lengths = np.linalg.norm(short.astype(np.float64), axis=1)
    if not lengths.all():
        raise Unprocessable(f"a vector is all zeros in its first {dimensions} numbers", param="dimensions")
    unit: Vectors = np.ascontiguousarray(short / lengths[:, None], dtype=np.float32)
    return unit
