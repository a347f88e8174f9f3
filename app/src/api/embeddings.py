"""The embedding routes: /embed, and OpenAI's /v1/embeddings and /v1/models."""

from __future__ import annotations

import time
from base64 import b64encode
from concurrent.futures import Future
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from app.src.api.errors import Refused
from app.src.api.requests import Body, Executors, Json, ListsOfNumbers, Numbers, Texts, direct
from app.src.core.backends import InputType
from app.src.service.service import Service
from connector.model import Vectors

_InputType = Annotated[
    InputType,
    Field(
        description="Some models embed a search text (query) otherwise than a text to be found (document).",
        examples=["query"],
    ),
]


class EmbedRequest(Body):
    """`truncate`: cut texts above the model's limit instead of rejecting them."""

    inputs: str | Texts = Field(examples=[["steel shaft", "Welle aus Stahl"]])
    input_type: _InputType = "document"
    normalize: bool = True
    truncate: bool = False


class OpenAIEmbeddings(Body):
    """OpenAI's request, and `input_type`. `model` is optional, because only one model is served here. `user` is
    ignored."""

    input: str | Texts | Numbers | ListsOfNumbers = Field(examples=[["steel shaft", "Welle aus Stahl"]])
    model: str | None = Field(default=None, examples=["all-MiniLM-L6-v2"])
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    input_type: _InputType = "document"
    user: str | None = None


class OpenAIEmbedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="base64: little-endian float32")


class OpenAIUsage(BaseModel):
    """Tokens of the texts, without special tokens."""

    prompt_tokens: int
    total_tokens: int


class OpenAIEmbeddingsResponse(BaseModel):
    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: OpenAIUsage


class OpenAIModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int = Field(description="POSIX time")
    owned_by: str


class OpenAIModels(BaseModel):
    object: Literal["list"]
    data: list[OpenAIModel]


class OpenAIFault(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    error: OpenAIFault = Field(
        examples=[
            {
                "message": 'the model "gpt-5" is not served here; this service has "all-MiniLM-L6-v2"',
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        ]
    )


OPENAI_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request was refused; `error.message` says why.", "model": OpenAIError},
    "5XX": {"description": "503, with Retry-After: the engine is unavailable.", "model": OpenAIError},
}
_RAW = "application/octet-stream"
_RAW_TOO: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The vectors, in the order of the texts. `X-Embedding-Count` and `X-Embedding-Dimension` give "
        "their number and dimension.",
        "content": {_RAW: {"schema": {"type": "string", "format": "binary"}}},
    }
}


def add_embed(routes: APIRouter, executors: Executors) -> None:
    service = executors.service

    @direct(routes, "/embed", response_model=list[list[float]], responses=_RAW_TOO)
    async def embed(request: Request, body: EmbedRequest) -> Response:
        """Always return a list of vectors; for `Accept: application/octet-stream`, raw little-endian float32."""
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        executors.check_texts(body.inputs, name="inputs")

        def counted(tokens: list[int]) -> None:
            if not body.truncate:
                fault = _too_long(tokens, service.parts.engine.max_tokens, "inputs")
                if fault is not None:
                    raise Refused("Unprocessable", f'{fault}; send "truncate": true to cut it')
            executors.spend(request, tokens)

        def queue() -> Future[Vectors]:
            embed_later, input_type = service.parts.embedder.embed_later, body.input_type
            return embed_later(texts, input_type=input_type, normalize=body.normalize, counted=counted)

        vectors = await executors.embed(request, texts, queue)
        headers = {"X-Embedding-Dimension": str(vectors.shape[1]), "X-Embedding-Count": str(len(vectors))}
        if _RAW in request.headers.get("accept", "").lower():
            return Response(vectors.astype("<f4", copy=False).tobytes(), media_type=_RAW, headers=headers)
        return Json(np.ascontiguousarray(vectors), headers=headers)


def add_openai(routes: APIRouter, executors: Executors) -> None:
    service, started = executors.service, int(time.time())

    @direct(routes, "/v1/embeddings", response_model=OpenAIEmbeddingsResponse, responses=OPENAI_ERRORS)
    async def embeddings(request: Request, body: OpenAIEmbeddings) -> Response:
        """Embed texts as OpenAI's API does; token ids are rejected. `encoding_format` base64 is little-endian float32.
        Only models trained for it (Matryoshka) accept `dimensions` below their own."""
        given = [body.input] if isinstance(body.input, str) else body.input
        texts = [item for item in given if isinstance(item, str)]
        if len(texts) < len(given):
            raise Refused(
                "BadRequest",
                "input holds token ids of OpenAI's tokenizer: send texts "
                "(LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False))",
                param="input",
            )
        executors.check_texts(body.input if isinstance(body.input, str) else texts, name="input")
        used = 0

        def counted(tokens: list[int]) -> None:
            nonlocal used
            fault = _too_long(tokens, service.parts.engine.max_tokens, "input")
            if fault is not None:
                why = f'{fault}; send shorter texts or use POST /embed with "truncate": true'
                raise Refused("BadRequest", why, param="input", code="context_length_exceeded")
            executors.spend(request, tokens)
            used = sum(tokens)

        def queue() -> Future[Vectors]:
            _check_model(service, body.model, body.dimensions)
            return service.parts.embedder.embed_later(texts, input_type=body.input_type, counted=counted)

        vectors = np.ascontiguousarray(await executors.embed(request, texts, queue), dtype="<f4")
        if body.dimensions is not None and body.dimensions < vectors.shape[1]:
            short = vectors[:, : body.dimensions].astype(np.float64)
            lengths = np.linalg.norm(short, axis=1, keepdims=True)
            if not lengths.all():
                why = f"the first {body.dimensions} values of a vector are all zero"
                raise Refused("Unprocessable", why, param="dimensions")
            vectors = (short / lengths).astype("<f4")
        rows = vectors if body.encoding_format == "float" else (b64encode(row).decode() for row in vectors)
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        usage = {"prompt_tokens": used, "total_tokens": used}
        return Json({"object": "list", "data": data, "model": service.parts.engine.model, "usage": usage})

    def described(asked: str | None = None) -> dict[str, Any]:
        _check_model(service, asked)
        model = service.parts.engine.model
        return {"id": model, "object": "model", "created": started, "owned_by": "owl-sap-connector"}

    @routes.get("/v1/models", response_model=OpenAIModels, responses=OPENAI_ERRORS)
    async def models() -> Response:
        """List the one model that these routes serve."""
        return Json({"object": "list", "data": [await executors.run(described)]})

    @routes.get("/v1/models/{model:path}", response_model=OpenAIModel, responses=OPENAI_ERRORS)
    async def one_model(model: str) -> Response:
        """Describe the model of this name; 404 for any other name."""
        return Json(await executors.run(partial(described, model)))


def _check_model(service: Service, asked: str | None, dimensions: int | None = None) -> None:
    """Raise UnknownModel for another model, and BadRequest for dimensions that the served model's vectors
    cannot be cut to. Accept a path before the name, as in sentence-transformers/all-MiniLM-L6-v2."""
    engine = service.parts.engine
    known = asked is None or asked in (engine.model, service.settings.embedding.model)
    if asked is not None and not known:
        same = asked.rpartition("/")[2] == engine.model.rpartition("/")[2]
        if not same or ("/" in asked and "/" in engine.model):
            why = f'the model "{asked}" is not served here; this service has "{engine.model}"'
            raise Refused("UnknownModel", why, param="model", code="model_not_found")
    own, shorter = engine.dimension, engine.matryoshka
    if dimensions is not None and dimensions != own and (dimensions > own or dimensions not in shorter):
        which = "was not trained for fewer (Matryoshka)"
        if shorter:
            lengths = f"any length from {shorter[0]}" if isinstance(shorter, range) else ", ".join(map(str, shorter))
            which = f"can be cut to {lengths}"
        why = f"dimensions is {dimensions}; the model has {own} and {which}; omit dimensions"
        raise Refused("BadRequest", why, param="dimensions")


def _too_long(tokens: list[int], most: int, name: str) -> str | None:
    """Return a message about the first text above the model's limit, or None."""
    faults = (
        f"{name}[{at}] has {count} tokens; the limit is {most}" for at, count in enumerate(tokens) if count > most
    )
    return next(faults, None)
