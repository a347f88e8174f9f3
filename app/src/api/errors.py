"""Map errors to HTTP: the status of each class, RFC 9457 problem documents, and OpenAI's error shape under the paths
that its clients call. Never shows the message of an unexpected error."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from app.src.access.rates import RateExceeded
from app.src.access.rows import RowsRefused
from app.src.core import backends, queue
from app.src.jobs.journal import JobOver, JobRunning, QueueFull, StateUnusable, UnknownJob
from app.src.service.catalog import CollectionExists, NotPreviewable, NotSaved
from app.src.service.explaining import code_of, explained
from app.src.service.rerank import RerankFailed
from connector import errors


class ProblemBody(BaseModel):
    """RFC 9457, as every error is answered."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "about:blank",
                "title": "Not Found",
                "status": 404,
                "detail": 'there is no collection "material"; did you mean "materials"?',
                "code": "OWL-1004",
                "instance": "/v1/collections/material",
                "request_id": "9b1f0c5e6f0a4e0d8a55b1a0f7a0c3c1",
            }
        }
    )

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str = Field(description="the same for every error of this kind, for good: `owl-sap explain CODE`")
    instance: str
    request_id: str


PROBLEM = "application/problem+json"
OPENAI_PATHS = ("/v1/embeddings", "/v1/models", "/v1/rerank")
RETRY_AFTER = "5"  # seconds, where no better estimate is known
CLIENT_LEFT = 499  # as nginx logs it; not a standard status
MOST_FAULTS = 50  # reported per request: a body of 2 MB may contain 250,000
_log = logging.getLogger(__name__)


# The status of each kind of refusal, by its name in service/explaining/errors.toml. An answer without an exception
# gets the code of the first kind with its status.
KINDS: Mapping[str, int] = {
    "BadRequest": 400,
    "Unauthenticated": 401,
    "Forbidden": 403,
    "NotFound": 404,
    "UnknownModel": 404,
    "MethodNotAllowed": 405,
    "TooSlow": 408,
    "TooMuch": 413,
    "Misdirected": 421,
    "Unprocessable": 422,
    "Crowded": 429,
    "TooManyStreams": 429,
    "HeadTooLarge": 431,
    "ClientLeft": CLIENT_LEFT,  # the answer is dropped and only counted
    "Exception": 500,
    "NotNow": 503,
}


class Refused(Exception):
    """A request that cannot be fulfilled; the message says why. OpenAI's error shape also contains `param` (the
    faulty field) and `code` (a word for machines). `seconds`: until the next try."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.status = kind, KINDS[kind]
        self.param, self.code, self.seconds = param, code, seconds


_BY_STATUS: Mapping[int, tuple[type[Exception], ...]] = {
    403: (RowsRefused,),
    404: (UnknownJob, errors.UnknownCollection, errors.UnknownKey, errors.UnknownRow, errors.UnknownGeneration),
    409: (
        *(JobRunning, JobOver, errors.ModelMismatch, errors.WrongOrigin),
        *(errors.LeaseLost, errors.GenerationRefused, errors.SyncPaused),
        *(CollectionExists, NotSaved),
    ),
    422: (errors.BadFilter, errors.BadDocument, errors.TextsNotEmbeddable, NotPreviewable, backends.NonFinite),
    429: (QueueFull, RateExceeded, queue.EngineOverloaded),
    500: (errors.ConfigurationError, errors.ConnectorError, backends.EngineError),
    503: (
        *(StateUnusable, errors.DatabaseError, errors.GenerationChanged, RerankFailed),
        *(queue.WorkerDied, backends.OutOfMemory, backends.DeviceFailed, backends.EngineClosed),
    ),
}
STATUS = {kind: status for status, kinds in _BY_STATUS.items() for kind in kinds}  # subclasses inherit the status
WHY_CRASHED = "unexpected error; the log of the service has it under this request id"


def retry_after(error: Exception) -> str | None:
    """Return the measured Retry-After in whole seconds, or None."""
    tells = queue.EngineOverloaded | QueueFull | RateExceeded | Refused
    measured = error.seconds if isinstance(error, tells) else None
    return None if measured is None else str(max(1, math.ceil(measured)))


def problem(
    request: Request,
    status: int,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    error: Exception | None = None,
    **more: Any,
) -> JSONResponse:
    """Return a problem document (RFC 9457) with the members `more`, or OpenAI's shape under OPENAI_PATHS. Code and
    field come from `error`; without it, the code comes from the status."""
    headers = dict(headers or {})
    if status in (429, 503):
        headers.setdefault("Retry-After", RETRY_AFTER)
    if request.url.path.startswith(OPENAI_PATHS):
        # Types as OpenAI's API reference lists them; its clients choose their exception by the status alone.
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else kinds.get(status)
        param, code = (error.param, error.code) if isinstance(error, Refused) else (None, None)
        fault = {"message": detail, "type": kind or "invalid_request_error", "param": param, "code": code}
        return JSONResponse({"error": fault}, status, headers)
    places = {"instance": request.url.path, "request_id": request.scope.get("owl_sap.request_id", "")}
    return JSONResponse(document(status, detail, error) | places | more, status, headers, media_type=PROBLEM)


def document(status: int, detail: str, error: Exception | None = None) -> dict[str, Any]:
    """Return the members of every problem document. `code` is for `owl-sap explain`."""
    kind = next((kind for kind, each in KINDS.items() if each == status), "BadRequest")
    kind = error.kind if isinstance(error, Refused) else kind
    code = explained()[kind].code if error is None or isinstance(error, Refused) else code_of(error)
    title = "Client Closed Request" if status == CLIENT_LEFT else HTTPStatus(status).phrase
    return {"type": "about:blank", "title": title, "status": status, "detail": detail, "code": code}


def answer_to(request: Request, error: Exception) -> JSONResponse | None:
    """Return the answer to an error of the product or of routing; None for an unexpected error."""
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:  # the framework lists only the first route's methods
            routes = [route for route in request.app.routes if isinstance(route, Route)]
            fitting = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            headers["Allow"] = ", ".join(sorted({method for route in fitting for method in route.methods or ()}))
        return problem(request, error.status_code, str(error.detail), headers=headers)
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), None)
    status = error.status if isinstance(error, Refused) else status
    if status is None:
        return None
    headers = {} if (seconds := retry_after(error)) is None else {"Retry-After": seconds}
    return problem(request, status, str(error), headers=headers, error=error)


def install(app: FastAPI) -> None:
    """Answer validation and routing errors with a problem document instead of FastAPI's own."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = error.errors()
        faults = []
        for fault in found[:MOST_FAULTS]:
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"])
            what = str(fault["msg"]).removeprefix("Value error, ")
            if fault["type"] == "json_invalid":
                what += f": {(fault.get('ctx') or {}).get('error', 'not valid JSON')}"
            elif fault["type"] == "extra_forbidden":
                what = "unknown member"
            faults.append({"where": where.removeprefix("."), "what": what})
        detail = "; ".join(f"{fault['where']}: {fault['what']}" for fault in faults[:5])
        if "json" not in request.headers.get("content-type", "") and request.headers.get("content-length", "0") != "0":
            detail += "; send the header Content-Type: application/json"
        first: Sequence[Any] = found[0]["loc"] if found else ()
        param = str(first[1]) if len(first) > 1 and first[0] == "body" else None
        return problem(request, 422, detail, error=Refused("Unprocessable", detail, param=param), errors=faults)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        answer = answer_to(request, error)
        assert answer is not None
        return answer


def log_without_text(error: Exception, request_id: str) -> None:
    """Log the class and traceback of an error; its text may hold row data."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("request %s failed: %s\n%s", request_id, type(error).__name__, frames)
