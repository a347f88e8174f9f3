"""The routes that embed: /embed, and OpenAI's embeddings and models."""

from __future__ import annotations

import time
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.src.api.errors import BadRequest, UnknownModel, Unprocessable
from app.src.api.requests import Body, Executors, Json, ListsOfNumbers, Numbers, Texts, direct
from app.src.service.service import Service
from connector.model import Vectors


class EmbedRequest(Body):
    """`truncate`: cut texts above the model's limit instead of rejecting them."""

    inputs: str | Texts = Field(examples=[["steel shaft", "Welle aus Stahl"]])
    normalize: bool = True
    truncate: bool = False

    @property
    def texts(self) -> list[str]:
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs


class OpenAIEmbeddings(Body):
    """OpenAI's request. `model` may be left out: there is one. `user` is accepted and not used."""

    input: str | Texts | Numbers | ListsOfNumbers = Field(examples=[["steel shaft", "Welle aus Stahl"]])
    model: str | None = Field(default=None, examples=["all-MiniLM-L6-v2"])
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


class OpenAIEmbedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="base64: little-endian float32")


class OpenAIUsage(BaseModel):
    prompt_tokens: int = Field(description="tokens of the texts, without special tokens")
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
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "message": 'the model "gpt-5" is not served here; this service has "all-MiniLM-L6-v2"',
                    "type": "invalid_request_error",
                    "param": "model",
                    "code": "model_not_found",
                }
            }
        }
    )

    error: OpenAIFault


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What was asked cannot be done; `error.message` says why.", "model": OpenAIError},
    "5XX": {"description": "503, with Retry-After: the engine is away.", "model": OpenAIError},
}


def add(routes: APIRouter, executors: Executors) -> None:
    _add_embed(routes, executors)
    _add_openai(routes, executors)


def _add_openai(routes: APIRouter, executors: Executors) -> None:
    service, started = executors.service, int(time.time())

    def described() -> dict[str, Any]:
        model = service.parts.engine.model
        return {"id": model, "object": "model", "created": started, "owned_by": "owl-sap-connector"}

    @direct(routes, "/v1/embeddings", response_model=OpenAIEmbeddingsResponse, responses=_ERRORS)
    async def embeddings(request: Request, body: OpenAIEmbeddings) -> Response:
        """As OpenAI's: `encoding_format` base64 is little-endian float32. Texts only, no token ids. `dimensions` below
        the model's own only for models trained for it (Matryoshka)."""
        texts = _texts(body)
        executors.check_texts(texts, name="input")
        order = _Order(service, body, texts, partial(executors.spend, request))
        content = order.answer(await executors.embed(request, texts, order.queue))
        return Response(content, media_type=Json.media_type)

    @routes.get("/v1/models", response_model=OpenAIModels, responses=_ERRORS)
    async def models() -> Response:
        """The one model that is served."""
        return Json({"object": "list", "data": [await executors.run(described)]})

    @routes.get("/v1/models/{model:path}", response_model=OpenAIModel, responses=_ERRORS)
    async def one_model(model: str) -> Response:
        """By its name; 404 for any other."""

        def asked() -> dict[str, Any]:
            _check_model(service, model)
            return described()

        return Json(await executors.run(asked))


def _texts(body: OpenAIEmbeddings) -> list[str]:
    given = [body.input] if isinstance(body.input, str) else body.input
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) < len(given):
        raise BadRequest(
            "input holds token ids of OpenAI's tokenizer: send texts "
            "(LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False))",
            param="input",
        )
    return texts


@dataclass(slots=True)
class _Order:
    """The call of one request. `spend` first gets the token count of each text. `tokens`: their sum, once queued."""

    service: Service
    body: OpenAIEmbeddings
    texts: list[str]
    spend: Callable[[list[int]], None]
    tokens: int = 0

    def queue(self) -> Future[Vectors]:
        """Queue the texts. Call it in a thread: it may load a model, and it tokenises."""
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
        return as_openai(vectors, self.service.parts.engine.model, self.tokens, self.body.encoding_format)


def _check_model(service: Service, asked: str) -> None:
    """Check that this model is served; a path before its name is accepted, as in
    sentence-transformers/all-MiniLM-L6-v2."""
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
    """Cut each vector to its first numbers and scale it to length 1."""
    short = vectors[:, :dimensions]
    lengths = np.linalg.norm(short.astype(np.float64), axis=1)
    if not lengths.all():
        raise Unprocessable(f"a vector is all zeros in its first {dimensions} numbers", param="dimensions")
    unit: Vectors = np.ascontiguousarray(short / lengths[:, None], dtype=np.float32)
    return unit


_RAW = "application/octet-stream"
_RAW_TOO: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The vectors, in the order of the texts. `X-Embedding-Count` and `X-Embedding-Dimension` say "
        "how many there are, and how long each is.",
        "content": {_RAW: {"schema": {"type": "string", "format": "binary"}}},
    }
}


def _add_embed(routes: APIRouter, executors: Executors) -> None:
    @direct(routes, "/embed", response_model=list[list[float]], responses=_RAW_TOO)
    async def embed(request: Request, body: EmbedRequest) -> Response:
        """Always a list of vectors; with `Accept: application/octet-stream` raw little-endian float32 instead."""
        executors.check_texts(body.texts, name="inputs")
        vectors = await executors.embed(request, body.texts, partial(_queued, executors, request, body))
        headers = {"X-Embedding-Dimension": str(vectors.shape[1]), "X-Embedding-Count": str(len(vectors))}
        if _RAW in request.headers.get("accept", "").lower():
            return Response(as_bytes(vectors), media_type=_RAW, headers=headers)
        return Response(as_json(vectors), media_type=Json.media_type, headers=headers)


def _queued(executors: Executors, request: Request, body: EmbedRequest) -> Future[Vectors]:
    most = executors.service.parts.engine.max_tokens

    def counted(tokens: list[int]) -> None:
        for position, count in enumerate(tokens):
            if count > most and not body.truncate:
                raise Unprocessable(
                    f'inputs[{position}] has {count} tokens, the model takes {most}; send "truncate": true to cut it'
                )
        executors.spend(request, tokens)

    return executors.service.parts.embedder.embed_later(body.texts, normalize=body.normalize, counted=counted)


def as_json(vectors: Vectors) -> bytes:
    """Return a list of lists as JSON; each float32 can be read back exactly."""
    return orjson.dumps(np.ascontiguousarray(vectors), option=orjson.OPT_SERIALIZE_NUMPY)


def as_bytes(vectors: Vectors) -> bytes:
    """Return little-endian float32, row after row."""
    return vectors.astype("<f4", copy=False).tobytes()


def as_openai(vectors: Vectors, model: str, tokens: int, encoding: str) -> bytes:
    """Return OpenAI's answer to an embeddings request; `encoding` float or base64 (of little-endian float32)."""
    about: dict[str, Any] = {
        "object": "list",
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    if encoding == "base64":
        return b"".join((orjson.dumps(about)[:-1], b',"data":[', *_items_in_base64(vectors), b"]}"))
    rows = enumerate(np.ascontiguousarray(vectors))
    about["data"] = [{"object": "embedding", "index": index, "embedding": row} for index, row in rows]
    return orjson.dumps(about, option=orjson.OPT_SERIALIZE_NUMPY)


def _items_in_base64(vectors: Vectors) -> Iterator[bytes]:
    """Yield the items in pieces. Base64 needs no escapes, so orjson, which takes only strings, is not used."""
    start = b'{"object":"embedding","index":%d,"embedding":"'
    for index, row in enumerate(np.ascontiguousarray(vectors, dtype="<f4")):
        yield start % index
        yield b2a_base64(row, newline=False)
        yield b'"},' if index < len(vectors) - 1 else b'"}'
